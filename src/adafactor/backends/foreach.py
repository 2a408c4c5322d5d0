"""The three sweeps over many tensors at once, at the price of temporaries of the size of all parameters.

The maths of one tensor is reference.py's; here its elementwise part runs as torch._foreach_* operations, which are
fused over tensors where PyTorch has a kernel for them. Factors, whose shapes all differ, go tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import maxsize

import torch
from torch import Tensor

from ..reference import average as average
from ..reference import count as count
from ..reference import inverse_root, lose, momentum, norm, select
from ..reference import observe as observe
from ..sweeps import Batch, scalars, sizes

WAVE = maxsize
"""Bytes of a wave: all tensors at once."""


def measure(batch: Batch) -> Tensor:
    """[k] sums of u^2. Brings a full V up to date first."""
    items, (means, u) = batch.items, batch.kept
    b, added, cap = (scalars(column) for column in (batch.numbers.b, batch.numbers.added, batch.numbers.cap))
    grads = [item.g.to(batch.dtype) for item in items]
    full = [i for i, item in enumerate(items) if item.V is not None]
    if full:
        squares = torch._foreach_mul([grads[i] for i in full], [grads[i] for i in full])
        if batch.form.added:
            torch._foreach_add_(squares, [added[i] for i in full])
        V = [V for item in items if (V := item.V) is not None]
        torch._foreach_lerp_(V, squares, [b[i] for i in full])
    u.extend(inverse_root(*each) for each in zip(items, means, cap, strict=True))
    torch._foreach_mul_(u, grads)
    return torch.stack([norm(each) for each in u]).square_()


def apply(batch: Batch, u2: Tensor) -> None:
    """Take step u, or size times the momentum of it, off the parameters, and decay of themselves: see ``sizes``."""
    step, size, decay = sizes(batch, u2)
    u, still = batch.kept.u, batch.numbers.still
    torch._foreach_mul_(u, scalars(step))
    if size is None:
        _clear(u, still)
    if batch.form.momentum is not None:
        keep1 = scalars(batch.numbers.keep1)
        m = [m for m in batch.columns.m if m is not None]
        if all(tensor.dtype == batch.dtype for tensor in m):
            torch._foreach_lerp_(m, u, keep1)
            torch._foreach_copy_(u, m)
        else:
            u = [momentum(*each, rounded=size is not None) for each in zip(u, m, keep1, strict=True)]
        if size is not None:
            torch._foreach_mul_(u, scalars(size))
        _clear(u, still)
    params = batch.columns.p
    p = [param.to(batch.dtype) for param in params]
    if decay is not None:
        for i, (tensor, share) in enumerate(zip(p, decay, strict=True)):
            lose(tensor, share, still, i)
    torch._foreach_sub_(p, u)
    # The parameters of a batch share the arithmetic's dtype, not their own: some are copies here, some are themselves.
    copied = [i for i, param in enumerate(params) if p[i] is not param]
    if copied:
        torch._foreach_copy_([params[i] for i in copied], [p[i] for i in copied])


def _clear(tensors: Sequence[Tensor], still: Tensor | None) -> None:
    for i, tensor in enumerate(tensors):
        select(tensor, still, i)
