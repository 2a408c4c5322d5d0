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
        # Slices of each member.
        self._counts = [0] * len(members)
        for i, some in zip(full, slices, strict=True):
            self._counts[i] = len(some)
        self._groups = sorted({member.group for member in members})
        self._which = torch.tensor(
            [self._groups.index(members[i].group) for i in owners], dtype=torch.int64, device="cpu"
        )
        self._owners = torch.tensor(owners, dtype=torch.int64, device="cpu")
        sizes = [members[i].width * plan.numel for i, plan in zip(owners, plans, strict=True)]
        self._starts = [owners.index(i) for i in full]
        numel = torch.tensor([plan.numel for plan in plans], dtype=key.dtype, device="cpu")
        self._numel = numel.to(key.device, non_blocking=True)
        self._p2 = torch.zeros(len(plans), dtype=key.dtype, device=key.device) if key.form.scale else None
        # Of the last step that was taken.
        self._shown = None if self._p2 is None else self._p2.clone()
        self._bad = torch.zeros(len(plans), dtype=torch.bool, device=key.device) if key.form.skip else None
        self._waves = [(wave, self._batch(wave)) for wave in waves(sizes, key.backend.WAVE)]

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
        table = numbers(some, self._which, self._t[self._owners], dtype, device, unscale)
        for wave, batch in self._waves:
            alone = len(self._waves) == 1
            batch.columns, batch.numbers = (columns, table) if alone else (columns.part(wave), table.part(wave))

    def first(self) -> Tensor:
        """The first sweep. Returns whether a gradient is not finite, 0-d."""
        assert self._bad is not None
        for _, batch in self._waves:
            sweeps.first(batch, self.key.backend)
        return self._bad.any()

    def rest(self, hold: Tensor | None) -> Tensor | None:
        """The rest of the step, and the first sweep of what is not to be called off as a whole: wave by wave.

        Args:
            hold: 0-d, whether everything is to stay as it is. None is no.

        Returns:
            Whether something stayed as it was, 0-d; None where nothing could.
        """
        backend, alone, whole = self.key.backend, self.key.form.skip == "parameter", self.key.form.skip == "step"
        own: Tensor | None = None
        if alone and self._is_stacked:
            # Of a stack, all slices stay.
            self.first()
            own = self._spoilt()[self._owners]
        for wave, batch in self._waves:
            if not whole and own is None:
                sweeps.first(batch, backend)
            mask = own[wave] if own is not None else batch.bad if alone else None
            if hold is not None:
                mask = hold.repeat(len(batch.columns.p)) if mask is None else mask | hold
            batch.hold = mask
            sweeps.rest(batch, backend)
            # Plain PyTorch's u, which is as large as the wave.
            batch.kept = None
        stay = self._spoilt() if alone else None
        if hold is not None:
            stay = hold if stay is None else stay | hold
        if self._p2 is not None and self._shown is not None:
            each = stay[self._owners] if stay is not None and stay.dim() else stay
            put(self._shown, self._p2, each)
        t = self._t if stay is None else torch.where(stay, torch.stack(self._steps), self._t)
        backend.keep(self._steps, t)
        return None if stay is None else stay.any()

    def end(self) -> None:
        """Let go of all tensors of the step."""
        self._steps, self._t = [], None  # type: ignore[assignment]
        for _, batch in self._waves:
            batch.columns, batch.numbers, batch.hold, batch.kept = NOTHING, None, None, None  # type: ignore[assignment]

    def _spoilt(self) -> Tensor:
        """[members] whether the gradient of each is not finite."""
        assert self._bad is not None
        if self._counts == [1] * len(self._counts):
            return self._bad
        return torch.stack([bad.any() for _, bad in self.looked_at()])

    def looked_at(self) -> Iterator[tuple[int, Tensor]]:
        """The place of each parameter, and whether the gradients of its slices are not finite, where the form skips."""
        if self._bad is not None:
            yield from zip(self._places, torch.split(self._bad, self._counts), strict=True)

    def measured(self) -> Iterator[tuple[int, Measured | None]]:
        """The place of each parameter that is not empty, and what is known of it where the form scales.

        The tensors are the same from step to step. Of a stack, the first slice speaks.
        """
        for place, i in zip(self._full, self._starts, strict=True):
            yield place, None if self._shown is None else Measured(self._shown[i], self._numel[i])
