"""The order of a step: three sweeps over the gradients, and what happens to small numbers between them.

A backend is a module with the functions ``observe``, ``average``, ``measure`` and ``apply`` (the protocol ``Backend``);
this file is all that calls them. The two places where sharded tensors reduce over their shards are marked. Between
``first`` and ``rest`` nothing is written yet: a step can still be called off.
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

    comp is the compensation of rounding="kahan". at is None where the parameter is rounded to the nearest.
    """

    plan: Plan
    p: Tensor
    g: Tensor
    R: Tensor | None
    C: Tensor | None
    V: Tensor | None
    m: Tensor | None
    comp: Tensor | None
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
    at: Sequence[Counter | None]

    def part(self, rows: slice) -> Columns:
        """Some of the items."""
        return Columns(*(column[rows] for column in self))  # type: ignore[arg-type]


@dataclass
class Batch:
    """Tensors of one form, one arithmetic dtype and one device. None of them is empty: that would have no means.

    Attributes:
        columns: k tensors.
        numbers: the table of their step numbers.
        form: which operations they need.
        dtype: what the arithmetic runs in, float32 or float64; the items' R, C and V have it too.
        numel: [k] their sizes.
        p2: [k] where the first sweep leaves the sums of p^2; None where the form does not scale.
        bad: [k] where the first sweep marks gradients that are not finite; None where the form does not skip.
        hold: [k] marks the tensors that are to stay as they are, state and all; None is none of them.
        memo: what is kept from step to step, while plans and tensors other than g stay what and where they are.
        kept: what the backend keeps from sweep to sweep.
    """

    columns: Columns
    numbers: Numbers
    form: Form
    dtype: torch.dtype
    numel: Tensor
    p2: Tensor | None
    bad: Tensor | None
    hold: Tensor | None = None
    memo: dict[str, Any] = field(default_factory=dict)
    kept: Any = None

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
        """Row and column sums of |g|^2, as the backend keeps them; fills in p2 and bad. Writes no state."""
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
    """The first sweep."""
    batch.kept = backend.observe(batch)
    # Sharded tensors reduce the sums, p2 and bad here.


def rest(batch: Batch, backend: Backend) -> None:
    """The rest of a step of a batch, in place, for all tensors that are not on hold."""
    backend.average(batch, batch.kept)
    u2 = backend.measure(batch)
    # Sharded tensors reduce u2 here.
    backend.apply(batch, u2)


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
    rows, cols = (tuple(i - 1 for i in dims) for dims in (plan.rows, plan.cols))
    inner = Plan(plan.shape[1:], rows, cols, plan.slices - 1)
    count, at = plan.shape[0], item.at
    places: list[Counter | None] = [None] * count
    if at is not None:
        places = [Counter(at.key, at.start + i * at.strides[0], at.strides[1:]) for i in range(count)]
    tensors: Sequence[Tensor | None] = item[1:-1]
    parts = zip(*([None] * count if x is None else x.unbind(0) for x in tensors), places, strict=True)
    return [each for part in parts for each in stacked(Item(inner, *part))]


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
