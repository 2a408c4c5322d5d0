"""The bytes of optimizer state, before anything is trained or allocated."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from . import checks, dialects, layouts
from .layouts import Layout
from .optimizer import BaseAdafactor
from .rule import Rule
from .shapes import Plan
from .state import arithmetic, tensors

STEP_BYTES = 4
"""A step count is a float32."""


@dataclass(frozen=True)
class Entry:
    """One parameter's state.

    Attributes:
        name: the parameter's, or its place.
        shape: the parameter's.
        statistics: bytes of R and C, or of V.
        momentum: bytes of m.
        compensation: bytes that rounding="kahan" keeps.
        full: bytes that a full V would have.
    """

    name: str
    shape: tuple[int, ...]
    statistics: int
    momentum: int
    compensation: int
    full: int

    @property
    def bytes(self) -> int:
        """Bytes of all of it, the step count too."""
        return self.statistics + self.momentum + self.compensation + STEP_BYTES


@dataclass(frozen=True)
class Estimate:
    """What an optimizer will keep.

    Attributes:
        entries: one for each parameter that requires a gradient.
        parameters: bytes of those parameters.
    """

    entries: tuple[Entry, ...]
    parameters: int

    @property
    def bytes(self) -> int:
        """Bytes of the state of all parameters."""
        return sum(entry.bytes for entry in self.entries)

    @property
    def oversized(self) -> tuple[Entry, ...]:
        """The parameters whose factors take more than a full V would."""
        return tuple(entry for entry in self.entries if entry.statistics > entry.full)

    def __str__(self) -> str:
        share = f" ({self.bytes / self.parameters:.2%} of the parameters)" if self.parameters else ""
        lines = [f"{self.bytes:,} bytes of state for {self.parameters:,} bytes of parameters{share}"]
        lines += [
            f"{entry.name} {entry.shape}: its factors take {entry.statistics:,} bytes, a full V {entry.full:,}"
            for entry in self.oversized
        ]
        return "\n".join(lines)


def estimate(
    model_or_params: nn.Module | Iterable[Any], dialect: str | type[BaseAdafactor] = "torch", **options: Any
) -> Estimate:
    """What a dialect's optimizer will keep for these parameters: the bytes that its state then has.

    Nothing is allocated, and parameters on the meta device will do. Sharded ones count whole: ``adafactor.bill`` has
    what each process keeps.

    Args:
        model_or_params: a module, or what an optimizer takes: parameters, (name, parameter) pairs, or group dicts.
        dialect: the name of a module in ``adafactor.dialects``, or an optimizer class of this package.
        options: the arguments that the optimizer will get (``factor``, ``beta1``, ...).

    Raises:
        ValueError: there is no such dialect, or it refuses the options.

    >>> conv = torch.nn.Conv2d(512, 512, 3, bias=False, device="meta")
    >>> print(estimate(conv))
    6,291,460 bytes of state for 9,437,184 bytes of parameters (66.67% of the parameters)
    >>> print(estimate(conv, factor="matrix"))
    20,484 bytes of state for 9,437,184 bytes of parameters (0.22% of the parameters)
    """
    cls = class_of(dialect)
    if isinstance(model_or_params, Tensor):
        raise TypeError("model_or_params should be a module or an iterable of parameters, got a single tensor")
    metas: dict[Tensor, Tensor] = {}
    params = model_or_params.named_parameters() if isinstance(model_or_params, nn.Module) else model_or_params
    optimizer = cls([_without_memory(each, metas) for each in params], **options)
    entries = []
    total = 0
    seen: set[Tensor] = set()
    for index, group in enumerate(optimizer.param_groups):
        rule, factoring = optimizer.rule({**group, "lr": 0.0}), optimizer.factoring(group)
        for position, p in enumerate(group["params"]):
            # One that is listed twice has one state.
            if not p.requires_grad or p in seen:
                continue
            seen.add(p)
            plan = factoring.plan(tuple(p.shape))
            held = kinds(plan, rule, cls.layout, p.dtype)
            name = group["param_names"][position] if "param_names" in group else checks.label(group, index, position)
            width = arithmetic(p.dtype).itemsize
            statistics = held["R"] + held["C"] + held["V"]
            entries.append(Entry(name, plan.shape, statistics, held["m"], held["compensation"], plan.numel * width))
            total += p.numel() * p.dtype.itemsize
    return Estimate(tuple(entries), total)


def kinds(plan: Plan, rule: Rule, layout: Layout, dtype: torch.dtype) -> dict[str, int]:
    """The bytes of each kind of tensor that the state of a parameter, or of a shard of it, holds.

    Args:
        plan: the parameter's or the shard's.
        rule: its group's.
        layout: the dialect's.
        dtype: of the parameter.
    """
    names = {
        "R": layout.row,
        "C": layout.col,
        "V": layout.full,
        "m": layout.momentum,
        "compensation": layouts.COMPENSATION,
    }
    held = {name: prod(shape) * kept.itemsize for name, (shape, kept) in tensors(plan, rule, layout, dtype).items()}
    return {kind: held.get(name, 0) for kind, name in names.items()} | {"step": STEP_BYTES}


def class_of(dialect: str | type[BaseAdafactor]) -> type[BaseAdafactor]:
    """The optimizer class of a dialect, see ``estimate``."""
    if isinstance(dialect, type) and issubclass(dialect, BaseAdafactor):
        return dialect
    known = sorted(module.name for module in pkgutil.iter_modules(dialects.__path__))
    name = checks.choice("dialect", dialect, known)
    found: type[BaseAdafactor] = importlib.import_module(f"{dialects.__name__}.{name}").Adafactor
    return found


def _without_memory(each: Any, metas: dict[Tensor, Tensor]) -> Any:
    """A parameter, a (name, parameter) pair or a group, with parameters of the same shapes on the meta device."""
    if isinstance(each, Tensor):
        if each not in metas:
            metas[each] = torch.empty_like(each, device="meta", requires_grad=each.requires_grad)
        return metas[each]
    if isinstance(each, dict):
        params = [each["params"]] if isinstance(each["params"], Tensor) else each["params"]
        return {**each, "params": [_without_memory(p, metas) for p in params]}
    name, p = each
    return name, _without_memory(p, metas)
