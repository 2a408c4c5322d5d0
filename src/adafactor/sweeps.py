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
        dtype: what the arithmetic runs in, float32 or float64; the items' R, C and V have it too.
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

    def measure(self, batch: Batch, means: list[Tensor | None]) -> Tensor:
        """[k] sums of u^2, given mean(C) or its floor for each factored tensor. Brings a full V up to date first."""
        ...

    def apply(self, batch: Batch, step: Tensor, size: Tensor | None, decay: Tensor | None) -> None:
        """Take step u, or size times the momentum of it, off the parameters, and decay of themselves ([k] each)."""
        ...


def run(batch: Batch, backend: Backend) -> Tensor | None:
    """One step of a batch, in place. Returns [k] rms(p) from before the step where the form scales by it."""
    form, numbers = batch.form, batch.numbers
    numel = torch.tensor([item.plan.numel for item in batch.items], dtype=batch.dtype)
    numel = numel.to(numbers.b.device, non_blocking=True)

    sums = backend.observe(batch)
    # Sharded tensors reduce rows, cols and p2 here.
    means = average(batch, sums)
    rms_p = None if sums.p2 is None else (sums.p2 / numel).sqrt()
    alpha = numbers.rho if rms_p is None else numbers.rho * torch.maximum(rms_p, numbers.eps2)
    if numbers.still is not None:
        alpha = alpha.masked_fill(numbers.still, 0)

    u2 = backend.measure(batch, means)
    # Sharded tensors reduce u2 here.
    rms_u = (u2 / numel).sqrt()
    # Without clipping, d = inf, an overflow of u2 must not count.
    clip = torch.where(numbers.d < torch.inf, (rms_u / numbers.d).clamp(min=1), 1)
    step, size = numbers.sign / clip, None
    if form.momentum == "before":
        size = alpha
    else:
        step = step * alpha
    decay = None
    if form.decay is not None:
        decay = numbers.decay * alpha if form.decay == "alpha" else numbers.decay
        if numbers.still is not None:
            decay = decay.masked_fill(numbers.still, 0)
    backend.apply(batch, step, size, decay)
    return rms_p


def average(batch: Batch, sums: Sums) -> list[Tensor | None]:
    """Take the first sweep's sums into R and C. Returns mean(C) of each factored tensor, at least its floor.

    mean(C) = mean(R): taken from C on every path, since a shard of rows has C whole.
    """
    n = batch.numbers
    means: list[Tensor | None] = []
    columns = (scalars(n.b), scalars(n.added), scalars(n.floor))
    for item, rows, cols, b, added, floor in zip(batch.items, sums.rows, sums.cols, *columns, strict=True):
        if item.R is None or item.C is None or rows is None or cols is None:
            means.append(None)
            continue
        for statistic, total, count in ((item.R, rows, item.plan.m), (item.C, cols, item.plan.n)):
            mean = total.div_(count)
            statistic.lerp_(mean.add_(added) if batch.form.added else mean, b)
        means.append(item.C.mean(dim=item.plan.cols, keepdim=True).clamp_(min=floor))
    return means


def stacked(item: Item) -> list[Item]:
    """The slices of an item whose plan makes it a stack, as items of their own; the item itself where it is none."""
    plan = item.plan
    if plan.slices == 0:
        return [item]
    rows, cols = (tuple(i - 1 for i in dims) for dims in (plan.rows, plan.cols))
    inner = Plan(plan.shape[1:], rows, cols, plan.slices - 1)
    parts = zip(*([None] * plan.shape[0] if x is None else x.unbind(0) for x in item[1:]), strict=True)
    return [each for part in parts for each in stacked(Item(inner, *part))]


def waves(items: Sequence[Item], limit: int) -> Iterator[slice]:
    """Cut items, in order, into runs of about limit elements; a larger one is a wave of its own."""
    start = size = 0
    for i, item in enumerate(items):
        if i > start and size + item.plan.numel > limit:
            yield slice(start, i)
            start, size = i, 0
        size += item.plan.numel
    if items:
        yield slice(start, len(items))


def scalars(values: Tensor) -> list[Scalar]:
    """A vector of numbers, each as the host can use it: floats from the CPU; from an accelerator they would be waited
    for, so 0-d tensors."""
    return values.tolist() if values.device.type == "cpu" else list(values)
