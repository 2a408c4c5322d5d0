"""How a plan's rows and columns lie in memory. Pure Python, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from ..shapes import Plan


class Matrices(NamedTuple):
    """A tensor in memory as a stack of matrices, [batch, n, m]; without factors as one row.

    swapped: the plan's columns are the rows in memory.
    order: the dims that are larger than 1, the outermost in memory first.
    """

    batch: int
    n: int
    m: int
    swapped: bool
    order: tuple[int, ...]


def outward(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """The dims that are larger than 1, the outermost in memory first; None where there are gaps or overlaps.

    >>> outward((2, 3, 4), (12, 4, 1)), outward((2, 3), (1, 2)), outward((2, 3), (4, 1))
    ((0, 1, 2), (1, 0), None)
    """
    order = sorted((i for i, size in enumerate(shape) if size > 1), key=lambda i: -stride[i])
    return tuple(order) if is_dense(shape, stride, order) else None


def is_dense(shape: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    """Whether a tensor's elements lie one behind the other, its dims in this order."""
    step = 1
    for i in reversed(order):
        if shape[i] > 1:
            if stride[i] != step:
                return False
            step *= shape[i]
    return True


def matrices(plan: Plan, stride: Sequence[int]) -> Matrices | None:
    """A tensor's matrices in memory; None where it is not dense, or its rows or columns are not one run of dims.

    >>> from ..shapes import Factoring
    >>> matrices(Factoring("last").plan((5, 2, 3)), (6, 3, 1))
    Matrices(batch=5, n=2, m=3, swapped=False, order=(0, 1, 2))
    >>> matrices(Factoring("last").plan((5, 2, 3)), (1, 15, 5)) is None
    True
    """
    order = outward(plan.shape, stride)
    if order is None:
        return None
    if not plan.factored:
        return Matrices(1, 1, plan.numel, False, order)
    kinds = ["row" if i in plan.rows else "column" if i in plan.cols else "batch" for i in order]
    runs = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    swapped = runs[-2:] == ["column", "row"]
    if len(set(runs)) != len(runs) or "batch" in runs[1:]:
        return None
    n, m = (plan.m, plan.n) if swapped else (plan.n, plan.m)
    return Matrices(prod(plan.shape) // (n * m), n, m, swapped, order)


def lines(shape: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> list[tuple[int, int]]:
    """Sizes, and strides of something that counts elements, of as few dims as say the same; from the outermost inwards.

    Args:
        shape: a tensor's.
        strides: what a step along each dim adds to the count.
        order: the dims that are larger than 1, the outermost in memory first.

    >>> lines((5, 3, 4), (12, 4, 1), (0, 1, 2)), lines((5, 3, 4), (12, 4, 1), (0, 2, 1))
    ([(60, 1)], [(5, 12), (4, 1), (3, 4)])
    """
    found: list[tuple[int, int]] = []
    for i in order:
        if found and found[-1][1] == shape[i] * strides[i]:
            found[-1] = found[-1][0] * shape[i], strides[i]
        else:
            found.append((shape[i], strides[i]))
    return found or [(1, 1)]
