"""How a shape is factored: which dims are rows, which are columns, and what is kept for it. Pure Python, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod


@dataclass(frozen=True)
class Plan:
    """The factoring of one shape. Dims that are neither rows nor columns are a batch of matrices.

    Attributes:
        shape: the tensor's shape.
        rows: the dims that R keeps and C averages over; empty where the shape is not factored.
        cols: the dims that C keeps and R averages over; empty where the shape is not factored.
    """

    shape: tuple[int, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]

    @property
    def factored(self) -> bool:
        """Whether R and C stand in for a full V."""
        return bool(self.rows)

    @property
    def n(self) -> int:
        """The number of rows of each matrix."""
        return prod(self.shape[i] for i in self.rows)

    @property
    def m(self) -> int:
        """The number of columns of each matrix."""
        return prod(self.shape[i] for i in self.cols)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of R: the tensor's, with 1 for every column dim, so that R * C broadcasts to V."""
        return tuple(1 if i in self.cols else size for i, size in enumerate(self.shape))

    @property
    def col_shape(self) -> tuple[int, ...]:
        """The shape of C: the tensor's, with 1 for every row dim."""
        return tuple(1 if i in self.rows else size for i, size in enumerate(self.shape))


@lru_cache(maxsize=4096)
def plan(shape: tuple[int, ...]) -> Plan:
    """The plan that torch, transformers and towhee follow: the last two dims of anything with two or more.

    >>> plan((512, 256, 3, 3)).row_shape, plan((512, 256, 3, 3)).col_shape
    ((512, 256, 3, 1), (512, 256, 1, 3))
    >>> plan((7,)).factored
    False
    """
    if len(shape) < 2:
        return Plan(shape, (), ())
    return Plan(shape, (len(shape) - 2,), (len(shape) - 1,))
