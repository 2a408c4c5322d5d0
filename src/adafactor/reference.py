"""The specification: observe, average, measure and apply in plain PyTorch, one tensor after the other.

What stays as it is, is selected and not multiplied by 0, since 0 * nan is nan; without a mask nothing is copied for it.

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

from .rounding import put, store
from .shapes import Plan
from .sweeps import Batch, Item, Scalar, scalars, sizes, stacked

WAVE = 8 << 20
"""Bytes of a wave, which stay in cache from sweep to sweep."""


STAGE = 1 << 8
"""Elements that a norm sums at a time."""


class Kept(NamedTuple):
    """What goes from sweep to sweep: what each factored tensor's V is the product of, and each tensor's u."""

    factors: list[tuple[Tensor, Tensor] | None]
    u: list[Tensor]


def count(steps: Sequence[Tensor]) -> Tensor:
    """[k] the step counts with this step, where they are. Writes nothing."""
    return torch.stack(list(steps)).add_(1)


def keep(steps: Sequence[Tensor], t: Tensor) -> None:
    """Write step counts, [k]."""
    torch._foreach_copy_(list(steps), list(t.unbind()))


def observe(batch: Batch) -> list[tuple[Tensor, Tensor] | None]:
    """Row and column sums of |g|^2 in R's and C's shapes; fills in p2, bad and g2. Writes no state."""
    if batch.p2 is not None:
        batch.p2.copy_(torch.stack([norm(p.to(batch.dtype)) for p in batch.columns.p]).square_())
    sums: list[tuple[Tensor, Tensor] | None] = []
    largest, norms = [], []
    for item, unscale in zip(batch.items, unscales(batch), strict=True):
        g = gradient(item, batch.dtype, unscale)
        factors = factor_sums(item.plan, g)
        if batch.bad is not None:
            largest.append(largest_sum(g, factors))
        if batch.g2 is not None:
            norms.append(norm(g if factors is None else factors[0].sqrt()))
        sums.append(None if factors is None else _left(item, factors))
    if batch.bad is not None:
        torch.logical_not(torch.stack(largest).isfinite(), out=batch.bad)
    if batch.g2 is not None:
        batch.g2.copy_(torch.stack(norms).square_())
    return sums


def average(batch: Batch, sums: list[tuple[Tensor, Tensor] | None]) -> None:
    """Take the first sweep's sums into R and C, and keep R over mean(C), which is at least its floor, and C.

    mean(C) = mean(R): taken from C on every path, since a shard of rows has C whole. Rows that wake are limited in the
    factor of the earlier dim, whichever of the two the plan calls rows.
    """
    n = batch.numbers
    kept: list[tuple[Tensor, Tensor] | None] = []
    shrinks = scalars(n.shrink) if batch.form.clips else [None] * len(sums)
    columns = (scalars(n.b), scalars(n.added), scalars(n.floor), scalars(n.boost), shrinks, holds(batch))
    for item, factors, b, added, floor, boost, shrink, hold in zip(batch.items, sums, *columns, strict=True):
        if factors is None or item.R is None or item.C is None:
            kept.append(None)
            continue
        plan, whole = item.plan, item.plan.whole
        r, c = factors
        if shrink is not None:
            r, c = r.mul_(shrink), c.mul_(shrink)
        r, c = r.div_(whole.m), c.div_(whole.n)
        if batch.form.added:
            r, c = r.add_(added), c.add_(added)
        put(item.R, item.R.lerp(r, b), hold)
        put(item.C, item.C.lerp(c, b), hold)
        if item.totals is None:
            mean = item.C.mean(dim=plan.cols, keepdim=True)
        else:
            before, now = item.totals / whole.m
            now = now if shrink is None else now * shrink
            now = (now / whole.n).add_(added)
            mean = before.lerp_(now, b).view(plan.mean_shape)
        mean = mean.clamp_(min=floor)
        R, C = item.R, item.C
        if plan.leads_with_rows:
            R = torch.maximum(R, r.div_(boost).div_(boost))
        else:
            C = torch.maximum(C, c.div_(boost).div_(boost))
        kept.append((R / mean, C))
    batch.kept = Kept(kept, [])


def measure(batch: Batch) -> Tensor:
    """[k] sums of u^2. Brings a full V up to date first."""
    n, (kept, u) = batch.numbers, batch.kept
    columns = (scalars(n.b), scalars(n.added), scalars(n.cap), unscales(batch), holds(batch))
    norms = []
    for item, factors, b, added, cap, unscale, hold in zip(batch.items, kept, *columns, strict=True):
        g = gradient(item, batch.dtype, unscale)
        if item.V is not None:
            squares = g * g
            if batch.form.added:
                squares.add_(added)
            put(item.V, torch.lerp(item.V, squares, b, out=item.V if hold is None else squares), hold)
        each = inverse_root(item, factors, cap).mul_(g)
        norms.append(norm(each))
        if not batch.frugal:
            u.append(each)
    return torch.stack(norms).square_()


def apply(batch: Batch, u2: Tensor) -> None:
    """Take step u, or size times the momentum of it, off the parameters, and decay of themselves: see ``sizes``."""
    step, size, decay = sizes(batch, u2)
    n, kept = batch.numbers, batch.kept
    each = (step, n.keep1, n.t, n.cap)
    columns = (*map(scalars, each), unscales(batch), holds(batch), stays(batch))
    for i, (item, factor, keep1, t, cap, unscale, hold, stay) in enumerate(zip(batch.items, *columns, strict=True)):
        u = kept.u[i] if kept.u else inverse_root(item, kept.factors[i], cap).mul_(gradient(item, batch.dtype, unscale))
        u.mul_(factor)
        if item.m is not None:
            if size is None and n.still is not None:
                # The average goes on over steps of size 0.
                u.masked_fill_(n.still[i], 0)
            u = momentum(u, item.m, keep1, hold, rounded=size is not None)
            if size is not None:
                u.mul_(size[i])
        x = start(item, batch.dtype, stay)
        if decay is not None:
            x.addcmul_(x, decay[i], value=-1)
        store(item.p, x.sub_(u), item.comp, item.at, t, stay)


def unscales(batch: Batch) -> Sequence[Scalar | None]:
    """What each gradient is multiplied by first; None is 1."""
    return scalars(batch.numbers.unscale) if batch.numbers.scaled else [None] * len(batch.columns.p)


def holds(batch: Batch) -> Sequence[Tensor | None]:
    """The mask of each tensor that is to stay as it is, state and all; None where all go on."""
    return [None] * len(batch.columns.p) if batch.hold is None else list(batch.hold)


def stays(batch: Batch) -> Sequence[Tensor | None]:
    """The mask of each tensor that is on hold or does not move; None where all move."""
    masks = [mask for mask in (batch.hold, batch.numbers.still) if mask is not None]
    if not masks:
        return [None] * len(batch.columns.p)
    return list(torch.stack(masks).any(dim=0))


def gradient(item: Item, dtype: torch.dtype, unscale: Scalar | None) -> Tensor:
    """g in the arithmetic's dtype, not to be written to."""
    g = item.g.to(dtype)
    return g if unscale is None else g * unscale


def start(item: Item, dtype: torch.dtype, stay: Tensor | None) -> Tensor:
    """What the step is taken off, to be written to: p itself where nothing is in the way."""
    x = item.p.to(dtype, copy=stay is not None)
    return x if item.comp is None else x.add_(item.comp)


def momentum(u: Tensor, m: Tensor, keep1: Scalar, hold: Tensor | None, *, rounded: bool) -> Tensor:
    """Take u into m, and return m's value in u's memory: with rounded=True what m's dtype makes of both."""
    if m.dtype == u.dtype or not rounded:
        u = torch.lerp(m.to(u.dtype), u, keep1, out=u)
        put(m, u, hold)
        return u
    low = m.lerp(u.to(m.dtype), keep1)
    put(m, low, hold)
    return u.copy_(low)


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


def factor_sums(plan: Plan, g: Tensor) -> tuple[Tensor, Tensor] | None:
    """Sums of |g|^2 over the columns and over the rows, in R's and C's shapes; nothing where there are no factors."""
    if not plan.factored:
        return None
    # Norms along dims would need no tensor of squares, and take twice to eight times as long along the rows.
    squares = g.square()
    return squares.sum(dim=plan.cols, keepdim=True), squares.sum(dim=plan.rows, keepdim=True)


def _left(item: Item, factors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The sums where they are to be left, and the totals filled in."""
    r, c = factors
    if item.totals is not None and item.C is not None:
        torch.stack([item.C.sum(dim=item.plan.cols).flatten(), r.sum(dim=item.plan.rows).flatten()], out=item.totals)
        if not item.plan.speaks:
            item.totals[0].zero_()
    return r if item.r is None else item.r.copy_(r), c if item.c is None else item.c.copy_(c)


def largest_sum(g: Tensor, sums: tuple[Tensor, Tensor] | None) -> Tensor:
    """The largest sum of |g|^2 over rows or columns, without factors the largest |g|^2; nan where anything is nan."""
    if g.numel() == 0:
        return g.new_zeros(())
    parts = sums or (torch.stack(g.aminmax()).square_(),)
    return torch.stack([part.amax() for part in parts]).amax()


def is_finite(whole: Item, dtype: torch.dtype) -> bool:
    """Whether a gradient, of a stack all slices of it, is finite as the first sweep sees it. Waits for the device."""
    if whole.plan.numel == 0:
        return True
    parts = [(item.plan, item.g.to(dtype)) for item in stacked(whole)]
    return all(bool(largest_sum(g, factor_sums(plan, g)).isfinite()) for plan, g in parts)


def inverse_root(item: Item, factors: tuple[Tensor, Tensor] | None, cap: Scalar) -> Tensor:
    """1 / max(sqrt V, f): a new tensor of the parameter's shape, finite where V is 0, nan where V is not finite.

    Factored, it is the product of two inverse roots, since R * C may underflow where neither factor does.
    """
    if item.V is not None:
        return _rsqrt(item.V).clamp_(max=cap)
    assert factors is not None
    return (_rsqrt(factors[0]) * _rsqrt(factors[1])).clamp_(max=cap)


def _rsqrt(x: Tensor) -> Tensor:
    # + 0 x makes nan of an infinite statistic: 1 / sqrt(inf) = 0 would stop the parameter in silence, for ever.
    return torch.rsqrt(x).add_(x, alpha=0)
