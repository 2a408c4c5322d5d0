"""What can be read off an optimizer between two steps: step sizes, the norm, what was skipped, the backends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import backends, batching, checks, sharding, state
from .layouts import Layout
from .parts import Measured
from .program import Program
from .reference import is_finite, norm
from .rule import Rule
from .shapes import MODES, Factoring, Plan


class Readings(torch.optim.Optimizer):
    """An optimizer that remembers what its last step has found. ``optimizer.py`` takes the steps."""

    layout: ClassVar[Layout]
    """The layout that ``state_dict()`` writes."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        # rms(p) of the last step, for step_sizes() and for layouts that save it: derived, so no state.
        self._rms: dict[Tensor, Measured | float] = {}
        self._norm: Tensor | None = None
        # Whether the gradients of the last step were not finite, where it looked.
        self._bad: dict[Tensor, Tensor] = {}
        self._skipped = zero()
        # Of the last step, None before the first.
        self._program: Program | None = None
        super().__init__(params, defaults)

    @staticmethod
    def rule(group: Mapping[str, Any]) -> Rule:
        """What a step of the group computes. Raises a ValueError that names the argument, its rule and its value."""
        raise NotImplementedError

    @staticmethod
    def factoring(group: Mapping[str, Any]) -> Factoring:
        """Which of the group's shapes are factored, and over which dims. Raises a ValueError like ``rule``."""
        return Factoring(
            checks.choice("factor", group.get("factor", "last"), MODES),
            checks.count("min_dim_size_to_factor", group.get("min_dim_size_to_factor", 0)),
        )

    def _plan(self, p: Tensor, group: Mapping[str, Any]) -> Plan:
        return self.factoring(group).plan(tuple(p.shape))

    def _steps_of(self, p: Tensor) -> float:
        return state.steps(self.state.get(p))

    def step_sizes(self) -> list[float | None]:
        """The step size alpha of each group's first parameter that has stepped: rho, times its scale at the last step.

        None for a group that has not stepped yet, or whose shards have not since they were loaded. rho is that of the
        group's present options. Reads the scale from the device, so it may wait for an accelerator.
        """
        sizes: list[float | None] = []
        for group in self.param_groups:
            p = next((p for p in group["params"] if self._steps_of(p) > 0), None)
            if p is None:
                sizes.append(None)
                continue
            rule = self.rule(group)
            rho = 0.0 if is_zero(rule.lr) else rule.step_size(self._steps_of(p))
            rms = self._rms_of(p) if rule.scale else 0.0
            sizes.append(None if rms is None else rho * max(rms, rule.eps2) if rule.scale else rho)
        return sizes

    def _rms_of(self, p: Tensor) -> float | None:
        """rms(p) at the last step; where none has measured it, of p as it is; None where only a part of p is here."""
        if p in self._rms:
            known = self._rms[p]
            return known if isinstance(known, float) else known.rms
        if sharding.is_shared(p):
            return None
        whole = sharding.local(p.detach()).to(state.arithmetic(p.dtype))
        return float(norm(whole)) / math.sqrt(max(p.numel(), 1))

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients of the last step together, before they were clipped: 0-d, where they are.

        None without max_grad_norm, and before the first step. Of shards, it is that of the whole gradients.
        """
        return self._norm

    @property
    def skipped_steps(self) -> Tensor:
        """How many steps left something as it was, since a gradient was not finite: 0-d, int64, where they looked.

        Since the optimizer was made, or copied from: it is no part of the state dict. A copy, which waits for nobody
        until it is read.
        """
        return self._skipped.clone()

    def nonfinite_parameters(self) -> list[str]:
        """The parameters whose gradients are not finite, by name, or as "parameter 0 of group 0" without names.

        With skip_nonfinite, the gradients of the last step, as it saw them; without, and before the first step, those
        that are there now (under a GradScaler, as they are scaled). Finite means that the squares, and their sums over
        rows and over columns, are, in float32 (float64 for float64 parameters). Reads from the devices, so it may wait
        for them.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        found = []
        for index, group in enumerate(self.param_groups):
            for position, p in enumerate(group["params"]):
                if self._program is not None and group.get("skip_nonfinite"):
                    bad = p in self._bad and bool(self._bad[p].any())
                else:
                    bad = p.grad is not None and not self._is_finite(p, p.grad, group, index, position)
                if bad:
                    found.append(checks.name(group, index, position))
        return found

    def _is_finite(self, p: Tensor, g: Tensor, group: Mapping[str, Any], index: int, position: int) -> bool:
        checks.gradient(p, g, group, index, position)
        item = batching.item(p, self._plan(p, group), {}, self.rule({**group, "lr": 0.0}).form, self.layout)
        return is_finite(item, state.arithmetic(p.dtype))

    def taken(self) -> list[backends.Taken]:
        """What the next step of each parameter takes: see ``backends.why``."""
        taken: list[backends.Taken] = []
        params = [p for group in self.param_groups for p in group["params"]]
        shared = {id(params[place]) for place in batching.sharing(list(map(sharding.local, params)))}
        for index, group in enumerate(self.param_groups):
            choice, rule = backends.choose(group), self.rule({**group, "lr": 0.0})
            for position, p in enumerate(group["params"]):
                item = batching.item(p, self._plan(p, group), self.state.get(p, {}), rule.form, self.layout)
                label = checks.label(group, index, position)
                try:
                    taken.append(backends.Taken(label, *backends.pick(choice, item, shared=id(p) in shared)))
                except backends.Unsupported as error:
                    taken.append(backends.Taken(label, choice.name, str(error)))
        return taken


@torch.inference_mode(False)
def zero() -> Tensor:
    """A count; not as an inference tensor, which no later step could write to."""
    return torch.zeros((), dtype=torch.int64, device="cpu")


def is_zero(lr: float | Tensor) -> bool:
    """Whether the host knows lr to be 0: one on an accelerator it does not read."""
    return not isinstance(lr, Tensor) and lr == 0
