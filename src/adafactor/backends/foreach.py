"""The three sweeps over many tensors at once: faster on accelerators, at the price of one copy of all parameters.

The maths of one tensor is reference.py's; here its elementwise part runs as torch._foreach_* operations, for which
PyTorch launches one kernel for many tensors. Factors, whose shapes all differ, go tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import maxsize

import torch
from torch import Tensor

from ..reference import factor_sums, inverse_root
from ..sweeps import Batch, Sums, scalars

WAVE = maxsize
"""Elements of a wave: all tensors at once."""


def observe(batch: Batch) -> Sums:
    """Row and column sums of |g|^2, and sums of p^2 where the form scales. Writes nothing."""
    factors = [factor_sums(item, batch.dtype) for item in batch.items]
    p2 = None
    if batch.form.scale:
        p2 = _squared_norms([item.p.to(batch.dtype) for item in batch.items])
    return Sums([rows for rows, _ in factors], [cols for _, cols in factors], p2)


def measure(batch: Batch) -> Tensor:
    """[k] sums of u^2. Brings a full V up to date first."""
    n = batch.numbers
    grads = [item.g.to(batch.dtype) for item in batch.items]
    full = [i for i, item in enumerate(batch.items) if item.V is not None]
    if full:
        squares = torch._foreach_mul([grads[i] for i in full], [grads[i] for i in full])
        torch._foreach_add_(squares, scalars(n.added[full]))
        torch._foreach_lerp_([V for item in batch.items if (V := item.V) is not None], squares, scalars(n.b[full]))
    limits = zip(batch.items, scalars(n.floor), scalars(n.cap), strict=True)
    batch.u.extend(inverse_root(item, floor, cap) for item, floor, cap in limits)
    torch._foreach_mul_(batch.u, grads)
    return _squared_norms(batch.u)


def apply(batch: Batch, step: Tensor, decay: Tensor | None) -> None:
    """Take u, times step, through momentum off the parameters, which lose decay of themselves too ([k] both)."""
    u, still = batch.u, batch.numbers.still
    torch._foreach_mul_(u, scalars(step))
    _clear(u, still)
    if batch.form.momentum:
        m = [item.m for item in batch.items if item.m is not None]
        torch._foreach_lerp_(m, u, scalars(batch.numbers.keep1))
        torch._foreach_copy_(u, m)
        _clear(u, still)
    params = [item.p for item in batch.items]
    p = [param.to(batch.dtype) for param in params]
    if decay is not None:
        lost = torch._foreach_mul(p, scalars(decay))
        _clear(lost, still)
        torch._foreach_sub_(p, lost)
    torch._foreach_sub_(p, u)
    # The parameters of a batch share the arithmetic's dtype, not their own: some are copies here, some are themselves.
    copied = [i for i, param in enumerate(params) if p[i] is not param]
    if copied:
        torch._foreach_copy_([params[i] for i in copied], [p[i] for i in copied])


def _squared_norms(tensors: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors)).square_()


def _clear(tensors: Sequence[Tensor], still: Tensor | None) -> None:
    if still is not None:
        for tensor, mask in zip(tensors, still, strict=True):
            tensor.masked_fill_(mask, 0)
