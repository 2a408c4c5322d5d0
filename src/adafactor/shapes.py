"""How a shape is factored: which dims are rows, which are columns, and what is kept for it. Pure Python, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

MODES = ("last", "largest", "matrix")
"""What a user may ask for; see Factoring."""


@dataclass(frozen=True)
class Plan:
    """The factoring of one shape. Dims that are neither rows nor columns are a batch of matrices.

    Attributes:
        shape: the tensor's shape.
        rows: the dims that R keeps and C averages over; empty where the shape is not factored.
        cols: the dims that C keeps and R averages over; empty where the shape is not factored.
        slices: how many leading dims make the tensor a stack, each slice with a scale and clipping of its own.
        of: the plan of the whole tensor where this is one of a shard of it, else None.
        speaks: whether this shard counts where several have the same statistics, and one is to.
    """

    shape: tuple[int, ...]
    rows: tuple[int, ...] = ()
    cols: tuple[int, ...] = ()
    slices: int = 0
    of: Plan | None = None
    speaks: bool = True

    @property
    def whole(self) -> Plan:
        """The plan of the whole tensor, whose sizes all means are divided by."""
        return self if self.of is None else self.of

    def shard(self, shape: tuple[int, ...], *, speaks: bool) -> Plan:
        """The plan of a shard of this shape: the same dims, whatever their sizes are here."""
        return replace(self, shape=shape, of=self, speaks=speaks)

    @property
    def slice(self) -> Plan:
        """The plan of each slice of a stack along its first dim."""
        rows, cols = (tuple(i - 1 for i in dims) for dims in (self.rows, self.cols))
        return Plan(
            self.shape[1:], rows, cols, self.slices - 1, None if self.of is None else self.of.slice, self.speaks
        )

    @property
    def factored(self) -> bool:
        """Whether R and C stand in for a full V."""
        return bool(self.rows)

    @property
    def leads_with_rows(self) -> bool:
        """Whether the rows are of earlier dims than the columns; "largest" takes the larger dim for columns."""
        return self.rows < self.cols

    @cached_property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @cached_property
    def n(self) -> int:
        """The number of rows of each matrix."""
        return prod(self.shape[i] for i in self.rows)

    @cached_property
    def m(self) -> int:
        """The number of columns of each matrix."""
        return prod(self.shape[i] for i in self.cols)

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of R: the tensor's, with 1 for every column dim, so that R * C broadcasts to V."""
        return tuple(1 if i in self.cols else size for i, size in enumerate(self.shape))

    @cached_property
    def col_shape(self) -> tuple[int, ...]:
        """The shape of C: the tensor's, with 1 for every row dim."""
        return tuple(1 if i in self.rows else size for i, size in enumerate(self.shape))

    @cached_property
    def mean_shape(self) -> tuple[int, ...]:
        """The shape of mean(C): the tensor's, with 1 for every row and column dim."""
        return tuple(1 if i in self.rows + self.cols else size for i, size in enumerate(self.shape))

    @cached_property
    def kept(self) -> int:
        """How many numbers the statistics are: R and C together, or V."""
        return prod(self.row_shape) + prod(self.col_shape) if self.factored else self.numel


@dataclass(frozen=True)
class Factoring:
    """Which shapes are factored, and over which dims.

    Attributes:
        mode: "last", the last two dims; "largest", the two largest (the later of equals; the columns are the largest);
            "matrix", the contiguous split into rows and columns that keeps the fewest numbers (of equals the first),
            and a full V where that is no larger; "timm", dims 0 and 1 from three dims up where both are large enough,
            else the last two; "none", a full V.
        min_dim: the fewest rows and columns that are worth factors (for "timm", one fewer than that).
        batch_dims: leading dims over which a tensor is a stack, see Plan.
    """

    mode: str = "last"
    min_dim: int = 0
    batch_dims: int = 0

    @lru_cache(maxsize=4096)  # noqa: B019, a frozen value lives as long as it is used
    def plan(self, shape: tuple[int, ...]) -> Plan:
        """The plan of a shape.

        >>> Factoring("last").plan((512, 512, 3, 3)).kept, Factoring("matrix").plan((512, 512, 3, 3)).kept
        (1572864, 5120)
        >>> Factoring("largest", min_dim=128).plan((512, 64)).factored
        False
        """
        slices = min(self.batch_dims, len(shape))
        best = Plan(shape, slices=slices)
        fewest = best.kept if self.mode == "matrix" else None
        for rows, cols in self._splits(shape):
            found = Plan(shape, rows, cols, slices)
            large = min(found.n, found.m) >= self.min_dim + (self.mode == "timm")
            if large and (fewest is None or found.kept < fewest):
                best, fewest = found, found.kept
                if self.mode != "matrix":
                    break
        return best

    def _splits(self, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The row and column dims to try, in order of preference."""
        free = range(self.batch_dims, len(shape))
        if len(free) < 2:
            return
        if self.mode == "matrix":
            yield from ((tuple(free[:k]), tuple(free[k:])) for k in range(1, len(free)))
        elif self.mode == "largest":
            *_, row, col = sorted(free, key=lambda i: shape[i])
            yield (row,), (col,)
        elif self.mode != "none":
            if self.mode == "timm" and len(free) > 2:
                yield (free[0],), (free[1],)
            yield (free[-2],), (free[-1],)
