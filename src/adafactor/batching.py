"""How a step's tensors are batched: which backend takes each, and in which waves; and whether that still holds.

To look at every tensor's shape, dtype and place takes more time than small tensors take to compute, so it is done once
and then only checked to be as it was. What is remembered holds no tensor: state and gradients that a user frees or
moves between two steps are freed at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backends, checks, rounding
from .layouts import COMPENSATION, Layout
from .parts import Key, Measured, Member, Part, moved
from .rounding import Counter
from .rule import Form, Rule
from .shapes import Factoring, Plan
from .state import State, arithmetic
from .sweeps import Columns, Item, broadcasting


class Setting(NamedTuple):
    """What of a group decides how its tensors are batched."""

    choice: backends.Choice
    factoring: Factoring
    form: Form
    momentum_dtype: torch.dtype | None
    seed: int


class Scaling(NamedTuple):
    """What a GradScaler leaves to the step.

    Attributes:
        unscale: a scalar that all gradients are to be multiplied by first; None is 1.
        found_inf: a scalar, other than 0 where the step is to be called off; None is 0.
    """

    unscale: Tensor | None
    found_inf: Tensor | None


class Found(NamedTuple):
    """The parameters with gradients: how many each group has, and all of them in a row.

    labels: what tells apart parameters that are rounded with random bits: the name where there are names, else the
    place among all. None where all are rounded to the nearest.
    """

    counts: list[int]
    params: list[Tensor]
    grads: list[Tensor]
    states: list[State | None]
    labels: list[str] | None

    @property
    def groups(self) -> list[int]:
        """The index of each parameter's group."""
        return [index for index, count in enumerate(self.counts) for _ in range(count)]


def find(groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, State]) -> Found:
    """What a step is for."""
    live = [[(p, g) for p in group["params"] if (g := p.grad) is not None] for group in groups]
    pairs = list(chain.from_iterable(live))
    params: list[Tensor] = [p for p, _ in pairs]
    labels = None
    if any(group.get("rounding", "nearest") != "nearest" for group in groups):
        labels = list(_labels(groups))
    return Found(list(map(len, live)), params, [g for _, g in pairs], list(map(states.get, params)), labels)


def _labels(groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    place = 0
    for group in groups:
        names = group.get("param_names")
        for i, p in enumerate(group["params"]):
            if p.grad is not None:
                yield names[i] if names else str(place + i)
        place += len(group["params"])


def item(p: Tensor, plan: Plan, own: Mapping[str, Any], form: Form, layout: Layout) -> Item:
    """What the next step of a parameter is for, with as much of its state as there is, and p for a missing gradient."""
    m = None if form.momentum is None else own.get(layout.momentum)
    comp = own.get(COMPENSATION) if form.rounding == "kahan" else None
    at = rounding.counter(0, plan.shape) if is_drawn(p, form) else None
    g = p if p.grad is None else p.grad
    if plan.factored:
        return broadcasting(plan, p, g, own.get(layout.row), own.get(layout.col), None, m, comp, at)
    return broadcasting(plan, p, g, None, None, own.get(layout.full), m, comp, at)


def is_drawn(p: Tensor, form: Form) -> bool:
    """Whether a parameter is rounded with random bits."""
    return form.rounding != "nearest" and p.dtype in rounding.LOW


def counters(found: Found, plans: Sequence[Plan], settings: Sequence[Setting]) -> list[Counter | None]:
    """Where the elements of the parameters found are among all draws; None where they are rounded to the nearest."""
    ats: list[Counter | None] = [None] * len(plans)
    for i, (group, p) in enumerate(zip(found.groups, found.params, strict=True)):
        if is_drawn(p, settings[group].form) and found.labels is not None:
            key = rounding.key(settings[group].seed, found.labels[i])
            ats[i] = rounding.counter(key, plans[i].shape)
    return ats


def sharing(params: Sequence[Tensor]) -> set[int]:
    """The places of parameters on CPUs whose memory overlaps with that of another one."""
    spans = []
    for place, p in enumerate(params):
        if p.device.type == "cpu" and p.numel() > 0 and type(p) in (Tensor, torch.nn.Parameter):
            reach = 1 + sum((size - 1) * step for size, step in zip(p.shape, p.stride(), strict=True))
            spans.append((p.data_ptr(), p.data_ptr() + reach * p.element_size(), place))
    found: set[int] = set()
    end, last = 0, -1
    for start, stop, place in sorted(spans):
        # A parameter that was passed twice is one.
        if start < end and params[place] is not params[last]:
            found |= {place, last}
        if stop > end:
            end, last = stop, place
    return found


class Program:
    """The parts of a step, for tensors as they were found.

    Args:
        found: what the step is for, with all its state.
        groups: of the optimizer.
        settings: of all groups.
        layout: the names of the state.

    Raises:
        RuntimeError: a group insists on a backend that does not support one of its tensors.
    """

    @torch.inference_mode(False)
    def __init__(
        self, found: Found, groups: Sequence[Mapping[str, Any]], settings: Sequence[Setting], layout: Layout
    ) -> None:
        # Not as inference tensors, which no later step could write to.
        self._settings = list(settings)
        owners = found.groups
        plans = [settings[i].factoring.plan(tuple(p.shape)) for i, p in zip(owners, found.params, strict=True)]
        self._names = [
            [name if plan.factored else None for plan in plans]
            if factored
            else [None if plan.factored else name for plan in plans]
            for name, factored in ((layout.row, True), (layout.col, True), (layout.full, False))
        ]
        self._names.append([layout.momentum if settings[i].form.momentum is not None else None for i in owners])
        forms = [settings[i].form for i in owners]
        kahan = [form.rounding == "kahan" and is_drawn(p, form) for p, form in zip(found.params, forms, strict=True)]
        self._names.append([COMPENSATION if each else None for each in kahan])
        self._counters = counters(found, plans, settings)
        columns, steps = self.gather(found)
        self._facts = None if torch.compiler.is_compiling() else _facts(found, columns, steps)

        shared = sharing(found.params)
        members: dict[Key, list[Member]] = {}
        seen: set[int] = set()
        for place, (p, group, item) in enumerate(
            zip(found.params, owners, map(broadcasting, plans, *columns[1:]), strict=True)
        ):
            setting = settings[group]
            try:
                name, _ = backends.pick(setting.choice, item, shared=place in shared)
            except backends.Unsupported as error:
                position = next(i for i, other in enumerate(groups[group]["params"]) if other is p)
                raise RuntimeError(f"{checks.label(groups[group], group, position)} {error}") from None
            # A tensor that was passed twice takes one step.
            if id(p) not in seen:
                seen.add(id(p))
                key = Key(backends.BACKENDS[name], setting.form, arithmetic(p.dtype), p.device)
                members.setdefault(key, []).append(
                    Member(place, group, item.plan, p.element_size() + item.g.element_size())
                )
        self.parts = [Part(key, some) for key, some in members.items()]

    def columns(self, found: Found, settings: Sequence[Setting]) -> tuple[Columns, list[Tensor]] | None:
        """The columns and the step counts of what is found now; None where it is not as it was."""
        if self._facts is None or found.counts != self._facts[0] or self._settings != settings:
            return None
        try:
            columns = self.gather(found)
        except (KeyError, TypeError):
            return None
        return columns if _facts(found, *columns) == self._facts else None

    @property
    def devices(self) -> set[torch.device]:
        """Where the parameters are."""
        return {part.key.device for part in self.parts}

    def step(self, columns: tuple[Columns, list[Tensor]], rules: Sequence[Rule], scaling: Scaling) -> Tensor | None:
        """Take one step of all parts, under the rules of all groups.

        Returns:
            Whether a tensor stayed as it was since a gradient is not finite, 0-d; None where nobody looked.
        """
        try:
            for part in self.parts:
                part.begin(*columns, rules, scaling.unscale)
            inf = None if scaling.found_inf is None else scaling.found_inf != 0
            together = [part for part in self.parts if part.key.form.skip == "step"]
            bad = _any([*(part.first() for part in together), inf])
            return _any([part.rest(bad if part in together else inf) for part in self.parts])
        finally:
            for part in self.parts:
                part.end()

    def measured(self) -> Iterator[tuple[int, Measured | None]]:
        """See Part.measured."""
        return chain.from_iterable(part.measured() for part in self.parts)

    def looked_at(self) -> Iterator[tuple[int, Tensor]]:
        """See Part.looked_at."""
        return chain.from_iterable(part.looked_at() for part in self.parts)

    def gather(self, found: Found) -> tuple[Columns, list[Tensor]]:
        """The columns and the step counts of what was found, which has all its state."""
        states: list[State] = found.states  # type: ignore[assignment]  # None raises below
        held = [
            [None if name is None else own[name] for own, name in zip(states, names, strict=True)]
            for names in self._names
        ]
        R, C, V, m, comp = held
        columns = Columns((), found.params, found.grads, R, C, V, m, comp, self._counters)
        return columns, [own["step"] for own in states]


def _any(masks: Sequence[Tensor | None]) -> Tensor | None:
    """Whether any mask is true, 0-d, on the device of the first; None where there are none.

    Those of tensors without values have no say beside others.
    """
    some = [mask for mask in masks if mask is not None]
    some = [mask for mask in some if not mask.is_meta] or some
    if not some:
        return None
    device = some[0].device
    return torch.stack([moved(mask, device) for mask in some]).any()


# Strides, dtype and bytes say what the shape of a dense tensor is, for less.
_own, _look = attrgetter("dtype", "nbytes"), attrgetter("dtype", "device", "nbytes")


def _facts(found: Found, columns: Columns, steps: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """All that a step relies on, and that a user may change between two steps; None where tensors have no addresses.

    Parameters and state are looked at less closely than gradients, which are new ones at every step.
    """
    state = (columns.R, columns.C, columns.V, columns.m, columns.comp, steps)
    held = [x for column in state for x in column if x is not None]
    kept = [*found.params, *held]
    try:
        return (
            found.counts,
            found.labels,
            list(map(id, kept)),
            list(map(Tensor.data_ptr, kept)),
            [x.nbytes for x in held],
            list(map(_own, found.params)),
            list(map(Tensor.stride, found.params)),
            list(map(type, found.grads)),
            list(map(_look, found.grads)),
            list(map(Tensor.stride, found.grads)),
            list(map(Tensor.is_neg, found.grads)),
            list(map(backends.kernel.is_zerotensor, found.grads)),
            backends.kernel.modes(),
        )
    except (TypeError, RuntimeError):
        return None
