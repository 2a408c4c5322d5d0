"""How a step's tensors are batched: which backend takes each, and in which waves; and the step of all of them.

To look at every tensor's shape, dtype and place takes more time than small tensors take to compute, so it is done once
and then only checked to be as it was. What is remembered holds no state and no gradients: those that a user frees or
moves between two steps are freed at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backends, checks, sharding
from .batching import Found, Setting, counters, facts, here, is_drawn, known, sharing
from .exchange import Exchange, Flags, Sums, abstain, leave
from .layouts import COMPENSATION, Layout
from .parts import Key, Measured, Member, Part, moved
from .reference import norm
from .rule import Rule
from .state import State, arithmetic
from .sweeps import Columns, broadcasting


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
        self._counts = found.counts
        self._facts = None if torch.compiler.is_compiling() else known(found, columns, steps)

        shared = sharing(found.p)
        members: dict[Key, list[Member]] = {}
        seen: set[int] = set()
        for place, (p, group, item) in enumerate(
            zip(found.params, owners, map(broadcasting, map(here, plans, shards), *columns[1:]), strict=True)
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
        self._order = torch.tensor(sorted(range(len(places)), key=places.__getitem__), dtype=torch.int64, device="cpu")

    def columns(self, found: Found, settings: Sequence[Setting]) -> tuple[Columns, list[Tensor]] | None:
        """The columns and the step counts of what is found now; None where it is not as it was."""
        if self._facts is None or found.counts != self._counts or self._settings != settings:
            return None
        try:
            columns = self.gather(found)
            is_known = all(list(now) == before for now, before in zip(facts(found, *columns), self._facts, strict=True))
        except (KeyError, TypeError, RuntimeError):
            return None
        return columns if is_known else None

    @property
    def are_whole(self) -> bool:
        """Whether no parameter is a DTensor."""
        return not self._wrapped

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
                overflow = None if scaling.found_inf is None else sharding.local(scaling.found_inf) != 0
                together = [part for part in self.parts if part.key.form.skip == "step"]
                flags = Flags(_any([part.spoilt() for part in together]), overflow)
            except Exception:
                if self._exchanges:
                    abstain(self._exchanges, "stop")
                    leave(self._exchanges)
                raise
            if self._exchanges:
                flags = self._meet(flags)
            largest = next((rule.max_grad_norm for rule in rules if rule.max_grad_norm is not None), None)
            total = None if largest is None else self._clip(largest)
            bad = _any(flags)
            for part in self.parts:
                part.decide(bad if part in together else flags.overflow)
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

    def _meet(self, flags: Flags) -> Flags:
        """Exchange what the first sweep has found. Returns the flags of all processes."""
        lead = self._exchanges[0]
        for exchange in self._exchanges:
            for part in self.parts:
                if part.exchange is exchange:
                    part.tell(exchange.first.values)
        lead.tell(bad=flags.bad, overflow=flags.overflow)
        for exchange in self._exchanges:
            exchange.first.reduce()
        found = lead.hear()
        for exchange in self._exchanges:
            for part in self.parts:
                if part.exchange is exchange:
                    part.hear(exchange.first.values)
        return found

    def _clip(self, largest: float) -> Tensor:
        """Clip all gradients together. Returns their norm, 0-d."""
        found = [squares for part in self.parts if (squares := part.squares()) is not None]
        if not found:
            return torch.zeros((), device="cpu")
        device = found[0].device
        squares = torch.cat([each.to(device, torch.float64 if device.type == "cpu" else each.dtype) for each in found])
        # In the parameters' order, which is the same on all processes.
        if self._order.device != device:
            self._order = self._order.to(device)
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
