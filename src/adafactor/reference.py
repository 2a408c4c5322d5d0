"""The specification: observe, average, measure and apply in plain PyTorch, one tensor after the other.

In float64 it is the oracle that every other backend is held to. Only sums along dims and vector_norm are used: a full
sum() depends on the number of threads. u is kept between measure and apply, so a step holds one tensor of a wave's size
in the arithmetic's dtype (two while a full V takes in its gradient; and, for parameters of lower precision, copies of
one parameter and its gradient).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from .sweeps import Batch, Item, Scalar, scalars, sizes

WAVE = 8 << 20
"""Bytes of a wave, which stay in cache from sweep to sweep."""


STAGE = 1 << 13
"""Elements that a norm sums at a time."""


class Kept(NamedTuple):
    """What goes from sweep to sweep: each factored tensor's mean(C) or its floor, and each tensor's u."""

    means: list[Tensor | None]
    u: list[Tensor]


def count(steps: Sequence[Tensor]) -> Tensor:
    """Add one to each step count. Returns them, [k] on the CPU."""
    torch._foreach_add_(list(steps), 1.0)
    return torch.stack(list(steps))


def observe(batch: Batch) -> list[tuple[Tensor, Tensor] | None]:
    """Row and column sums of |g|^2 in R's and C's shapes, and sums of p^2 into p2. Writes no state."""
    if batch.p2 is not None:
        batch.p2.copy_(torch.stack([norm(p.to(batch.dtype)) for p in batch.columns.p]).square_())
    return [factor_sums(item, batch.dtype) for item in batch.items]


def average(batch: Batch, sums: list[tuple[Tensor, Tensor] | None]) -> None:
    """Take the first sweep's sums into R and C, and keep mean(C) of each factored tensor, at least its floor.

    mean(C) = mean(R): taken from C on every path, since a shard of rows has C whole.
    """
    n = batch.numbers
    means: list[Tensor | None] = []
    columns = (scalars(n.b), scalars(n.added), scalars(n.floor))
    for item, factors, b, added, floor in zip(batch.items, sums, *columns, strict=True):
        if factors is None or item.R is None or item.C is None:
            means.append(None)
            continue
        for statistic, total, size in zip((item.R, item.C), factors, (item.plan.m, item.plan.n), strict=True):
            mean = total.div_(size)
            statistic.lerp_(mean.add_(added) if batch.form.added else mean, b)
        means.append(item.C.mean(dim=item.plan.cols, keepdim=True).clamp_(min=floor))
    batch.kept = Kept(means, [])


def measure(batch: Batch) -> Tensor:
    """[k] sums of u^2. Brings a full V up to date first."""
    n, (means, u) = batch.numbers, batch.kept
    for item, mean, b, added, cap in zip(batch.items, means, *map(scalars, (n.b, n.added, n.cap)), strict=True):
        g = item.g.to(batch.dtype)
        if item.V is not None:
            squares = g * g
            item.V.lerp_(squares.add_(added) if batch.form.added else squares, b)
        u.append(inverse_root(item, mean, cap).mul_(g))
    return torch.stack([norm(each) for each in u]).square_()


def apply(batch: Batch, u2: Tensor) -> None:
    """Take step u, or size times the momentum of it, off the parameters, and decay of themselves: see ``sizes``."""
    step, size, decay = sizes(batch, u2)
    still, factors = batch.numbers.still, zip(scalars(step), scalars(batch.numbers.keep1), strict=True)
    for i, (item, (factor, keep1)) in enumerate(zip(batch.items, factors, strict=True)):
        u = batch.kept.u[i].mul_(factor)
        if size is None:
            select(u, still, i)
        if item.m is not None:
            u = momentum(u, item.m, keep1, rounded=size is not None)
            if size is not None:
                u.mul_(size[i])
            select(u, still, i)
        p = item.p.to(batch.dtype)
        if decay is not None:
            lose(p, decay[i], still, i)
        p.sub_(u)
        if p is not item.p:
            item.p.copy_(p)


def select(u: Tensor, still: Tensor | None, i: int) -> None:
    """Make u 0 where the i-th tensor does not move: not by a product, since 0 * nan is nan."""
    if still is not None:
        u.masked_fill_(still[i], 0)


def lose(p: Tensor, decay: Tensor, still: Tensor | None, i: int) -> None:
    """Take decay of p off p, selected like u."""
    p.addcmul_(p if still is None else p.masked_fill(still[i], 0), decay, value=-1)


def momentum(u: Tensor, m: Tensor, keep1: Scalar, *, rounded: bool) -> Tensor:
    """Take u into m, and return m's value as a tensor of its own: with rounded=True what m's dtype makes of both."""
    if m.dtype == u.dtype:
        return u.copy_(m.lerp_(u, keep1))
    if rounded:
        return u.copy_(m.lerp_(u.to(m.dtype), keep1))
    u = m.to(u.dtype).lerp_(u, keep1)
    m.copy_(u)
    return u


def norm(x: Tensor) -> Tensor:
    """The norm over all elements, dim by dim and in pieces of at most STAGE.

    In one go, vector_norm on a CPU sums in float32 one after the other: 4 million elements are off by 1e-4, 67 million
    by 5e-3.
    """
    while x.dim() > 0:
        whole = x.shape[-1] // STAGE
        if whole == 0:
            x = vector_norm(x, dim=-1)
        else:
            pieces, rest = torch.unflatten(x[..., : whole * STAGE], -1, (whole, STAGE)), x[..., whole * STAGE :]
            x = torch.cat([vector_norm(pieces, dim=-1), vector_norm(rest, dim=-1, keepdim=True)], dim=-1)
    return x


def factor_sums(item: Item, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Sums of |g|^2 over the columns and over the rows, in R's and C's shapes; nothing where there are no factors."""
    if not item.plan.factored:
        return None
    # Norms along dims would need no tensor of squares, and take twice to eight times as long along the rows.
    squares = item.g.to(dtype).square()
    return squares.sum(dim=item.plan.cols, keepdim=True), squares.sum(dim=item.plan.rows, keepdim=True)


def inverse_root(item: Item, mean: Tensor | None, cap: Scalar) -> Tensor:
    """1 / max(sqrt V, f): a new tensor of the parameter's shape, finite where V is 0, nan where V is not finite.

    Factored, it is the product of two inverse roots, since R * C may underflow where neither factor does.
    """
    if item.V is not None:
        return _rsqrt(item.V).clamp_(max=cap)
    assert item.R is not None
    assert item.C is not None
    assert mean is not None
    return (_rsqrt(item.R / mean) * _rsqrt(item.C)).clamp_(max=cap)


def _rsqrt(x: Tensor) -> Tensor:
    # + 0 x makes nan of an infinite statistic: 1 / sqrt(inf) = 0 would stop the parameter in silence, for ever.
    return torch.rsqrt(x).add_(x, alpha=0)
