"""The specification: observe, measure and apply in plain PyTorch, one tensor after the other.

In float64 it is the oracle that every other backend is held to. Only sums along dims and vector_norm are used: a full
sum() depends on the number of threads. u is kept between measure and apply, so a step holds one tensor of a wave's size
in the arithmetic's dtype (and, for parameters of lower precision, copies of one parameter and its gradient).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import vector_norm

from .sweeps import Batch, Item, Scalar, Sums, scalars

WAVE = 1 << 20
"""Elements of a wave: a few megabytes, which stay in cache from sweep to sweep."""


def observe(batch: Batch) -> Sums:
    """Row and column sums of |g|^2, and sums of p^2 where the form scales. Writes nothing."""
    factors = [factor_sums(item, batch.dtype) for item in batch.items]
    p2 = None
    if batch.form.scale:
        p2 = torch.stack([vector_norm(item.p.to(batch.dtype)) for item in batch.items]).square_()
    return Sums([rows for rows, _ in factors], [cols for _, cols in factors], p2)


def measure(batch: Batch) -> Tensor:
    """[k] sums of u^2. Brings a full V up to date first."""
    n = batch.numbers
    for item, b, added, floor, cap in zip(batch.items, *map(scalars, (n.b, n.added, n.floor, n.cap)), strict=True):
        g = item.g.to(batch.dtype)
        if item.V is not None:
            item.V.lerp_((g * g).add_(added), b)
        batch.u.append(inverse_root(item, floor, cap).mul_(g))
    return torch.stack([vector_norm(u) for u in batch.u]).square_()


def apply(batch: Batch, step: Tensor, decay: Tensor | None) -> None:
    """Take u, times step, through momentum off the parameters, which lose decay of themselves too ([k] both)."""
    still = batch.numbers.still
    for i, (item, size, keep1) in enumerate(zip(batch.items, scalars(step), scalars(batch.numbers.keep1), strict=True)):
        u = batch.u[i].mul_(size)
        # Selected, not multiplied by 0: what does not move must not move by 0 * nan either.
        if still is not None:
            u.masked_fill_(still[i], 0)
        if item.m is not None:
            u = item.m.lerp_(u, keep1)
            if still is not None:
                u = u.masked_fill(still[i], 0)
        p = item.p.to(batch.dtype)
        if decay is not None:
            p.addcmul_(p if still is None else p.masked_fill(still[i], 0), decay[i], value=-1)
        p.sub_(u)
        if p is not item.p:
            item.p.copy_(p)


def factor_sums(item: Item, dtype: torch.dtype) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Sums of |g|^2 over the columns and over the rows, in R's and C's shapes; nothing where there are no factors."""
    if not item.plan.factored:
        return None, None
    # Norms along dims would need no tensor of squares, and take twice to eight times as long along the rows.
    squares = item.g.to(dtype).square()
    return squares.sum(dim=item.plan.cols, keepdim=True), squares.sum(dim=item.plan.rows, keepdim=True)


def inverse_root(item: Item, floor: Scalar, cap: Scalar) -> Tensor:
    """1 / max(sqrt V, f): a new tensor of the parameter's shape, finite where V is 0, nan where V is not finite.

    Factored, it is the product of two inverse roots, since R * C may underflow where neither factor does.
    """
    if item.V is not None:
        return _rsqrt(item.V).clamp_(max=cap)
    assert item.R is not None
    assert item.C is not None
    # mean(C) = mean(R); taken from C, which a shard of rows has whole.
    mean = item.C.mean(dim=item.plan.cols, keepdim=True).clamp_(min=floor)
    return (_rsqrt(item.R / mean) * _rsqrt(item.C)).clamp_(max=cap)


def _rsqrt(x: Tensor) -> Tensor:
    # + 0 x makes nan of an infinite statistic: 1 / sqrt(inf) = 0 would stop the parameter in silence, for ever.
    return torch.rsqrt(x).add_(x, alpha=0)
