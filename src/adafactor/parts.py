"""The step of all tensors of one kind: counted, cut into waves, called off where it is to be, and written.

Whole tensors go through all sweeps wave by wave, unless something has to be known of all of them first. Shards go
through each sweep together, since their processes tell each other what the sweep has found.

Nothing here holds a tensor of the optimizer's between steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import sweeps
from .exchange import Exchange, Spots
from .rounding import put
from .rule import Form, Numbers, Rule, numbers
from .shapes import Plan
from .sweeps import Backend, Batch, Columns, Item, broadcasting, stacked, waves


class Key(NamedTuple):
    """What the tensors of one batch have in common. is_shared: whether they are shards."""

    backend: Backend
    form: Form
    dtype: torch.dtype
    device: torch.device
    is_shared: bool


class Member(NamedTuple):
    """A parameter of a part: its place among those found, its group and plan, the bytes of p and g an element, and of a
    shard its number in its exchange."""

    place: int
    group: int
    plan: Plan
    width: int
    number: int | None


class Measured(NamedTuple):
    """What the last step measured of a parameter: the sum of its squares, and of how many."""

    p2: Tensor
    numel: Tensor

    @property
    def rms(self) -> float:
        """rms(p). Waits for the device."""
        return math.sqrt(float(self.p2) / float(self.numel))


NOTHING = Columns(*[()] * len(Columns._fields))
"""What a batch holds between steps."""


NO_STEPS = torch.zeros(0, dtype=torch.float32, device="cpu")


def moved(mask: Tensor, device: torch.device) -> Tensor:
    """A mask on a device, which is waited for only by a CPU."""
    return mask if mask.device == device else mask.to(device, non_blocking=device.type != "cpu")


def _either(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """What is marked by one of two masks; None is nothing."""
    if one is None or other is None:
        return other if one is None else one
    return one | other


class Indices(NamedTuple):
    """Where a part's numbers are in the vectors of an exchange, as indices on its device; None is nowhere.

    One of live, bad and g2 for each member, one of p2 and u2 for each of its slices that is here.
    """

    live: Tensor
    bad: Tensor | None
    g2: Tensor | None
    p2: Tensor | None
    u2: Tensor


class Part:
    """The parameters of one key: their places among those found, their groups and plans, and what a step needs.

    Args:
        key: the key.
        members: the parameters.
        shared: what they are exchanged in, where they are shards.
    """

    def __init__(self, key: Key, members: Sequence[Member], shared: Exchange | None) -> None:
        self.key = key
        self.exchange = shared
        self._places = [member.place for member in members]
        # An empty tensor counts its steps and has nothing to compute.
        blank = [None] * (len(Item._fields) - 1)
        items = [Item(member.plan, *blank) for member in members]  # type: ignore[arg-type]
        slices = [[each.plan for each in stacked(item)] if item.plan.whole.numel > 0 else [] for item in items]
        # Of a stack that is shared out there may be no slice here.
        full = [i for i, some in enumerate(slices) if some]
        self._plans = [members[i].plan for i in full]
        self._full = [members[i].place for i in full]
        self._is_stacked = any(plan.slices for plan in self._plans)
        plans = list(chain.from_iterable(slices))
        owners = [i for i, some in enumerate(slices) for _ in some]
        # How many each member has.
        self._slices = list(map(len, slices))
        self._groups = sorted({member.group for member in members})
        self._which = torch.tensor(
            [self._groups.index(members[i].group) for i in owners], dtype=torch.int64, device="cpu"
        )
        self._owners = torch.tensor(owners, dtype=torch.int64, device="cpu")
        # An index on the host would have to be sent each time, and waited for.
        self._owners_there = self._owners.to(key.device, non_blocking=True)
        sizes = [members[i].width * plan.numel for i, plan in zip(owners, plans, strict=True)]
        self._starts = [owners.index(i) for i in full]
        numel = torch.tensor([plan.whole.numel for plan in plans], dtype=key.dtype, device="cpu")
        self._numel = numel.to(key.device, non_blocking=True)

        def vector(wanted: Any, size: int = len(plans), dtype: torch.dtype = key.dtype) -> Tensor | None:
            return torch.zeros(size, dtype=dtype, device=key.device) if wanted else None

        self._p2, self._g2 = vector(key.form.scale), vector(key.form.clips)
        self._bad = vector(key.form.skip, dtype=torch.bool)
        # Of each member; squares is the sum of |g|^2, spoilt is whether its gradient is not finite.
        self._squares = vector(key.form.clips, len(members))
        self._spoilt = vector(key.form.skip, len(members), torch.bool)
        # Of the last step that was taken.
        self._shown = torch.zeros(len(plans), dtype=key.dtype, device=key.device)
        self._waves = [(wave, self._batch(wave)) for wave in waves(sizes, key.backend.WAVE)]
        self._indices = None
        if shared is not None:
            self._indices = self._find_indices([shared.spots[m.number] for m in members if m.number is not None])
        # Whether all waves take the first sweep before any goes on: those of a stack share a parameter.
        by_itself = key.form.skip == "parameter"
        self.looks_ahead = bool(
            shared is not None or key.form.clips or key.form.skip == "step" or (by_itself and self._is_stacked)
        )
        self._steps: list[Tensor] = []
        self._t = NO_STEPS
        self._table: Numbers | None = None
        # [members] which have no gradient anywhere, and which of all stay as they are, for that or another reason.
        self._absent: Tensor | None = None
        self._called_off: Tensor | None = None
        self._stay: Tensor | None = None

    @property
    def places(self) -> list[int]:
        """The places of all members among the parameters found."""
        return self._places

    def _batch(self, wave: slice) -> Batch:
        """A wave of no tensors yet."""
        p2, bad, g2 = (None if each is None else each[wave] for each in (self._p2, self._bad, self._g2))
        return Batch(
            NOTHING,
            None,  # type: ignore[arg-type]
            self.key.form,
            self.key.dtype,
            self._numel[wave],
            p2,
            bad,
            g2,
            frugal=self.exchange is not None,
        )

    def _find_indices(self, found: Sequence[Spots]) -> Indices:
        def index(columns: Sequence[int | None]) -> Tensor:
            return torch.tensor(columns, dtype=torch.int64, device="cpu").to(self.key.device, non_blocking=True)

        return Indices(
            index([each.live for each in found]),
            index([each.bad for each in found]) if self.key.form.skip else None,
            index([each.g2 for each in found]) if self.key.form.clips else None,
            index([i for each in found for i in each.p2]) if self.key.form.scale else None,
            index([i for each in found for i in each.u2]),
        )

    def begin(
        self,
        columns: Columns,
        steps: Sequence[Tensor],
        rules: Sequence[Rule],
        unscale: Tensor | None,
        absent: Sequence[bool],
    ) -> None:
        """Get ready for a step. Writes nothing.

        Args:
            columns: of all parameters found, their plans aside.
            steps: the step counts of all parameters found.
            rules: of all groups.
            unscale: what gradients are multiplied by first.
            absent: which of all parameters found have no gradient here, zeros stand in for it; empty where all have.
        """
        dtype, device = self.key.dtype, self.key.device
        self._steps = [steps[i] for i in self._places]
        self._t = self.key.backend.count(self._steps)
        self._absent = None
        if any(absent):
            own = torch.tensor([absent[i] for i in self._places], dtype=torch.bool, device="cpu")
            self._absent = own.to(device, non_blocking=True)
        if not self._plans:
            return
        columns = Columns(self._plans, *([column[i] for i in self._full] for column in columns[1:]))  # type: ignore[arg-type]
        if self._is_stacked:
            rows = (each for item in map(broadcasting, *columns) for each in stacked(item))
            columns = Columns(*zip(*rows, strict=True))
        some = [rules[i] for i in self._groups]
        t = self._t[self._owners if self._t.device.type == "cpu" else self._owners_there]
        table = self._table = numbers(some, self._which, t, dtype, device, unscale)
        if len(self._waves) == 1:
            [(_, batch)] = self._waves
            batch.columns, batch.numbers = columns, table
            return
        for wave, batch in self._waves:
            batch.columns, batch.numbers = columns.part(wave), table.part(wave)

    def first(self) -> None:
        """The first sweep, of all waves."""
        for _, batch in self._waves:
            sweeps.first(batch, self.key.backend)
        if self._spoilt is not None and self._bad is not None:
            self._spoilt.copy_(self._by_member(self._bad))
        if self._squares is not None and self._g2 is not None:
            self._squares.copy_(self._by_member(self._g2))

    def spoilt(self) -> Tensor:
        """Whether a gradient is not finite, 0-d, once the first sweep is through."""
        assert self._spoilt is not None
        return self._spoilt.any()

    def tell(self, values: Tensor) -> None:
        """Write what the first sweep has found to the vector of an exchange."""
        where = self._indices
        assert where is not None
        live = torch.ones_like(where.live) if self._absent is None else ~self._absent
        own = ((where.live, live), (where.bad, self._spoilt), (where.g2, self._squares), (where.p2, self._p2))
        for at, found in own:
            if at is not None and found is not None:
                values[at] = found.to(values.dtype)

    def hear(self, values: Tensor) -> None:
        """Take what all processes have found from the vector of an exchange."""
        where = self._indices
        assert where is not None
        if self._absent is not None:
            self._absent = values[where.live] == 0
        if where.bad is not None and self._spoilt is not None:
            self._spoilt.copy_(values[where.bad] != 0)
        for at, found in ((where.g2, self._squares), (where.p2, self._p2)):
            if at is not None and found is not None:
                found.copy_(values[at])

    def squares(self) -> Tensor | None:
        """[members] the sums of |g|^2 once the first sweep is through, 0 for those that stay by themselves."""
        if self._squares is None or self._spoilt is None or self.key.form.skip == "step":
            return self._squares
        return torch.where(self._spoilt, 0, self._squares)

    def clip(self, factor: Tensor) -> None:
        """Multiply the gradients by a scalar in the sweeps to come."""
        if self._table is not None:
            self._table.clip(factor.to(self.key.device, self.key.dtype, non_blocking=True))

    def decide(self, all_stay: Tensor | None) -> None:
        """Settle what is to stay as it is, as far as the first sweep is through.

        Args:
            all_stay: 0-d, whether everything is to stay. None is no.
        """
        own = self._spoilt if self.looks_ahead and self.key.form.skip == "parameter" else None
        all_stay = None if all_stay is None else moved(all_stay, self.key.device)
        self._called_off = _either(own, None if all_stay is None else all_stay.repeat(len(self._places)))
        self._stay = _either(self._absent, self._called_off)
        if self.looks_ahead and self._stay is not None:
            hold = self._stay[self._owners_there]
            for wave, batch in self._waves:
                batch.hold = hold[wave]

    def second(self) -> None:
        """The second sweep, of all waves; what it has found goes to the vector of the exchange."""
        assert self.exchange is not None
        assert self._indices is not None
        found = [sweeps.second(batch, self.key.backend) for _, batch in self._waves]
        if found:
            self.exchange.second.values[self._indices.u2] = torch.cat(found)

    def third(self) -> None:
        """The third sweep, of all waves."""
        assert self.exchange is not None
        assert self._indices is not None
        u2 = self.exchange.second.values[self._indices.u2]
        for wave, batch in self._waves:
            sweeps.third(batch, self.key.backend, u2[wave])

    def rest(self) -> None:
        """The rest of the step, with the first sweep where it is still to come: wave by wave."""
        backend, by_itself = self.key.backend, self.key.form.skip == "parameter"
        all_stay = None if self._stay is None else self._stay[self._owners_there]
        for wave, batch in self._waves:
            if not self.looks_ahead:
                sweeps.first(batch, backend)
                batch.hold = _either(batch.bad if by_itself else None, None if all_stay is None else all_stay[wave])
            sweeps.third(batch, backend, sweeps.second(batch, backend))
        if by_itself and not self.looks_ahead and self._bad is not None and self._spoilt is not None:
            self._spoilt.copy_(self._by_member(self._bad))
            self._stay = self._called_off = _either(self._spoilt, self._stay)

    def keep(self) -> Tensor | None:
        """Count the step. Returns whether something was called off, 0-d; None where nothing could be."""
        stay = self._stay
        if self._p2 is not None:
            put(self._shown, self._p2, None if stay is None else stay[self._owners_there])
        t = self._t
        if stay is not None:
            t = torch.where(moved(stay, t.device), torch.stack(self._steps), t)
        self.key.backend.keep(self._steps, t)
        return None if self._called_off is None else self._called_off.any()

    def end(self) -> None:
        """Let go of all tensors of the step."""
        self._steps, self._t, self._table = [], NO_STEPS, None
        self._absent = self._stay = self._called_off = None
        for _, batch in self._waves:
            batch.columns, batch.numbers, batch.hold, batch.kept = NOTHING, None, None, None  # type: ignore[assignment]

    def _by_member(self, values: Tensor) -> Tensor:
        """[members] sums of what is known of the slices of each; of marks, whether there is any."""
        if self._slices == [1] * len(self._slices):
            return values
        is_mark = values.dtype is torch.bool
        return torch.stack([each.any() if is_mark else each.sum() for each in torch.split(values, self._slices)])

    def looked_at(self) -> Iterator[tuple[int, Tensor]]:
        """The place of each parameter, and whether its gradient is not finite, 0-d, where the form skips."""
        if self._spoilt is not None:
            yield from zip(self._places, self._spoilt, strict=True)

    def measured(self) -> Iterator[tuple[int, Measured | None]]:
        """The place of each parameter that is not empty, and what is known of it where the form scales.

        The tensors are the same from step to step. Of a stack, the first slice speaks.
        """
        for place, i in zip(self._full, self._starts, strict=True):
            yield place, None if self._p2 is None else Measured(self._shown[i], self._numel[i])
