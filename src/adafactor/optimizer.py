"""The one Optimizer subclass: groups, state, the step, and the lr that a group shows. Dialects are its subclasses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from . import backends, checks, saving, state
from .layouts import Layout
from .reference import norm
from .rule import Form, Rule, numbers
from .shapes import MODES, Factoring, Plan
from .sweeps import Backend, Batch, Item, run, stacked, waves


class _Key(NamedTuple):
    """What the tensors of one batch have in common."""

    backend: Backend
    form: Form
    dtype: torch.dtype
    device: torch.device


class _Work(NamedTuple):
    """What a step needs to know of one parameter."""

    plan: Plan
    rule: Rule


class BaseAdafactor(torch.optim.Optimizer):
    """What all dialects share. A dialect sets ``layout``, defines ``rule`` and has its own arguments.

    A parameter's state (see ``state.py``) is made at once where it requires a gradient, else at its first gradient.
    """

    layout: ClassVar[Layout]
    """The layout that ``state_dict()`` writes."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        # rms(p) of the last step, for step_sizes() and for layouts that save it: derived, so no state.
        self._rms: dict[Tensor, Tensor] = {}
        # What a relative group's lr was last set to show, by the group's id: another value is somebody else's.
        self._shown: dict[int, float] = {}
        # What a group's state was factored by, by the group's id: equal sizes hide a change from the state's shapes.
        self._factored: dict[int, Factoring] = {}
        self._warned_lr = False
        # Every group may give its own lr; all other defaults have to be good even if no group ends up with them.
        self._check_group({**defaults, "lr": 0.0 if defaults["lr"] is None else defaults["lr"]})
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

    def __getstate__(self) -> dict[str, Any]:
        # A copy has to save and show what the original does.
        return super().__getstate__() | {"_rms": self._rms, "_warned_lr": self._warned_lr}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._shown = {id(group): group["lr"] for group in self.param_groups}
        self._factored = {}

    # Groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with any of the constructor's arguments as its own options.

        Args:
            param_group: ``params`` (tensors or (name, tensor) pairs) and the options that differ from the defaults.

        Raises:
            ValueError: an option or a parameter is refused; the optimizer and the dict stay as they were.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group should be a dict, got {type(param_group).__name__}")
        if isinstance(param_group.get("params"), Iterator):
            param_group["params"] = list(param_group["params"])
        # The base class fills the dict in, and refuses it half filled: the caller's own waits until all is well.
        group = self._request(dict(param_group))
        super().add_param_group(group)
        index = len(self.param_groups) - 1
        try:
            rule = self._check_group(group)
            for position, p in enumerate(group["params"]):
                checks.parameter(p, group, index, position)
        except Exception:
            self.param_groups.pop()
            raise
        param_group.clear()
        param_group.update(group)
        self.param_groups[index] = param_group
        # Under an id that may have been another group's.
        self._factored[id(param_group)] = self.factoring(param_group)
        self._show_lr(param_group, rule)
        self._make_state(param_group)

    def _request(self, group: dict[str, Any]) -> dict[str, Any]:
        """What a caller's group says, under the keys that groups have. Refuses options that cannot be meant together.

        What a group holds later, or was copied from another optimizer, is not judged by this.
        """
        return group

    def _is_copied(self, group: Mapping[str, Any]) -> bool:
        """Whether a group has every key, so that it comes from an optimizer, where a relative lr is a read-out."""
        # The base class adds a default of its own when an optimizer is copied or loaded.
        return self.defaults.keys() - {"differentiable"} <= group.keys()

    def _check_group(self, group: Mapping[str, Any]) -> Rule:
        backends.check(group)
        self.factoring(group)
        return self.rule(group)

    # State

    def _make_state(self, group: Mapping[str, Any]) -> None:
        """Make what is missing of the state of parameters that will have gradients, before the first step or a save."""
        # lr has no part in it, and may be bad for now.
        rule = self.rule({**group, "lr": 0.0})
        for p in group["params"]:
            if p.requires_grad and not p.is_meta and not is_lazy(p):
                plan = self._plan(p, group)
                if self._steps_of(p) == 0 or state.fits(self.state[p], plan, self.layout):
                    state.ensure(self.state[p], p, plan, rule, self.layout)

    def _plan(self, p: Tensor, group: Mapping[str, Any]) -> Plan:
        return self.factoring(group).plan(tuple(p.shape))

    def _steps_of(self, p: Tensor) -> float:
        return state.steps(self.state.get(p))

    def _forget_swapped(self) -> None:
        """Let go of tensors that are in no group any more: of state without steps, and of what is derived."""
        count = sum(len(group["params"]) for group in self.param_groups)
        if max(len(self.state), len(self._rms)) > count:
            current = {p for group in self.param_groups for p in group["params"]}
            for p in [p for p in self.state if p not in current and isinstance(p, Tensor) and self._steps_of(p) == 0]:
                del self.state[p]
            self._rms = {p: rms for p, rms in self._rms.items() if p in current}

    # The step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step for every parameter that has a gradient.

        Args:
            closure: reevaluates the model and returns the loss; runs with gradients enabled.

        Returns:
            The closure's loss, or None without one.

        Raises:
            ValueError: a group's option is out of range, a parameter has changed its shape, or a gradient has another.
            RuntimeError: a gradient is sparse, or a CUDA graph is being captured. A refused step touches nothing.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        # Everything that may be refused is looked at before anything is written.
        rules = [self._check_group(group) for group in self.param_groups]
        batches: dict[_Key, dict[Tensor, _Work]] = {}
        unready: dict[Tensor, _Work] = {}
        for index, (group, rule) in enumerate(zip(self.param_groups, rules, strict=True)):
            backend, factoring, form = backends.choose(group), self.factoring(group), rule.form
            before = self._factored.get(id(group), factoring)
            for position, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                checks.parameter(p, group, index, position)
                checks.gradient(p, p.grad, group, index, position)
                work = _Work(factoring.plan(tuple(p.shape)), rule)
                own = self.state.get(p)
                if not own or before != factoring or not state.ready(own, p, *work, self.layout):
                    self._check_plan(p, work.plan, before.plan(work.plan.shape), group, index, position)
                    unready[p] = work
                # A tensor that was passed twice takes one step.
                batches.setdefault(_Key(backend, form, state.arithmetic(p), p.device), {})[p] = work
        _refuse_capture(batches)
        self._warn_of_lr(rules)

        for p, work in unready.items():
            state.ensure(self.state[p], p, *work, self.layout)
        for key, batch in batches.items():
            self._run(key, batch)
        for group, rule in zip(self.param_groups, rules, strict=True):
            self._show_lr(group, rule)
            self._factored[id(group)] = self.factoring(group)
        self._forget_swapped()
        return loss

    def _run(self, key: _Key, batch: Mapping[Tensor, _Work]) -> None:
        steps = [self.state[p]["step"] for p in batch]
        torch._foreach_add_(steps, 1.0)
        # An empty tensor counts its steps and has nothing to compute.
        parts = [(p, item) for p in batch if p.numel() > 0 for item in stacked(self._item(p, batch[p].plan, key.form))]
        if not parts:
            return
        t = torch.stack([self.state[p]["step"] for p, _ in parts])
        table = numbers([batch[p].rule for p, _ in parts], t, key.dtype, key.device)
        for wave in waves([item for _, item in parts], key.backend.WAVE):
            params, items = zip(*parts[wave], strict=True)
            part = table if len(items) == len(parts) else table.part(wave)
            rms = run(Batch(items, part, key.form, key.dtype), key.backend)
            if rms is None:
                for p in params:
                    self._rms.pop(p, None)
            else:
                # Of a stack, the first slice speaks.
                self._rms.update(zip(reversed(params), rms.flip(0), strict=True))

    def _item(self, p: Tensor, plan: Plan, form: Form) -> Item:
        assert p.grad is not None
        own, layout = self.state[p], self.layout
        m = None if form.momentum is None else own[layout.momentum]
        if not plan.factored:
            return Item(plan, p, p.grad, None, None, own[layout.full], m)
        R, C = own[layout.row], own[layout.col]
        if not layout.keepdim:
            R, C = R.view(plan.row_shape), C.view(plan.col_shape)
        return Item(plan, p, p.grad, R, C, None, m)

    def _check_plan(
        self, p: Tensor, plan: Plan, before: Plan, group: Mapping[str, Any], index: int, position: int
    ) -> None:
        if self._steps_of(p) > 0 and (plan != before or not state.fits(self.state[p], plan, self.layout)):
            raise ValueError(
                f"{checks.label(group, index, position)} should keep the shape and the factors it has taken steps "
                f"with, got shape {plan.shape} with rows {plan.rows} and columns {plan.cols}"
            )

    # The learning rate as a group shows it

    def _show_lr(self, group: dict[str, Any], rule: Rule) -> None:
        """Let a relative group's lr show its step size, unless it is 0, which stays: nothing moves then."""
        if rule.relative and (group["lr"] is None or not _is_zero(rule.lr)) and not isinstance(group["lr"], Tensor):
            group["lr"] = rule.step_size(max(map(self._steps_of, group["params"]), default=0.0))
            self._shown[id(group)] = group["lr"]

    def _warn_of_lr(self, rules: Sequence[Rule]) -> None:
        for index, (group, rule) in enumerate(zip(self.param_groups, rules, strict=True)):
            shown = self._shown.get(id(group))
            known = shown is not None and not isinstance(rule.lr, Tensor)
            if rule.relative and known and rule.lr not in (0, shown) and not self._warned_lr:
                checks.warn(
                    f"the lr of parameter group {index} was set to {rule.lr}, which has no effect while the step size "
                    "is relative; only 0 has one: nothing moves"
                )
                self._warned_lr = True

    def step_sizes(self) -> list[float | None]:
        """The step size alpha of each group's first parameter that has stepped: rho, times its scale at the last step.

        None for a group that has not stepped yet. rho is that of the group's present options. Reads the scale from the
        device, so it may wait for an accelerator.
        """
        sizes: list[float | None] = []
        for group in self.param_groups:
            p = next((p for p in group["params"] if self._steps_of(p) > 0), None)
            if p is None:
                sizes.append(None)
                continue
            rule = self.rule(group)
            rho = 0.0 if _is_zero(rule.lr) else rule.step_size(self._steps_of(p))
            sizes.append(rho * max(self._rms_of(p), rule.eps2) if rule.scale else rho)
        return sizes

    def _rms_of(self, p: Tensor) -> float:
        """rms(p) at the last step; where no step has measured it, of p as it is."""
        if p in self._rms:
            return float(self._rms[p])
        return float(norm(p.detach().to(state.arithmetic(p)))) / math.sqrt(max(p.numel(), 1))

    # Saving and loading

    def state_dict(self) -> dict[str, Any]:
        """The state and the groups, in the layout of the system that the dialect matches."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        for group in self.param_groups:
            self._make_state(group)
        saved = saving.to_save(self.param_groups, self.state, self.layout, self._rms_of)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            result = post_hook(self, saved)
            saved = saved if result is None else result
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what any system known to ``layouts`` saved. What was saved is copied, statistics keep their precision.

        Hyper-parameters are taken over from the dialect's own layout; from another's they are not, with a warning,
        since they mean something else there. Engine arguments, and keys that the file lacks, stay as they are.

        Args:
            state_dict: what a ``state_dict()`` returned.

        Raises:
            ValueError: it does not fit this optimizer; the optimizer stays as it was.
        """
        # The base class would cast the statistics to the parameters' dtype, so none of this is left to it.
        saved = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            result = pre_hook(self, saved)
            saved = saved if result is None else result
        loaded = saving.to_load(saved, self.param_groups, self.layout, self._check_group, self._plan)
        states = type(self.state)(dict, loaded.states)
        self.__setstate__({"state": states, "param_groups": loaded.groups})
        self._rms = loaded.rms
        for group in self.param_groups:
            self._make_state(group)
            self._show_lr(group, self.rule(group))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


def _is_zero(lr: float | Tensor) -> bool:
    """Whether the host knows lr to be 0: one on an accelerator it does not read."""
    return not isinstance(lr, Tensor) and lr == 0


def _refuse_capture(batches: Mapping[_Key, Any]) -> None:
    if any(key.device.type == "cuda" for key in batches) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("step() should run outside of CUDA graph capture, got a capture, which would freeze t in it")
