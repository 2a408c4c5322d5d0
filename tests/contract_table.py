"""The table that drives test_contract.py: dialects and their peers, configurations, schedulers, refused arguments."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers.optimization
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

import adafactor
import adafactor.dialects.transformers

SHAPES = ((4, 3), (5,), (2, 3, 4), ())
NAMES = ("matrix", "vector", "batch", "scalar")


@dataclass(frozen=True)
class Dialect:
    """One class of ours and the class of the system that it stands in for.

    Attributes:
        external: the arguments under which the caller, or a scheduler, sets the step size.
        saved: what the system saves for a matrix.
    """

    name: str
    own: type[torch.optim.Optimizer]
    peer: type[torch.optim.Optimizer]
    external: dict[str, Any]
    saved: frozenset[str]

    def for_peer(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options that the peer knows too: how a step is computed may be ours alone."""
        known = inspect.signature(self.peer).parameters
        return {key: value for key, value in options.items() if key in known or key not in ("foreach", "fused")}


TORCH = Dialect(
    "torch", adafactor.Adafactor, torch.optim.Adafactor, {"lr": 0.05}, frozenset({"step", "row_var", "col_var"})
)
TRANSFORMERS = Dialect(
    "transformers",
    adafactor.dialects.transformers.Adafactor,
    transformers.optimization.Adafactor,
    {"lr": 0.05, "relative_step": False},
    frozenset({"step", "exp_avg_sq_row", "exp_avg_sq_col", "RMS"}),
)
DIALECTS = (TORCH, TRANSFORMERS)


@dataclass(frozen=True)
class Case:
    """One configuration of a dialect. Tensors among the options are copied for each optimizer made."""

    name: str
    dialect: Dialect
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.dialect.name}-{self.name}"

    @property
    def relative(self) -> bool:
        return self.dialect is TRANSFORMERS and self.options.get("relative_step", True)

    def make(self, params: Any, **more: Any) -> Any:
        return self.dialect.own(params, **copy.deepcopy({**self.options, **more}))

    def make_peer(self, params: Any, **more: Any) -> Any:
        return self.dialect.peer(params, **self.dialect.for_peer(copy.deepcopy({**self.options, **more})))


CASES = (
    Case("default", TORCH),
    Case("weight_decay", TORCH, {"lr": 0.05, "weight_decay": 0.1}),
    Case("foreach", TORCH, {"foreach": True, "weight_decay": 0.1}),
    Case("maximize", TORCH, {"maximize": True}),
    Case("tensor_lr", TORCH, {"lr": torch.tensor(0.03)}),
    Case("tensor_lr_foreach", TORCH, {"lr": torch.tensor([0.03]), "foreach": True, "weight_decay": 0.1}),
    Case("all_options", TORCH, {"lr": 0.9, "beta2_decay": -0.5, "eps": (1e-8, 1e-2), "d": 2.0, "weight_decay": 0.01}),
    Case("default", TRANSFORMERS),
    Case("weight_decay", TRANSFORMERS, {"weight_decay": 0.1}),
    Case("foreach", TRANSFORMERS, {"foreach": True, "weight_decay": 0.1, "beta1": 0.9}),
    Case("beta1", TRANSFORMERS, {"beta1": 0.9}),
    Case("warmup_init", TRANSFORMERS, {"warmup_init": True, "weight_decay": 0.1}),
    Case("unscaled_relative", TRANSFORMERS, {"scale_parameter": False, "clip_threshold": 0.5, "decay_rate": -0.6}),
    Case("external_lr", TRANSFORMERS, {"lr": 0.05, "relative_step": False}),
    Case("external_unscaled", TRANSFORMERS, {"lr": 1e-3, "relative_step": False, "scale_parameter": False}),
    Case("tensor_lr", TRANSFORMERS, {"lr": torch.tensor(0.05), "relative_step": False}),
    Case("all_external", TRANSFORMERS, {"lr": 0.05, "relative_step": False, "beta1": 0.5, "eps": (1e-20, 1e-2)}),
)
RELATIVE = tuple(case for case in CASES if case.relative)
PLAIN = tuple(case for case in CASES if case.name in ("default", "foreach"))
EXTERNAL = tuple(Case("external", dialect, dialect.external) for dialect in DIALECTS)
SCHEDULED = (
    Case("float_lr", TORCH, {"lr": 0.05, "weight_decay": 0.1}),
    Case("tensor_lr", TORCH, {"lr": torch.tensor(0.05), "weight_decay": 0.1}),
    Case("float_lr", TRANSFORMERS, {"lr": 0.05, "relative_step": False, "weight_decay": 0.1}),
    Case("tensor_lr", TRANSFORMERS, {"lr": torch.tensor(0.05), "relative_step": False}),
)


# The little problem that all of them are given: known gradients, so that nothing depends on a model.


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradient_of(step: int, index: int, p: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(p.shape, generator=generator).to(p.dtype)


def set_gradients(params: Iterable[torch.Tensor], step: int) -> None:
    for index, p in enumerate(params):
        p.grad = gradient_of(step, index, p)


def loss_of(params: Iterable[torch.Tensor], step: int) -> torch.Tensor:
    """A loss whose gradients are gradient_of, exactly."""
    terms = [(p * gradient_of(step, index, p)).sum() for index, p in enumerate(params)]
    return torch.stack(terms).sum()


def train(optimizer: Any, params: Iterable[torch.Tensor], steps: range) -> None:
    params = list(params)
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def bits(value: Any) -> Any:
    """Something that is equal only where the value is the same to the last bit: nan is nan, and -0 is not 0."""
    if isinstance(value, torch.Tensor):
        x = value.detach()
        if x.layout is not torch.strided:
            return (x.dtype, tuple(x.shape), bits(x.coalesce().indices()), bits(x.coalesce().values()))
        raw = torch.view_as_real(x) if x.is_complex() else x
        return (x.dtype, tuple(x.shape), raw.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, dict):
        return {key: bits(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(bits(entry) for entry in value)
    return (type(value), repr(value)) if isinstance(value, float) else value


def picture(optimizer: Any) -> dict[str, Any]:
    """All that an optimizer holds and moves, to the last bit, flat, so that a difference names its place."""
    seen: dict[str, Any] = {"groups": len(optimizer.param_groups), "state": sum(map(bool, optimizer.state.values()))}
    for g, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                seen[f"group {g}: {key}"] = bits(value)
        for i, p in enumerate(group["params"]):
            seen[f"parameter {g}.{i}"] = bits(p)
            for key, value in optimizer.state.get(p, {}).items():
                seen[f"state {g}.{i}: {key}"] = bits(value)
    return seen


# Schedulers. Each is made for an optimizer whose lr is 0.05.

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, step_size=3, gamma=0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, milestones=[2, 7], gamma=0.5),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, factor=0.5, total_iters=4),
    "LinearLR": lambda o: schedulers.LinearLR(o, start_factor=0.1, end_factor=0.0, total_iters=4),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, gamma=0.9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=8, power=2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, T_max=8),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, T_0=5),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, base_lr=0.01, max_lr=0.05, step_size_up=3, cycle_momentum=False),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=13, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1, factor=0.5),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o,
        [schedulers.LinearLR(o, start_factor=0.1, total_iters=4), schedulers.CosineAnnealingLR(o, T_max=8)],
        milestones=[4],
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, factor=0.5, total_iters=4), schedulers.ExponentialLR(o, gamma=0.9)]
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=4),
}


# What is refused, and where an argument may come from.

CONSTRUCTOR, GROUP, ADD, LOAD, STEP = "constructor", "group", "add_param_group", "load_state_dict", "step"
ALL = (CONSTRUCTOR, GROUP, ADD, LOAD, STEP)
ASKED = (CONSTRUCTOR, GROUP, ADD)


@dataclass(frozen=True)
class Refused:
    """One bad argument: what it is added to, what the message has to hold, and where it is refused.

    A conflict between two arguments is one of what the caller asks for: what groups hold later shows read-outs. How a
    step is computed is never taken from a file.
    """

    dialect: Dialect
    argument: str
    value: Any
    shown: str
    base: dict[str, Any] = field(default_factory=dict)
    places: tuple[str, ...] = ALL
    error: type[Exception] = ValueError

    def __str__(self) -> str:
        return re.sub(r"\W+", "_", f"{self.dialect.name}-{self.argument}-{self.value!r}")

    @property
    def match(self) -> str:
        return rf"(?s)\b{self.argument}\b.*{re.escape(self.shown)}"


def _refused() -> Iterable[Refused]:
    nan, inf = math.nan, math.inf
    lrs = [
        (-1e-3, "-0.001"),
        (nan, "nan"),
        ("fast", "'fast'"),
        (True, "True"),
        (None, "None"),
        (torch.tensor([0.1, 0.2]), "(2,)"),
        (torch.tensor(-1.0), "-1.0"),
        (torch.tensor(nan), "nan"),
    ]
    for value, shown in lrs:
        yield Refused(TORCH, "lr", value, shown)
        yield Refused(TRANSFORMERS, "lr", value, shown, TRANSFORMERS.external)
    yield Refused(TORCH, "lr", inf, "inf", {"weight_decay": 0.1})
    yield Refused(TRANSFORMERS, "lr", inf, "inf", TRANSFORMERS.external)

    for dialect, exponent, threshold in (
        (TORCH, "beta2_decay", "d"),
        (TRANSFORMERS, "decay_rate", "clip_threshold"),
    ):
        for value in (0.8, nan, -inf, "slow"):
            yield Refused(dialect, exponent, value, repr(value))
        for value in (0.0, -1.0, nan, "off"):
            yield Refused(dialect, threshold, value, repr(value))
        for value in (-0.1, nan, inf, None):
            yield Refused(dialect, "weight_decay", value, repr(value))
        for value, shown in (
            ((-1e-8, 1e-3), "-1e-08"),
            ((nan, 1e-3), "nan"),
            ((1e-30, -1.0), "-1.0"),
            ((1e-30, nan), "nan"),
            ((1e-30, None), "None"),
            ((1e-30, 1e-3, 0.5), "(1e-30, 0.001, 0.5)"),
            (1e-3, "0.001"),
        ):
            yield Refused(dialect, "eps", value, shown)
        for name, value in (
            ("rounding", "up"),
            ("rounding", None),
            ("skip_nonfinite", "step"),
            ("skip_nonfinite", None),
            ("max_row_boost", 0.5),
            ("max_row_boost", nan),
            ("max_row_boost", "2"),
        ):
            yield Refused(dialect, name, value, repr(value), places=(*ASKED, STEP))
        yield Refused(dialect, "skip_nonfinite", torch.tensor(True), "tensor(True)", places=(*ASKED, STEP))
        for value in (-1, 0.5, "x", True):
            yield Refused(dialect, "seed", value, repr(value))
        yield Refused(dialect, "foreach", "x", "'x'", places=(*ASKED, STEP))
        yield Refused(dialect, "fused", "x", "'x'", places=(*ASKED, STEP))
        yield Refused(dialect, "fused", True, "not both", {"foreach": True}, (*ASKED, STEP))

    yield Refused(TORCH, "maximize", "yes", "'yes'")
    yield Refused(TRANSFORMERS, "eps", (None, 1e-3), "None")
    for value in (-0.1, 1.0, nan, "x"):
        yield Refused(TRANSFORMERS, "beta1", value, repr(value))
    for name in ("scale_parameter", "relative_step", "warmup_init"):
        yield Refused(TRANSFORMERS, name, "yes", "'yes'")
    yield Refused(TRANSFORMERS, "lr", 0.001, "0.001", places=ASKED)
    yield Refused(TRANSFORMERS, "warmup_init", True, "True", TRANSFORMERS.external, ASKED)


REFUSED = tuple(_refused())


STEPS = 12

all_cases = pytest.mark.parametrize("case", CASES, ids=str)
plain_cases = pytest.mark.parametrize("case", PLAIN, ids=str)
external_cases = pytest.mark.parametrize("case", EXTERNAL, ids=str)
relative_cases = pytest.mark.parametrize("case", RELATIVE, ids=str)
all_dialects = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)


class Watch:
    """A peer's parameters and how far they have moved in all, to hold ours to."""

    def __init__(self, params):
        self.params = list(params)
        self.last = [p.detach().clone() for p in self.params]
        self.moved = [0.0] * len(self.last)

    def look(self):
        for i, p in enumerate(self.params):
            self.moved[i] += (p.detach() - self.last[i]).abs().max().item()
            self.last[i] = p.detach().clone()

    def check(self, params):
        for i, (ours, theirs) in enumerate(zip(params, self.params, strict=True)):
            allowed = 2e-6 * self.moved[i] + 6 * 2**-24 * theirs.abs().max().item()
            assert (ours - theirs).abs().max().item() <= allowed, f"{NAMES[i]} left its peer's trajectory"


def same(first, second):
    """Whether two lists of tensors are equal to the last bit."""
    return [bits(p) for p in first] == [bits(p) for p in second]


def copies(params):
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def values(params):
    return [bits(p) for p in params]


def lr_of(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def rho(case, t):
    limit = 1e-6 * t if case.options.get("warmup_init") else 1e-2
    return min(limit, 1 / math.sqrt(t))


def through_a_file(saved, path):
    torch.save(saved, path)
    return torch.load(path, weights_only=True)
