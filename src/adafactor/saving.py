"""From the optimizer's groups and state to a state dict, and back: everything is looked at before anything is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor

from . import checks, layouts, state
from .layouts import Layout
from .rule import Rule
from .shapes import Plan
from .state import State

Group = dict[str, Any]
ENGINE_ARGUMENTS = (
    "factor",
    "min_dim_size_to_factor",
    "factored",
    "batch_dims",
    "foreach",
    "fused",
    "rounding",
    "skip_nonfinite",
    "max_row_boost",
    "max_grad_norm",
)
"""The arguments that say how a step is computed and what is kept for it: never taken from a saved state.

The seed is: a run that goes on from a file goes on with its draws.
"""
NUMERICS = {"rounding": "nearest", "skip_nonfinite": False, "max_row_boost": None, "max_grad_norm": None}
"""Those of them that change what a step computes, with what they are by default."""


class Loaded(NamedTuple):
    """What a state dict holds for an optimizer: groups with its parameters, their state, and rms(p) where it is saved.

    States that are no parameter's are under their own keys, as PyTorch's base class has it.
    """

    groups: list[Group]
    states: dict[Any, State]
    rms: dict[Tensor, float]


def to_save(
    groups: Sequence[Group], states: Mapping[Any, State], layout: Layout, rms_of: Callable[[Tensor], float | None]
) -> dict[str, Any]:
    """A state dict. The state of tensors that are in no group stays out.

    Args:
        groups, states: the optimizer's.
        layout: its layout.
        rms_of: gives rms(p) at the last step, where the layout saves it; None where it is not known.
    """
    ids: dict[Tensor, int] = {}
    saved_groups = []
    count = 0
    for group in groups:
        for p in group["params"]:
            ids.setdefault(p, count)
            count += 1
        saved = {**group, "params": [ids[p] for p in group["params"]]}
        # Without momentum there is no buffer, and the peers look for one wherever beta1 is a number.
        if saved.get("beta1") == 0:
            saved["beta1"] = None
        saved_groups.append(saved)
    entries: dict[Any, Any] = {}
    for key, own in states.items():
        if not isinstance(key, Tensor):
            entries[key] = own
        elif key in ids and own:
            entries[ids[key]] = layouts.write(layout, own, partial(rms_of, key))
    return {"state": entries, "param_groups": saved_groups}


def to_load(
    saved: Mapping[str, Any],
    groups: Sequence[Group],
    layout: Layout,
    check: Callable[[Group], Rule],
    plan_of: Callable[[Tensor, Group], Plan],
) -> Loaded:
    """Read a state dict of any known layout for an optimizer.

    Args:
        saved: the state dict.
        groups: the optimizer's.
        layout: the optimizer's own layout.
        check: gives the rule of a group, or refuses it.
        plan_of: gives the plan of a parameter in a group.

    Raises:
        ValueError: it does not fit.
    """
    found = layouts.detect(saved, layout)
    merged = _merge(saved["param_groups"], groups, found, layout)
    owner = {}
    for theirs, group in zip(saved["param_groups"], merged, strict=True):
        place = check(group), found.factoring_of(theirs), group
        owner.update({key: (p, *place) for key, p in zip(theirs["params"], group["params"], strict=True)})
    states: dict[Any, State] = {}
    rms = {}
    dropped: list[str] = []
    for key, entry in saved["state"].items():
        if key not in owner:
            states[key] = deepcopy(entry)
        elif entry != {}:
            p, rule, factoring, group = owner[key]
            plan, label = plan_of(p, group), f"parameter {key}"
            _check_same_dims(factoring.plan(plan.shape), plan, label)
            read = layouts.read(found, layout, entry, plan, label)
            if found != layout and rule.beta1 is None:
                # Of no use here, and as large as the parameter.
                read.pop(layout.momentum, None)
            if layouts.COMPENSATION in read.keys() - state.tensors(plan, rule, layout, p.dtype):
                dropped.append(label)
            states[p] = state.copy_for(p, read, plan, rule, layout)
            if isinstance(entry.get("RMS"), (Real, Tensor)):
                rms[p] = float(entry["RMS"])
    if dropped:
        others = " and others" if dropped[1:] else ""
        checks.warn(
            f"the compensation of {dropped[0]}{others} is dropped: its rounding is not 'kahan', or its dtype needs none"
        )
    return Loaded(merged, states, rms)


def _merge(saved: Sequence[Group], groups: Sequence[Group], found: Layout, own: Layout) -> list[Group]:
    """The groups as they will be once loaded."""
    sizes, own_sizes = ([len(group["params"]) for group in side] for side in (saved, groups))
    if sizes != own_sizes:
        raise ValueError(
            f"the state dict should have parameter groups of {own_sizes} parameters like the optimizer, got {sizes}"
        )
    if found != own:
        checks.warn(
            f"loading the state of a {found.name} optimizer: the groups keep their own hyper-parameters, "
            f"since {found.name}'s mean something else"
        )
    merged = []
    for group, theirs in zip(groups, saved, strict=True):
        taken = theirs if found == own else {key: theirs[key] for key in ("param_names", "seed") if key in theirs}
        lost = [
            f"{name}={theirs[name]!r}"
            for name, default in NUMERICS.items()
            # Of a compensation that is lost, its own warning speaks.
            if group.get(name, default) == default and theirs.get(name, default) not in (default, "kahan")
        ]
        if lost:
            checks.warn(f"the state was made with {', '.join(lost)}, which a load does not take over: ask for it again")
        kept = {name: group[name] for name in ("params", *ENGINE_ARGUMENTS) if name in group}
        merged.append({**group, **deepcopy({k: v for k, v in taken.items() if k not in kept}), **kept})
    return merged


def _check_same_dims(saved: Plan, own: Plan, label: str) -> None:
    if (saved.rows, saved.cols, saved.slices) != (own.rows, own.cols, own.slices):
        raise ValueError(
            f"the state of {label} should be factored over rows {own.rows}, columns {own.cols} and {own.slices} batch "
            f"dims of its shape {own.shape}, got rows {saved.rows}, columns {saved.cols} and {saved.slices} batch dims"
        )
