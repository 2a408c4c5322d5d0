"""The three sweeps over many tensors at once, at the price of temporaries of the size of all parameters.

The maths of one tensor is reference.py's; here its elementwise part runs as torch._foreach_* operations, which are
fused over tensors where PyTorch has a kernel for them. Factors, whose shapes all differ, go tensor by tensor.
"""

from __future__ import annotations

from sys import maxsize

import torch
from torch import Tensor

from ..reference import average as average
from ..reference import count as count
from ..reference import gradient, holds, inverse_root, momentum, norm, start, stays, unscales
from ..reference import keep as keep
from ..reference import observe as observe
from ..rounding import put, store
from ..sweeps import Batch, scalars, sizes

WAVE = maxsize
"""Bytes of a wave: all tensors at once."""


def measure(batch: Batch) -> Tensor:
    """[k] sums of u^2. Brings a full V up to date first."""
    items, n, (factors, u) = batch.items, batch.numbers, batch.kept
    b, added, cap = (scalars(column) for column in (n.b, n.added, n.cap))
    grads = [gradient(item, batch.dtype, unscale) for item, unscale in zip(items, unscales(batch), strict=True)]
    full = [i for i, item in enumerate(items) if item.V is not None]
    if full:
        squares = torch._foreach_mul([grads[i] for i in full], [grads[i] for i in full])
        if batch.form.added:
            torch._foreach_add_(squares, [added[i] for i in full])
        V = [V for item in items if (V := item.V) is not None]
        weights = [b[i] for i in full]
        if batch.hold is None:
            torch._foreach_lerp_(V, squares, weights)
        else:
            for i, target, value in zip(full, V, torch._foreach_lerp(V, squares, weights), strict=True):
                put(target, value, batch.hold[i])
    u.extend(inverse_root(*each) for each in zip(items, factors, cap, strict=True))
    torch._foreach_mul_(u, grads)
    return torch.stack([norm(each) for each in u]).square_()


def apply(batch: Batch, u2: Tensor) -> None:
    """Take step u, or size times the momentum of it, off the parameters, and decay of themselves: see ``sizes``."""
    step, size, decay = sizes(batch, u2)
    u, n, items = batch.kept.u, batch.numbers, batch.items
    stay = stays(batch)
    torch._foreach_mul_(u, scalars(step))
    if batch.form.momentum is not None:
        if size is None and n.still is not None:
            # The average goes on over steps of size 0.
            for each, still in zip(u, n.still, strict=True):
                each.masked_fill_(still, 0)
        keep1 = scalars(n.keep1)
        m = [m for m in batch.columns.m if m is not None]
        if batch.hold is None and all(tensor.dtype == batch.dtype for tensor in m):
            torch._foreach_lerp_(m, u, keep1)
            torch._foreach_copy_(u, m)
        else:
            rounded = size is not None
            u = [momentum(*each, rounded=rounded) for each in zip(u, m, keep1, holds(batch), strict=True)]
        if size is not None:
            torch._foreach_mul_(u, scalars(size))
    x = [start(item, batch.dtype, mask) for item, mask in zip(items, stay, strict=True)]
    if decay is not None:
        for tensor, share in zip(x, decay, strict=True):
            tensor.addcmul_(tensor, share, value=-1)
    torch._foreach_sub_(x, u)
    # The parameters of a batch share the arithmetic's dtype, not their own: some are copies here, some are themselves.
    plain = {i for i, item in enumerate(items) if stay[i] is None and item.at is None}
    copied = [i for i in plain if x[i] is not items[i].p]
    if copied:
        torch._foreach_copy_([items[i].p for i in copied], [x[i] for i in copied])
    t = scalars(n.t)
    for i, item in enumerate(items):
        if i not in plain:
            store(item.p, x[i], item.comp, item.at, t[i], stay[i])
