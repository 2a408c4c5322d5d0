"""The step of all tensors of one kind: counted, cut into waves, called off where it is to be, and written.

Nothing here holds a tensor of the optimizer's between steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from . import sweeps
from .rounding import put
from .rule import Form, Rule, numbers
from .shapes import Plan
from .sweeps import Backend, Batch, Columns, Item, broadcasting, stacked, waves


class Key(NamedTuple):
    """What the tensors of one batch have in common."""

    backend: Backend
    form: Form
    dtype: torch.dtype
    device: torch.device


class Member(NamedTuple):
    """A parameter of a part: its place among those found, its group and plan, and the bytes of p and g an element."""

    place: int
    group: int
    plan: Plan
    width: int


class Measured(NamedTuple):
    """What the last step measured of a parameter: the sum of its squares, and of how many."""

    p2: Tensor
    numel: Tensor

    @property
    def rms(self) -> float:
        """rms(p). Waits for the device."""
        return math.sqrt(float(self.p2) / float(self.numel))


NOTHING = Columns((), (), (), (), (), (), (), (), ())
"""What a batch holds between steps."""


NO_STEPS = torch.zeros(0, dtype=torch.float32, device="cpu")


def moved(mask: Tensor, device: torch.device) -> Tensor:
    """A mask on a device, which is waited for only by a CPU."""
    return mask if mask.device == device else mask.to(device, non_blocking=device.type != "cpu")


def _either(own: Tensor | None, all_stay: Tensor | None, size: int) -> Tensor | None:
    """A mask of so many: what is marked by its own mask or by the one for all."""
    if all_stay is None:
        return own
    return all_stay.repeat(size) if own is None else own | all_stay


class Part:
    """The parameters of one key: their places among those found, their groups and plans, and what a step needs."""

    def __init__(self, key: Key, members: Sequence[Member]) -> None:
        self.key = key
        self._places = [member.place for member in members]
        # An empty tensor counts its steps and has nothing to compute.
        full = [i for i, member in enumerate(members) if member.plan.numel > 0]
        self._plans = [members[i].plan for i in full]
        self._full = [members[i].place for i in full]
        self._is_stacked = any(plan.slices for plan in self._plans)
        blank = [None] * (len(Item._fields) - 1)
        slices = [[item.plan for item in stacked(Item(plan, *blank))] for plan in self._plans]  # type: ignore[arg-type]
        plans = list(chain.from_iterable(slices))
        owners = [i for i, some in zip(full, slices, strict=True) for _ in some]
        # How many each member has.
        self._slices = [0] * len(members)
        for i, some in zip(full, slices, strict=True):
            self._slices[i] = len(some)
        self._groups = sorted({member.group for member in members})
        self._which = torch.tensor(
            [self._groups.index(members[i].group) for i in owners], dtype=torch.int64, device="cpu"
        )
        self._owners = torch.tensor(owners, dtype=torch.int64, device="cpu")
        # An index on the host would have to be sent each time, and waited for.
        self._owners_there = self._owners.to(key.device, non_blocking=True)
        sizes = [members[i].width * plan.numel for i, plan in zip(owners, plans, strict=True)]
        self._starts = [owners.index(i) for i in full]
        numel = torch.tensor([plan.numel for plan in plans], dtype=key.dtype, device="cpu")
        self._numel = numel.to(key.device, non_blocking=True)
        self._p2 = torch.zeros(len(plans), dtype=key.dtype, device=key.device) if key.form.scale else None
        # Of the last step that was taken.
        self._shown = torch.zeros(len(plans), dtype=key.dtype, device=key.device)
        self._bad = torch.zeros(len(plans), dtype=torch.bool, device=key.device) if key.form.skip else None
        self._waves = [(wave, self._batch(wave)) for wave in waves(sizes, key.backend.WAVE)]
        # Whether all waves take the first sweep before any goes on: those of a stack share a parameter.
        self._looks_ahead = key.form.skip == "step" or (key.form.skip == "parameter" and self._is_stacked)
        self._steps: list[Tensor] = []
        self._t = NO_STEPS

    def _batch(self, wave: slice) -> Batch:
        """A wave of no tensors yet."""
        p2, bad = (None if each is None else each[wave] for each in (self._p2, self._bad))
        return Batch(NOTHING, None, self.key.form, self.key.dtype, self._numel[wave], p2, bad)  # type: ignore[arg-type]

    def begin(self, columns: Columns, steps: Sequence[Tensor], rules: Sequence[Rule], unscale: Tensor | None) -> None:
        """Get ready for a step. Writes nothing.

        Args:
            columns: of all parameters found, their plans aside.
            steps: the step counts of all parameters found.
            rules: of all groups.
            unscale: what gradients are multiplied by first.
        """
        dtype, device = self.key.dtype, self.key.device
        self._steps = [steps[i] for i in self._places]
        self._t = self.key.backend.count(self._steps)
        if not self._plans:
            return
        columns = Columns(self._plans, *([column[i] for i in self._full] for column in columns[1:]))  # type: ignore[arg-type]
        if self._is_stacked:
            rows = (each for item in map(broadcasting, *columns) for each in stacked(item))
            columns = Columns(*zip(*rows, strict=True))
        some = [rules[i] for i in self._groups]
        t = self._t[self._owners if self._t.device.type == "cpu" else self._owners_there]
        table = numbers(some, self._which, t, dtype, device, unscale)
        if len(self._waves) == 1:
            [(_, batch)] = self._waves
            batch.columns, batch.numbers = columns, table
            return
        for wave, batch in self._waves:
            batch.columns, batch.numbers = columns.part(wave), table.part(wave)

    def first(self) -> Tensor:
        """The first sweep. Returns whether a gradient is not finite, 0-d."""
        assert self._bad is not None
        for _, batch in self._waves:
            sweeps.first(batch, self.key.backend)
        return self._bad.any()

    def rest(self, all_stay: Tensor | None) -> Tensor | None:
        """The rest of the step, with the first sweep where it is still to come: wave by wave.

        Args:
            all_stay: 0-d, whether everything is to stay as it is. None is no.

        Returns:
            Whether something stayed as it was, 0-d; None where nothing could.
        """
        backend, by_itself = self.key.backend, self.key.form.skip == "parameter"
        all_stay = None if all_stay is None else moved(all_stay, self.key.device)
        own: Tensor | None = None
        if by_itself and self._looks_ahead:
            self.first()
            own = self._spoilt()[self._owners_there]
        for wave, batch in self._waves:
            if not self._looks_ahead:
                sweeps.first(batch, backend)
            mask = batch.bad if own is None else own[wave]
            batch.hold = _either(mask if by_itself else None, all_stay, len(batch.columns.p))
            sweeps.rest(batch, backend)
            # Plain PyTorch's u, which is as large as the wave.
            batch.kept = None
        stay = _either(self._spoilt() if by_itself else None, all_stay, len(self._places))
        if self._p2 is not None:
            put(self._shown, self._p2, None if stay is None else stay[self._owners_there])
        t = self._t
        if stay is not None:
            t = torch.where(moved(stay, t.device), torch.stack(self._steps), t)
        backend.keep(self._steps, t)
        return None if stay is None else stay.any()

    def end(self) -> None:
        """Let go of all tensors of the step."""
        self._steps, self._t = [], NO_STEPS
        for _, batch in self._waves:
            batch.columns, batch.numbers, batch.hold, batch.kept = NOTHING, None, None, None  # type: ignore[assignment]

    def _spoilt(self) -> Tensor:
        """[members] whether the gradient of each is not finite."""
        assert self._bad is not None
        if self._slices == [1] * len(self._slices):
            return self._bad
        return torch.stack([bad.any() for _, bad in self.looked_at()])

    def looked_at(self) -> Iterator[tuple[int, Tensor]]:
        """The place of each parameter, and whether the gradients of its slices are not finite, where the form skips."""
        if self._bad is not None:
            yield from zip(self._places, torch.split(self._bad, self._slices), strict=True)

    def measured(self) -> Iterator[tuple[int, Measured | None]]:
        """The place of each parameter that is not empty, and what is known of it where the form scales.

        The tensors are the same from step to step. Of a stack, the first slice speaks.
        """
        for place, i in zip(self._full, self._starts, strict=True):
            yield place, None if self._p2 is None else Measured(self._shown[i], self._numel[i])
