"""The order of a step: three sweeps over the gradients, and what happens to small numbers between them.

A backend is a module with the three functions ``observe``, ``measure`` and ``apply`` (the protocol ``Backend``); this
file is all that calls them. The two places where sharded tensors reduce over their shards are marked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .rule import Form, Numbers
from .shapes import Plan

Scalar = Any
"""A float, or a 0-d tensor on an accelerator: what PyTorch's operations take either way, though their types do not."""


class Item(NamedTuple):
    """One tensor's part of a step: R and C where its plan is factored, else V; m only with momentum."""

    plan: Plan
    p: Tensor
    g: Tensor
    R: Tensor | None
    C: Tensor | None
    V: Tensor | None
    m: Tensor | None


class Sums(NamedTuple):
    """What the first sweep found: sums of |g|^2 over columns and over rows (R's and C's shapes), of p^2 ([k])."""

    rows: list[Tensor | None]
    cols: list[Tensor | None]
    p2: Tensor | None


@dataclass(frozen=True)
class Batch:
    """Tensors of one form, one arithmetic dtype and one device. None of them is empty: that would have no means.

    Attributes:
        items: k tensors.
        numbers: the table of their step numbers, [k] each.
        form: which operations they need.
        dtype: what the arithmetic runs in, float32 or float64; the items' R, C, V and m have it too.
        u: where a backend without kernels keeps u from measure to apply.
    """

    items: Sequence[Item]
    numbers: Numbers
    form: Form
    dtype: torch.dtype
    u: list[Tensor] = field(default_factory=list)


class Backend(Protocol):
    """The three sweeps. ``reference.py`` is the specification of each."""

    @property
    def WAVE(self) -> int:  # noqa: N802, a module's constant
        """About how many elements the sweeps should go over at a time."""
        ...

    def observe(self, batch: Batch) -> Sums:
        """Row and column sums of |g|^2, and sums of p^2 where the form scales. Writes nothing."""
        ...

    def measure(self, batch: Batch) -> Tensor:
        """[k] sums of u^2. Brings a full V up to date first."""
        ...

    def apply(self, batch: Batch, step: Tensor, decay: Tensor | None) -> None:
        """Take u, times step, through momentum off the parameters, which lose decay of themselves too ([k] both)."""
        ...


def run(batch: Batch, backend: Backend) -> Tensor | None:
    """One step of a batch, in place. Returns [k] rms(p) from before the step where the form scales by it."""
    form, numbers = batch.form, batch.numbers
    numel = torch.tensor([item.p.numel() for item in batch.items], dtype=batch.dtype)
    numel = numel.to(numbers.b.device, non_blocking=True)

    sums = backend.observe(batch)
    # Sharded tensors reduce rows, cols and p2 here.
    small = zip(batch.items, sums.rows, sums.cols, scalars(numbers.b), scalars(numbers.added), strict=True)
    for item, rows, cols, b, added in small:
        if item.R is not None and item.C is not None and rows is not None and cols is not None:
            item.R.lerp_(rows.div_(item.plan.m).add_(added), b)
            item.C.lerp_(cols.div_(item.plan.n).add_(added), b)
    rms_p = None if sums.p2 is None else (sums.p2 / numel).sqrt()
    alpha = numbers.rho if rms_p is None else numbers.rho * torch.maximum(rms_p, numbers.eps2)

    u2 = backend.measure(batch)
    # Sharded tensors reduce u2 here.
    rms_u = (u2 / numel).sqrt()
    # Without clipping, d = inf, an overflow of u2 must not count.
    clip = torch.where(numbers.d < torch.inf, (rms_u / numbers.d).clamp(min=1), 1)
    step = numbers.sign * alpha / clip
    decay = None
    if form.decay is not None:
        decay = numbers.decay * alpha if form.decay == "alpha" else numbers.decay
        if numbers.still is not None:
            decay = decay.masked_fill(numbers.still, 0)
    backend.apply(batch, step, decay)
    return rms_p


def waves(tensors: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Cut tensors, in order, into runs of about limit elements; a larger tensor is a wave of its own."""
    wave: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if wave and size + tensor.numel() > limit:
            yield wave
            wave, size = [], 0
        wave.append(tensor)
        size += tensor.numel()
    if wave:
        yield wave


def scalars(values: Tensor) -> list[Scalar]:
    """A vector of numbers, each as the host can use it: floats from the CPU; from an accelerator they would be waited
    for, so 0-d tensors."""
    return values.tolist() if values.device.type == "cpu" else list(values)
