"""The one Optimizer subclass: groups, state, the step, and the lr that a group shows. Dialects are its subclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from . import backends, batching, checks, saving, sharding, state
from .meeting import Meeting
from .program import Program, Scaling
from .readings import Readings, is_zero, zero
from .rounding import ROUNDINGS
from .rule import Rule
from .shapes import Factoring, Plan
from .sweeps import Columns


class Ready(NamedTuple):
    """What a step is taken of: the rules and settings of all groups, and all tensors in the program's columns."""

    rules: list[Rule]
    settings: list[batching.Setting]
    found: batching.Found
    program: Program
    columns: tuple[Columns, list[Tensor]]


class BaseAdafactor(Readings):
    """What all dialects share. A dialect sets ``layout``, defines ``rule`` and has its own arguments.

    A parameter's state (see ``state.py``) is made at once where it requires a gradient, else at its first gradient.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        # What a relative group's lr was last set to show, by the group's id: another value is somebody else's.
        self._shown: dict[int, float] = {}
        # What a group's state was factored by, by the group's id: equal sizes hide a change from the state's shapes.
        self._factored: dict[int, Factoring] = {}
        # The shapes of a group's parameters as they were added, by the group's id.
        self._shapes: dict[int, list[tuple[int, ...] | None]] = {}
        self._warned_lr = self._warned_gradient = False
        self._meeting = Meeting()
        # Every group may give its own lr; all other defaults have to be good even if no group ends up with them.
        self._check_group({**defaults, "lr": 0.0 if defaults["lr"] is None else defaults["lr"]})
        super().__init__(params, defaults)

    @staticmethod
    def common(group: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the rule that every dialect sets alike. Raises a ValueError like ``rule``."""
        return {
            "rounding": checks.choice("rounding", group.get("rounding", "nearest"), ROUNDINGS),
            "max_row_boost": checks.boost("max_row_boost", group.get("max_row_boost")),
            "max_grad_norm": checks.threshold("max_grad_norm", group.get("max_grad_norm")),
            "skip": checks.skip("skip_nonfinite", group.get("skip_nonfinite", False)),
        }

    def __getstate__(self) -> dict[str, Any]:
        # A copy has to save and show what the original does.
        own = {"_rms": self._rms, "_warned_lr": self._warned_lr, "_skipped": self._skipped}
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_skipped"):
            # Pickled by a version that had none.
            self._skipped = zero()
        self._shown = {id(group): group["lr"] for group in self.param_groups}
        self._factored = {}
        self._shapes = {id(group): _shapes(group["params"]) for group in self.param_groups}
        self._program = None
        self._bad = {}
        if not hasattr(self, "_meeting"):
            self._meeting = Meeting()
            self._norm = None
            self._warned_gradient = False

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
        self._shapes[id(param_group)] = _shapes(group["params"])
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
        checks.count("seed", group.get("seed", 0))
        return self.rule(group)

    # State

    def _make_state(self, group: Mapping[str, Any]) -> None:
        """Make what is missing of the state of parameters that will have gradients, before the first step or a save."""
        # lr has no part in it, and may be bad for now.
        rule = self.rule({**group, "lr": 0.0})
        knows = self._knows_steps(rule, group)
        for p in group["params"]:
            if p.requires_grad and not p.is_meta and not is_lazy(p):
                plan = self._plan(p, group)
                if self._steps_of(p) == 0 or state.fits(self.state[p], plan, self.layout):
                    state.ensure(self.state[p], p, plan, rule, self.layout, _counts(p, knows))

    @property
    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _knows_steps(self, rule: Rule, group: Mapping[str, Any]) -> bool:
        """Whether the host knows which steps of a group are taken.

        On accelerators it does not with skip_nonfinite, or where another process that has parts of a parameter may
        call a step of everything off.
        """
        if all(p.device.type == "cpu" for p in group["params"]):
            return True
        return rule.skip is None and not any(
            sharding.is_shared(p) for each in self.param_groups for p in each["params"]
        )

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
            RuntimeError: a gradient is sparse, a CUDA graph is being captured, a tensor does not suit fused=True, or
                another process that has shards of the same parameters has refused the step. A refused step touches
                nothing, on any of them.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        rules, settings, found, program, columns = self._agree()
        stayed, self._norm = program.step(columns, found.absent, rules, self._scaling())
        if stayed is not None and not stayed.is_meta:
            self._count_skipped(stayed)

        for group, rule in zip(self.param_groups, rules, strict=True):
            # Where the host does not count the steps, it would wait for who does.
            if rule.relative and self._knows_steps(rule, group):
                self._show_lr(group, rule)
        if program is not self._program:
            self._program = program
            for place, measured in program.measured():
                if measured is None:
                    self._rms.pop(found.params[place], None)
                else:
                    self._rms[found.params[place]] = measured
            self._bad = {found.params[place]: bad for place, bad in program.looked_at()}
            for group, setting in zip(self.param_groups, settings, strict=True):
                self._factored[id(group)] = setting.factoring
        self._forget_swapped()
        return loss

    def _agree(self) -> Ready:
        """What the step is for, once nobody refuses it: looked at in whole before anything is written.

        Where this process refuses it, those that share its parameters are told, so that they do not wait for it.
        """
        try:
            rules = [self._check_group(group) for group in self.param_groups]
            self._check_norms(rules)
            settings = [
                batching.Setting(
                    backends.choose(group), self.factoring(group), rule.form, rule.momentum_dtype, group.get("seed", 0)
                )
                for group, rule in zip(self.param_groups, rules, strict=True)
            ]
            self._warn_of_lr(rules)
            program = self._program
            are_whole = program is not None and program.are_whole
            found = batching.find(self.param_groups, self.state, are_whole=are_whole)
            if not found.params:
                self._warn_of_no_gradient()
            columns = None if program is None else program.columns(found, settings)
            if program is not None and columns is not None:
                _refuse_capture(program.devices)
                return Ready(rules, settings, found, program, columns)
            self._program = None
            found = batching.find(self.param_groups, self.state)
            self._propose(rules, settings)
            unready = self._check(rules, settings)
            _refuse_capture({p.device for p in found.params})
        except Exception:
            self._meeting.withdraw(self._params)
            raise
        exchanges = self._meeting.agree()
        try:
            for p, plan, rule, counts in unready:
                state.ensure(self.state[p], p, plan, rule, self.layout, counts)
            found = batching.find(self.param_groups, self.state)
            program = Program(found, self.param_groups, settings, self.layout, exchanges)
            return Ready(rules, settings, found, program, program.gather(found))
        except Exception:
            self._meeting.withdraw(self._params)
            raise

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler leaves unscaling and skipping to the step.

        Only where every group asks for it with fused=True: hosts that clip gradients refuse an optimizer of this kind.
        """
        return all(group.get("fused") for group in self.param_groups)

    @torch.inference_mode(False)
    def _count_skipped(self, stayed: Tensor) -> None:
        self._skipped = self._skipped.to(stayed.device, non_blocking=True).add_(stayed)

    def _scaling(self) -> Scaling:
        """What a GradScaler has set for this step."""
        scale, inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        # Rounded as torch's unscale_ rounds it.
        unscale = None if scale is None else scale.double().reciprocal().float()
        return Scaling(unscale, inf if isinstance(inf, Tensor) else None)

    def _check_norms(self, rules: Sequence[Rule]) -> None:
        largest = {rule.max_grad_norm for rule in rules}
        if len(largest) > 1:
            raise ValueError(
                "max_grad_norm should be the same in all groups, since the norm is of all gradients together, got "
                f"{', '.join(str(rule.max_grad_norm) for rule in rules)}"
            )

    def _propose(self, rules: Sequence[Rule], settings: Sequence[batching.Setting]) -> None:
        """Refuse parameters that no step can be taken for, and propose what to exchange of the others."""
        found = []
        for index, (group, setting) in enumerate(zip(self.param_groups, settings, strict=True)):
            for position, p in enumerate(group["params"]):
                if batching.takes_part(p):
                    checks.parameter(p, group, index, position)
                    found.append((p, index, self._plan(p, group), setting.form))
        seeds = [setting.seed for setting in settings]
        self._meeting.propose(self._params, found, list(zip(rules, seeds, strict=True)))

    def _check(
        self, rules: Sequence[Rule], settings: Sequence[batching.Setting]
    ) -> list[tuple[Tensor, Plan, Rule, torch.device]]:
        """Refuse gradients and state that no step can be taken for. Returns the parameters whose state is not ready."""
        unready: list[tuple[Tensor, Plan, Rule, torch.device]] = []
        for index, (group, rule, setting) in enumerate(zip(self.param_groups, rules, settings, strict=True)):
            before = self._factored.get(id(group), setting.factoring)
            knows = self._knows_steps(rule, group)
            for position, p in enumerate(group["params"]):
                if not batching.takes_part(p):
                    continue
                if p.grad is not None:
                    checks.gradient(p, p.grad, group, index, position)
                if p not in self.state:
                    self._check_swapped(p, group, index, position)
                own, plan, counts = self.state.get(p), self._plan(p, group), _counts(p, knows)
                is_ready = own and state.ready(own, p, plan, rule, self.layout, counts)
                if not is_ready or before != setting.factoring:
                    self._check_plan(p, plan, before.plan(plan.shape), group, index, position)
                    unready.append((p, plan, rule, counts))
        return unready

    def _check_swapped(self, p: Tensor, group: Mapping[str, Any], index: int, position: int) -> None:
        """Refuse what is put in a parameter's place and has lost its shape."""
        known = self._shapes.get(id(group))
        if known is None or p.dim() != 1:
            return
        before = known[position] if position < len(known) else None
        if before is not None and before != tuple(p.shape):
            raise ValueError(
                f"{checks.label(group, index, position)} should have the shape it had when the optimizer was made, "
                f"{before}, got {tuple(p.shape)}: a flat partition (DeepSpeed's ZeRO) has no rows and columns, "
                "use FSDP2, torch.distributed.fsdp.fully_shard, instead"
            )

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
        if rule.relative and (group["lr"] is None or not is_zero(rule.lr)) and not isinstance(group["lr"], Tensor):
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

    def _warn_of_no_gradient(self) -> None:
        """Once, where a model may have been sharded after its optimizer was made: it has other parameters then."""
        if torch.distributed.is_available() and torch.distributed.is_initialized() and not self._warned_gradient:
            checks.warn(
                "no parameter has a gradient, so the step does nothing; where the model was sharded or wrapped after "
                "this optimizer was made, its parameters are others now: make the optimizer after that"
            )
            self._warned_gradient = True

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
        since they mean something else there. Keys that the file lacks stay as they are, and so do the arguments that
        say how a step is computed and what is kept for it: factor, min_dim_size_to_factor, factored, batch_dims,
        foreach, fused, rounding, skip_nonfinite, max_row_boost and max_grad_norm. The seed is the file's.

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
        self._rms = dict(loaded.rms)
        for group in self.param_groups:
            self._make_state(group)
            self._show_lr(group, self.rule(group))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


def _shapes(params: Iterable[Tensor]) -> list[tuple[int, ...] | None]:
    return [None if is_lazy(p) else tuple(p.shape) for p in params]


def _counts(p: Tensor, knows: bool) -> torch.device:
    """Where p's steps are counted: by the host, if it knows which are taken."""
    return torch.device("cpu") if knows else p.device


def _refuse_capture(devices: Iterable[torch.device]) -> None:
    if any(device.type == "cuda" for device in devices) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("step() should run outside of CUDA graph capture, got a capture, which would freeze t in it")
