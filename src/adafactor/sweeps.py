"""The order of a step: three sweeps over the gradients, and what happens to small numbers between them.

A backend is a module with the functions ``observe``, ``average``, ``measure`` and ``apply`` (the protocol ``Backend``);
this file is all that calls them. Between the sweeps shards reduce what they have found (``exchange.py``); for a whole
tensor there is nothing to do. Before the second one nothing is written: a step can still be called off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .rounding import Counter
from .rule import Form, Numbers
from .shapes import Plan

Scalar = Any
"""A float, or a 0-d tensor on an accelerator: what PyTorch's operations take either way, though their types do not."""


class Item(NamedTuple):
    """One tensor's part of a step: R and C where its plan is factored, else V; m only with momentum.

    comp is the compensation of rounding="kahan". at is None where the parameter is rounded to the nearest. r and c are
    where the first sweep leaves its sums over columns and over rows, in R's and C's shapes, so that shards can reduce
    them; None is wherever it likes. totals, with them, is where it leaves [2, matrices] what mean(C) is made of where
    columns are elsewhere: the sums of C, and of |g|^2; None where mean(C) can be taken here.
    """

    plan: Plan
    p: Tensor
    g: Tensor
    R: Tensor | None
    C: Tensor | None
    V: Tensor | None
    m: Tensor | None
    comp: Tensor | None
    r: Tensor | None
    c: Tensor | None
    totals: Tensor | None
    at: Counter | None


class Columns(NamedTuple):
    """The items of a batch, column by column."""

    plans: Sequence[Plan]
    p: Sequence[Tensor]
    g: Sequence[Tensor]
    R: Sequence[Tensor | None]
    C: Sequence[Tensor | None]
    V: Sequence[Tensor | None]
    m: Sequence[Tensor | None]
    comp: Sequence[Tensor | None]
    r: Sequence[Tensor | None]
    c: Sequence[Tensor | None]
    totals: Sequence[Tensor | None]
    at: Sequence[Counter | None]

    def part(self, rows: slice) -> Columns:
        """Some of the items."""
        return Columns(*(column[rows] for column in self))  # type: ignore[arg-type]


@dataclass
class Batch:
    """Tensors of one form, one arithmetic dtype and one device. None is empty, but for shards of ones that are not.

    Attributes:
        columns: k tensors.
        numbers: the table of their step numbers.
        form: which operations they need.
        dtype: what the arithmetic runs in, float32 or float64; the items' R, C and V have it too.
        numel: [k] their sizes, of shards those of the whole tensors.
        p2: [k] where the first sweep leaves the sums of p^2; None where the form does not scale.
        bad: [k] where the first sweep marks gradients that are not finite; None where the form does not skip.
        g2: [k] where the first sweep leaves the sums of |g|^2; None where the form does not clip.
        hold: [k] marks the tensors that are to stay as they are, state and all; None is none of them.
        memo: what is kept from step to step, while plans and tensors other than g stay what and where they are.
        kept: what the backend keeps from sweep to sweep.
        frugal: whether the backend is to compute u again rather than to keep it: other waves come between its sweeps.
    """

    columns: Columns
    numbers: Numbers
    form: Form
    dtype: torch.dtype
    numel: Tensor
    p2: Tensor | None
    bad: Tensor | None
    g2: Tensor | None
    hold: Tensor | None = None
    memo: dict[str, Any] = field(default_factory=dict)
    kept: Any = None
    frugal: bool = False

    @property
    def items(self) -> list[Item]:
        """The items, row by row; R and C in shapes that broadcast."""
        return list(map(broadcasting, *self.columns))


class Backend(Protocol):
    """The three sweeps, and what is between them. ``reference.py`` is the specification of each."""

    def count(self, steps: Sequence[Tensor]) -> Tensor:
        """[k] the step counts with this step, where they are. Writes nothing."""
        ...

    def keep(self, steps: Sequence[Tensor], t: Tensor) -> None:
        """Write step counts, [k]."""
        ...

    @property
    def WAVE(self) -> int:  # noqa: N802, a module's constant
        """About how many bytes of gradients and parameters the sweeps should go over at a time."""
        ...

    def observe(self, batch: Batch) -> Any:
        """Row and column sums of |g|^2, as the backend keeps them; fills in p2, bad and g2. Writes no state."""
        ...

    def average(self, batch: Batch, sums: Any) -> None:
        """Take the first sweep's sums into R and C, and keep what V is made of."""
        ...

    def measure(self, batch: Batch) -> Tensor:
        """[k] sums of u^2. Brings a full V up to date first."""
        ...

    def apply(self, batch: Batch, u2: Tensor) -> None:
        """Take the step off the parameters: see ``sizes``."""
        ...


def first(batch: Batch, backend: Backend) -> None:
    """The first sweep. Shards reduce r, c, totals, p2, bad and g2 after it."""
    batch.kept = backend.observe(batch)


def second(batch: Batch, backend: Backend) -> Tensor:
    """The second sweep: [k] sums of u^2, which shards reduce. What is on hold stays as it is, here and in the third."""
    backend.average(batch, batch.kept)
    return backend.measure(batch)


def third(batch: Batch, backend: Backend, u2: Tensor) -> None:
    """The third sweep, in place."""
    backend.apply(batch, u2)
    # Plain PyTorch's u, which is as large as the wave.
    batch.kept = None


def sizes(batch: Batch, u2: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What apply takes off: step u, or size times the momentum of it, and decay of p itself ([k] each, or None)."""
    form, numbers = batch.form, batch.numbers
    alpha = numbers.rho
    if batch.p2 is not None:
        alpha = alpha * torch.maximum((batch.p2 / batch.numel).sqrt(), numbers.eps2)
    # Without clipping, d = inf, an overflow of u2 must not count.
    d = numbers.d
    clip = torch.where(d < torch.inf, ((u2 / batch.numel).sqrt() / d).clamp(min=1), 1)
    step, size = numbers.sign / clip, None
    if form.momentum == "before":
        size = alpha
    else:
        step = step * alpha
    decay = None
    if form.decay is not None:
        decay = numbers.decay * alpha if form.decay == "alpha" else numbers.decay
    return step, size, decay


def broadcasting(plan: Plan, p: Tensor, g: Tensor, R: Tensor | None, C: Tensor | None, *others: Any) -> Item:
    """An item, whose R and C have the shapes that broadcast, whatever the layout keeps them in."""
    if R is not None and C is not None and R.dim() < len(plan.shape):
        R, C = R.view(plan.row_shape), C.view(plan.col_shape)
    return Item(plan, p, g, R, C, *others)


def stacked(item: Item) -> list[Item]:
    """The slices of an item whose plan makes it a stack, as items of their own; the item itself where it is none."""
    plan = item.plan
    if plan.slices == 0:
        return [item]
    count, at = plan.shape[0], item.at
    places: list[Counter | None] = [None] * count
    if at is not None:
        places = [Counter(at.key, at.start + i * at.strides[0], at.strides[1:]) for i in range(count)]
    tensors: Sequence[Tensor | None] = item[1:-1]
    parts = zip(*([None] * count if x is None else x.unbind(0) for x in tensors), places, strict=True)
    return [each for part in parts for each in stacked(Item(plan.slice, *part))]


def waves(sizes: Sequence[int], limit: int) -> Iterator[slice]:
    """Cut tensors of some sizes, in order, into runs of about a limit; a larger one is a wave of its own."""
    start = total = 0
    for i, size in enumerate(sizes):
        if i > start and total + size > limit:
            yield slice(start, i)
            start, total = i, 0
        total += size
    if sizes:
        yield slice(start, len(sizes))


def scalars(values: Tensor) -> list[Scalar]:
    """A vector of numbers, each as the host can use it: floats from the CPU; from an accelerator they would be waited
    for, so 0-d tensors."""
    return values.tolist() if values.device.type == "cpu" else list(values)
