"""How a step's tensors are batched: which backend takes each, and in which waves; and whether that still holds.

To look at every tensor's shape, dtype and place takes more time than small tensors take to compute, so it is done once
and then only checked to be as it was. What is remembered holds no tensor: state and gradients that a user frees or
moves between two steps are freed at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backends, checks, rounding, sharding
from .exchange import Exchange, Sums, refused
from .layouts import COMPENSATION, Layout
from .parts import Key, Measured, Member, Part, moved
from .reference import norm
from .rounding import Counter
from .rule import Form, Rule
from .shapes import Factoring, Plan
from .sharding import Shards
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


class Outcome(NamedTuple):
    """What a step leaves to be read.

    Attributes:
        stayed: whether a tensor stayed as it was since a gradient is not finite, 0-d; None where nobody looked.
        norm: of all gradients together, 0-d; None where nobody asks.
    """

    stayed: Tensor | None
    norm: Tensor | None


class Found(NamedTuple):
    """The parameters with gradients: how many each group has, and all of them in a row.

    Shards count where they may have a gradient on another process, with zeros where they have none here.

    p, grads: what is here of the parameters and their gradients. absent: which of them have no gradient here.
    placements: of gradients that are DTensors.
    labels: what tells apart parameters that are rounded with random bits: the name where there are names, else the
    place among all. None where all are rounded to the nearest.
    """

    counts: list[int]
    params: list[Tensor]
    p: list[Tensor]
    grads: list[Tensor]
    absent: list[bool]
    placements: list[Any]
    states: list[State | None]
    labels: list[str] | None

    @property
    def groups(self) -> list[int]:
        """The index of each parameter's group."""
        return [index for index, count in enumerate(self.counts) for _ in range(count)]


def find(groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, State]) -> Found:
    """What a step is for."""
    live = [[p for p in group["params"] if takes_part(p)] for group in groups]
    params: list[Tensor] = list(chain.from_iterable(live))
    given = [p.grad for p in params]
    here = [sharding.local(p) for p in params]
    grads = [torch.zeros_like(x) if g is None else sharding.local(g) for g, x in zip(given, here, strict=True)]
    absent = [g is None for g in given]
    placements = [sharding.placements_of(g) for g in given if g is not None and sharding.is_distributed(g)]
    labels = None
    if any(group.get("rounding", "nearest") != "nearest" for group in groups):
        labels = list(_labels(groups))
    return Found(list(map(len, live)), params, here, grads, absent, placements, list(map(states.get, params)), labels)


def takes_part(p: Tensor) -> bool:
    """Whether a step is for a parameter: it has a gradient, or another process may have one of its shards."""
    return p.grad is not None or (p.requires_grad and sharding.is_shared(p))


def _labels(groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    place = 0
    for group in groups:
        names = group.get("param_names")
        for i, p in enumerate(group["params"]):
            if takes_part(p):
                yield names[i] if names else str(place + i)
        place += len(group["params"])


def item(p: Tensor, plan: Plan, own: Mapping[str, Any], form: Form, layout: Layout) -> Item:
    """What the next step of a parameter is for, with as much of its state as there is, and p for a missing gradient."""
    names = [layout.row, layout.col, None] if plan.factored else [None, None, layout.full]
    names.append(None if form.momentum is None else layout.momentum)
    names.append(COMPENSATION if form.rounding == "kahan" else None)
    held = [None if name is None else sharding.local(own.get(name)) for name in names]
    shards = sharding.find(p)
    at = _counter(0, plan, shards) if is_drawn(p, form) else None
    g = p if p.grad is None else p.grad
    return broadcasting(_here(plan, shards), sharding.local(p), sharding.local(g), *held, None, None, None, at)


def _here(plan: Plan, shards: Shards | None) -> Plan:
    """The plan of what is here of a tensor."""
    if shards is None:
        return plan
    return plan.shard(shards.shape, speaks=shards.over(plan.rows) <= shards.first)


def _counter(key: int, plan: Plan, shards: Shards | None) -> Counter:
    """Where the elements that are here of a tensor are among all draws."""
    at = rounding.counter(key, plan.shape)
    if shards is None:
        return at
    return at._replace(start=sum(i * step for i, step in zip(shards.starts, at.strides, strict=True)))


def is_drawn(p: Tensor, form: Form) -> bool:
    """Whether a parameter is rounded with random bits."""
    return form.rounding != "nearest" and p.dtype in rounding.LOW


def counters(
    found: Found, plans: Sequence[Plan], shards: Sequence[Shards | None], settings: Sequence[Setting]
) -> list[Counter | None]:
    """Where the elements of the parameters found are among all draws; None where they are rounded to the nearest."""
    ats: list[Counter | None] = [None] * len(plans)
    for i, (group, p) in enumerate(zip(found.groups, found.params, strict=True)):
        if is_drawn(p, settings[group].form) and found.labels is not None:
            ats[i] = _counter(rounding.key(settings[group].seed, found.labels[i]), plans[i], shards[i])
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
        exchanges: what its shards are exchanged in, see ``meeting.py``.

    Raises:
        RuntimeError: a group insists on a backend that does not support one of its tensors.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        found: Found,
        groups: Sequence[Mapping[str, Any]],
        settings: Sequence[Setting],
        layout: Layout,
        exchanges: Sequence[Exchange],
    ) -> None:
        # Not as inference tensors, which no later step could write to.
        self._settings = list(settings)
        self._exchanges = exchanges
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
        shards = list(map(sharding.find, found.params))
        self._counters = counters(found, plans, shards, settings)
        within = {number: exchange for exchange in exchanges for number in exchange.sums}
        # As the meeting has counted them.
        shared_out = [place for place, each in enumerate(shards) if each is not None]
        numbers = {place: number for number, place in enumerate(shared_out)}
        sums = [
            within[numbers[place]].sums[numbers[place]] if place in numbers else Sums() for place in range(len(plans))
        ]
        self._sums = [list(column) for column in zip(*sums, strict=True)] or [[], [], []]
        self._wrapped = [p for p in found.params if sharding.is_distributed(p)]
        columns, steps = self.gather(found)
        self._facts = None if torch.compiler.is_compiling() else _facts(found, columns, steps)

        shared = sharing(found.p)
        members: dict[Key, list[Member]] = {}
        seen: set[int] = set()
        here = list(map(_here, plans, shards))
        for place, (p, group, item) in enumerate(
            zip(found.params, owners, map(broadcasting, here, *columns[1:]), strict=True)
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
                key = Key(backends.BACKENDS[name], setting.form, arithmetic(p.dtype), p.device, place in numbers)
                members.setdefault(key, []).append(
                    Member(place, group, item.plan, item.p.element_size() + item.g.element_size(), numbers.get(place))
                )
        self.parts = [
            Part(key, some, None if some[0].number is None else within[some[0].number]) for key, some in members.items()
        ]
        places = list(chain.from_iterable(part.places for part in self.parts if part.key.form.clips))
        self._order = sorted(range(len(places)), key=places.__getitem__)

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

    def step(
        self,
        columns: tuple[Columns, list[Tensor]],
        absent: Sequence[bool],
        rules: Sequence[Rule],
        scaling: Scaling,
    ) -> Outcome:
        """Take one step of all parts, under the rules of all groups.

        Raises:
            RuntimeError: another process refuses the step; nothing has been written.
        """
        try:
            try:
                for part in self.parts:
                    part.begin(*columns, rules, scaling.unscale, absent)
                for part in self.parts:
                    if part.looks_ahead:
                        part.first()
            except Exception:
                for exchange in self._exchanges:
                    exchange.withdraw()
                raise
            overflow = None if scaling.found_inf is None else sharding.local(scaling.found_inf) != 0
            together = [part for part in self.parts if part.key.form.skip == "step"]
            bad = _any([part.spoilt() for part in together])
            if self._exchanges:
                bad, overflow = self._meet(bad, overflow)
            bad = _any([bad, overflow])
            largest = next((rule.max_grad_norm for rule in rules if rule.max_grad_norm is not None), None)
            total = None if largest is None else self._clip(largest)
            for part in self.parts:
                part.decide(bad if part in together else overflow)
            shards = [part for part in self.parts if part.exchange is not None]
            for part in shards:
                part.second()
            for exchange in self._exchanges:
                exchange.second.reduce()
            for part in shards:
                part.third()
            if self._wrapped:
                torch.autograd.graph.increment_version(self._wrapped)
            for part in self.parts:
                if part.exchange is None:
                    part.rest()
            return Outcome(_any([part.keep() for part in self.parts]), total)
        finally:
            for part in self.parts:
                part.end()

    def _meet(self, bad: Tensor | None, overflow: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Exchange what the first sweep has found. Returns both marks as they are on all processes."""
        stop: Tensor | None = None
        for exchange in self._exchanges:
            exchange.flags.zero_()
            for i, mark in enumerate((bad, overflow, stop)):
                if mark is not None:
                    exchange.flags[i] = mark
            for part in self.parts:
                if part.exchange is exchange:
                    part.tell(exchange.first.values)
            exchange.first.reduce()
            for part in self.parts:
                if part.exchange is exchange:
                    part.hear(exchange.first.values)
            found = exchange.flags != 0
            bad, overflow, stop = found.unbind()
        assert stop is not None
        if stop.device.type != "cpu":
            # Nobody waits for it: the step is called off on the device.
            return bad, _any([overflow, stop])
        if stop:
            raise refused()
        return bad, overflow

    def _clip(self, largest: float) -> Tensor:
        """Clip all gradients together. Returns their norm, 0-d."""
        found = [squares for part in self.parts if (squares := part.squares()) is not None]
        if not found:
            return torch.zeros((), device="cpu")
        device = found[0].device
        squares = torch.cat([each.to(device, torch.float64 if device.type == "cpu" else each.dtype) for each in found])
        # In the parameters' order, which is the same on all processes.
        total = norm(squares[self._order].sqrt())
        if largest < inf:
            factor = (largest / (total + 1e-6)).clamp(max=1)
            for part in self.parts:
                if part.key.form.clips:
                    part.clip(factor)
        return total

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
        if self._wrapped:
            held = [list(map(sharding.local, column)) for column in held]
        R, C, V, m, comp = held
        r, c, totals = self._sums
        columns = Columns((), found.p, found.grads, R, C, V, m, comp, r, c, totals, self._counters)
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
    kept = [*found.p, *held]
    try:
        return (
            found.counts,
            found.labels,
            found.placements,
            list(map(id, found.params)),
            list(map(id, held)),
            list(map(Tensor.data_ptr, kept)),
            [x.nbytes for x in held],
            list(map(_own, found.p)),
            list(map(Tensor.stride, found.p)),
            list(map(type, found.grads)),
            list(map(_look, found.grads)),
            list(map(Tensor.stride, found.grads)),
            list(map(Tensor.is_neg, found.grads)),
            list(map(backends.kernel.is_zerotensor, found.grads)),
            backends.kernel.modes(),
        )
    except (TypeError, RuntimeError):
        return None
