"""The one Optimizer subclass: groups, state, the step, and saving and loading. Dialects are subclasses with a rule."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, overload

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.parameter import is_lazy

from . import backends, checks, layouts, state
from .layouts import Layout
from .rule import Form, Rule, numbers
from .sweeps import Backend, Batch, Item, run, waves

ENGINE_ARGUMENTS = ("foreach", "fused")
"""The arguments that say how a step is computed, not what: never taken from a saved state."""


class _Key(NamedTuple):
    """What the tensors of one batch have in common."""

    backend: Backend
    form: Form
    dtype: torch.dtype
    device: torch.device


class BaseAdafactor(torch.optim.Optimizer):
    """What all dialects share. A dialect sets ``layout``, defines ``rule`` and has its own arguments.

    A parameter's state (see ``state.py``) is made at once where it requires a gradient, else at its first gradient.
    """

    layout: ClassVar[Layout]
    """The layout that ``state_dict()`` writes."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        # rms(p) of the last step, for step_sizes() and for layouts that save it. Derived, so no part of the state.
        self._rms: dict[Tensor, Tensor] = {}
        # What a relative group's lr was last set to show, by the group's id: another value is somebody else's.
        self._shown: dict[int, float] = {}
        self._warned_lr = False
        # Every group may give its own lr; all other defaults have to be good even if no group ends up with them.
        self._check_group({**defaults, "lr": 0.0 if defaults["lr"] is None else defaults["lr"]})
        super().__init__(params, defaults)

    @staticmethod
    def rule(group: Mapping[str, Any]) -> Rule:
        """What a step of the group computes. Raises a ValueError that names the argument, its rule and its value."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_rms": self._rms, "_shown": {}, "_warned_lr": self._warned_lr}

    # Groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with any of the constructor's arguments as its own options.

        Args:
            param_group: ``params`` (tensors or (name, tensor) pairs) and the options that differ from the defaults.

        Raises:
            ValueError: an option or a parameter is refused; the optimizer stays as it was.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group should be a dict, got {type(param_group).__name__}")
        self._check_request(param_group)
        if isinstance(param_group["params"], Iterator):
            param_group["params"] = list(param_group["params"])
        # The base class fills the dict in, and refuses it half filled: the caller's own waits until all is well.
        group = dict(param_group)
        super().add_param_group(group)
        index = len(self.param_groups) - 1
        try:
            rule = self._check_group(group)
            for position, p in enumerate(group["params"]):
                checks.parameter(p, group, index, position)
        except Exception:
            self.param_groups.pop()
            raise
        param_group.update(group)
        self.param_groups[index] = param_group
        self._show_lr(param_group, rule)
        self._make_state(param_group)

    def _check_request(self, param_group: Mapping[str, Any]) -> None:
        """Refuse options that a caller cannot mean together; what a group holds later is not judged by this."""

    def _check_group(self, group: Mapping[str, Any]) -> Rule:
        backends.check(group)
        return self.rule(group)

    # State

    def _make_state(self, group: Mapping[str, Any]) -> None:
        """Make the state of parameters that will have gradients, so that it is there before the first step."""
        for p in group["params"]:
            waiting = p.requires_grad and not p.is_meta and not is_lazy(p) and self._steps_of(p) == 0
            if waiting and not state.fits(self.state[p], p):
                state.ensure(self.state[p], p, self.rule(group))

    def _refresh_state(self) -> None:
        """Make missing state, and forget tensors that are in no group any more (swapped for others, say)."""
        current = {p for group in self.param_groups for p in group["params"]}
        for stale in [key for key in self.state if isinstance(key, Tensor) and key not in current]:
            del self.state[stale]
            self._rms.pop(stale, None)
        for group in self.param_groups:
            self._make_state(group)

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
            ValueError: a group's option is out of range, or a parameter has changed its shape.
            RuntimeError: a gradient is sparse. In either case nothing was touched.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        # Everything that may be refused is looked at before anything is written.
        rules = [self._check_group(group) for group in self.param_groups]
        work: dict[_Key, dict[Tensor, Rule]] = {}
        for index, (group, rule) in enumerate(zip(self.param_groups, rules, strict=True)):
            backend = backends.choose(group)
            for position, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                checks.parameter(p, group, index, position)
                checks.gradient(p.grad, group, index, position)
                self._check_shape(p, group, index, position)
                # A tensor that was passed twice takes one step.
                work.setdefault(_Key(backend, rule.form, state.arithmetic(p), p.device), {})[p] = rule
        self._warn_of_lr(rules)

        for batch in work.values():
            for p, rule in batch.items():
                state.ensure(self.state[p], p, rule)
            torch._foreach_add_([self.state[p]["step"] for p in batch], 1.0)
        for key, batch in work.items():
            # An empty tensor counts its steps and has nothing to compute.
            for wave in waves([p for p in batch if p.numel() > 0], key.backend.WAVE):
                self._run(key, {p: batch[p] for p in wave})
        for group, rule in zip(self.param_groups, rules, strict=True):
            self._show_lr(group, rule)
        return loss

    def _run(self, key: _Key, rules: Mapping[Tensor, Rule]) -> None:
        items = []
        for p in rules:
            assert p.grad is not None
            own = self.state[p]
            m = own["momentum"] if key.form.momentum else None
            items.append(
                Item(state.plan_of(p), p, p.grad, own.get("row_var"), own.get("col_var"), own.get("variance"), m)
            )
        t = torch.stack([self.state[p]["step"] for p in rules])
        table = numbers(list(rules.values()), t, key.dtype, key.device)
        rms = run(Batch(items, table, key.form, key.dtype), key.backend)
        if rms is not None:
            self._rms.update(zip(rules, rms, strict=True))

    def _check_shape(self, p: Tensor, group: Mapping[str, Any], index: int, position: int) -> None:
        if self._steps_of(p) > 0 and not state.fits(self.state[p], p):
            raise ValueError(
                f"{checks.label(group, index, position)} should keep the shape it has taken steps in, "
                f"got {tuple(p.shape)}"
            )

    # The learning rate as a group shows it

    def _show_lr(self, group: dict[str, Any], rule: Rule) -> None:
        """Let a relative group's lr show its step size, unless it is 0, which stays: nothing moves then."""
        if rule.relative and (group["lr"] is None or not _is_zero(rule.lr)) and not isinstance(group["lr"], Tensor):
            group["lr"] = rule.step_size(max(map(self._steps_of, group["params"]), default=0.0))
            self._shown[id(group)] = group["lr"]

    def _steps_of(self, p: Tensor) -> float:
        steps: float = self.state[p]["step"].item() if self.state.get(p) else 0.0
        return steps

    def _warn_of_lr(self, rules: Sequence[Rule]) -> None:
        for index, (group, rule) in enumerate(zip(self.param_groups, rules, strict=True)):
            shown = self._shown.get(id(group))
            if self._warned_lr or shown is None or isinstance(rule.lr, Tensor) or rule.lr in (0, shown):
                continue
            warnings.warn(
                f"the lr of parameter group {index} was set to {rule.lr}, which has no effect while the step size is "
                "relative; only 0 has one: nothing moves",
                stacklevel=5,
            )
            self._warned_lr = True

    def step_sizes(self) -> list[float | None]:
        """The step size alpha of each group: rho times the parameter scale of its first parameter that has stepped.

        None for a group that has not stepped yet. Reads that parameter's scale, so it may wait for an accelerator.
        """
        sizes: list[float | None] = []
        for group in self.param_groups:
            rule = self.rule(group)
            stepped = next((p for p in group["params"] if self._steps_of(p) > 0), None)
            if stepped is None:
                sizes.append(None)
                continue
            alpha = 0.0 if _is_zero(rule.lr) else rule.step_size(self._steps_of(stepped))
            sizes.append(alpha * max(self._rms_of(stepped), rule.eps2) if rule.scale else alpha)
        return sizes

    def _rms_of(self, p: Tensor) -> float:
        """rms(p) at the last step; where no step has measured it, of p as it is."""
        if p in self._rms:
            return float(self._rms[p])
        return float(vector_norm(p.detach().to(state.arithmetic(p)))) / math.sqrt(max(p.numel(), 1))

    # Saving and loading

    def state_dict(self) -> dict[str, Any]:
        """The state and the groups, in the layout of the system that the dialect matches."""
        self._refresh_state()

        def translate(_: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            params = self._params_by_id(saved["param_groups"])
            for key, entry in saved["state"].items():
                if key in params and entry:
                    rms = partial(self._rms_of, params[key])
                    saved["state"][key] = layouts.write(self.layout, entry, state.saved_plan(entry), rms)
            for group in saved["param_groups"]:
                # Without momentum there is no buffer, and the others look for one wherever beta1 is a number.
                if group.get("beta1") == 0:
                    group["beta1"] = None
            return saved

        # The first of the hooks, so that a user's hook sees what will be saved.
        handle = self.register_state_dict_post_hook(translate, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what any system known to ``layouts`` saved. What was saved is copied, statistics keep their precision.

        Hyper-parameters are taken over from the dialect's own layout; from another's they are not, with a warning,
        since they mean something else there. Engine arguments, and keys that the file lacks, stay as they are.

        Args:
            state_dict: what a ``state_dict()`` returned.

        Raises:
            ValueError: it does not fit this optimizer; the optimizer stays as it was.
        """
        loaded: dict[Tensor, dict[str, Any]] = {}
        rms: dict[Tensor, Tensor] = {}

        def adopt(_: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            layout = layouts.detect(saved, self.layout)
            groups = self._merge_groups(saved["param_groups"], layout)
            others = {}
            params = self._params_by_id(groups)
            for key, entry in saved["state"].items():
                if key not in params:
                    others[key] = entry
                elif entry:
                    p = params[key]
                    loaded[p] = state.copy_for(p, layouts.read(layout, entry, state.plan_of(p), f"parameter {key}"))
                    if "RMS" in entry:
                        rms[p] = torch.as_tensor(entry["RMS"], dtype=torch.float64)
            # The base class would cast the statistics to the parameters' dtype, so it does not get to see them.
            return {**saved, "state": others, "param_groups": groups}

        def install(_: torch.optim.Optimizer) -> None:
            self.state.update(loaded)
            self._rms = rms
            for group in self.param_groups:
                self._make_state(group)
                self._show_lr(group, self.rule(group))

        # adopt comes last, after the user's hooks have changed the dict; install first, before they look at the result.
        handles = [
            self.register_load_state_dict_pre_hook(adopt),
            self.register_load_state_dict_post_hook(install, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _params_by_id(self, saved_groups: list[dict[str, Any]]) -> dict[Any, Tensor]:
        pairs = zip(saved_groups, self.param_groups, strict=True)
        return {key: p for saved, live in pairs for key, p in zip(saved["params"], live["params"], strict=True)}

    def _merge_groups(self, saved_groups: list[dict[str, Any]], layout: Layout) -> list[dict[str, Any]]:
        """The groups as they will be once loaded, in the saved ones' ids; checked."""
        sizes = [len(group["params"]) for group in saved_groups]
        own_sizes = [len(group["params"]) for group in self.param_groups]
        if sizes != own_sizes:
            raise ValueError(
                f"the state dict should have parameter groups of {own_sizes} parameters like the optimizer, got {sizes}"
            )
        if layout != self.layout:
            warnings.warn(
                f"loading the state of a {layout.name} optimizer: the groups keep their own hyper-parameters, "
                f"since {layout.name}'s mean something else",
                stacklevel=7,
            )
        groups = []
        for live, saved in zip(self.param_groups, saved_groups, strict=True):
            if layout != self.layout:
                saved = {key: saved[key] for key in ("params", "param_names") if key in saved}
            group = {**live, **saved, **{name: live[name] for name in ENGINE_ARGUMENTS}}
            self._check_group(group)
            groups.append(group)
        return groups


def _is_zero(lr: float | Tensor) -> bool:
    """Whether the host knows lr to be 0: one on an accelerator it does not read."""
    return not isinstance(lr, Tensor) and lr == 0
