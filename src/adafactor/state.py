"""One parameter's state: what it holds, when it fits, how it is made, moved and copied.

It holds ``step`` (float32, 0-d, on the CPU), R and C or V, and m where the rule has momentum, under the names and in
the shapes of the dialect's layout, and the compensation of rounding="kahan": checkpoint tools take the names of what
they restore from it. Where steps may be called off on an accelerator, ``step`` is there, beside its parameter: the
host does not know which are. Of a DTensor they are DTensors, all but ``step``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import sharding
from .layouts import COMPENSATION, Layout
from .rounding import LOW
from .rule import Rule
from .shapes import Plan

State = dict[str, Any]


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """What the arithmetic of a parameter of a dtype runs in and its statistics are kept in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def tensors(
    plan: Plan, rule: Rule, layout: Layout, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The shape and the dtype of every tensor that the state of a parameter holds, its step count aside.

    Args:
        plan: the parameter's.
        rule: its group's, for the momentum.
        layout: the dialect's.
        dtype: of the parameter.
    """
    wide = arithmetic(dtype)
    held = {name: (shape, wide) for name, shape in layout.shapes(plan).items()}
    if rule.beta1 is not None:
        held[layout.momentum] = plan.shape, rule.momentum_dtype or wide
    if rule.rounding == "kahan" and dtype in LOW:
        held[COMPENSATION] = plan.shape, dtype
    return held


def steps(state: Mapping[str, Any] | None) -> float:
    """How many steps a state has counted."""
    if not state or "step" not in state or getattr(state["step"], "is_meta", False):
        return 0.0
    return float(state["step"])


def fits(state: Mapping[str, Any], plan: Plan, layout: Layout) -> bool:
    """Whether a state was made for a plan."""
    shapes = {name: tuple(state[name].shape) for name in (*layout.names, COMPENSATION) if name in state}
    beside = {shapes.pop(name, plan.shape) for name in (layout.momentum, COMPENSATION)}
    return beside == {plan.shape} and shapes == layout.shapes(plan)


def ready(state: Mapping[str, Any], p: Tensor, plan: Plan, rule: Rule, layout: Layout, counts: torch.device) -> bool:
    """Whether a step can use a state as it is: everything is there, for this plan, where p is, in the right dtype.

    A compensation that is not wanted is not left to be taken for one later. counts is where steps are counted.
    """
    wanted = tensors(plan, rule, layout, p.dtype)
    return (
        _step_is_kept(state, counts)
        and (COMPENSATION in state) == (COMPENSATION in wanted)
        and all(
            (value := state.get(name)) is not None
            and value.shape == shape
            and value.dtype == dtype
            and value.device == p.device
            and sharding.lies_as(value, p, dims(name, plan, layout))
            for name, (shape, dtype) in wanted.items()
        )
    )


def dims(name: str, plan: Plan, layout: Layout) -> tuple[int | None, ...]:
    """The dims of a tensor of a parameter's state, as ``Layout.dims`` has them."""
    return layout.dims(plan).get(name, tuple(range(len(plan.shape))))


@torch.inference_mode(False)
def ensure(state: State, p: Tensor, plan: Plan, rule: Rule, layout: Layout, counts: torch.device) -> None:
    """Make what p's state lacks, all of it where it was made for another plan, and move what p has moved away from.

    counts is where steps are counted. Never as inference tensors, which no later step could write to.
    """
    if not fits(state, plan, layout):
        for name in ("step", *layout.names, COMPENSATION):
            state.pop(name, None)
    if not _step_is_kept(state, counts):
        state["step"] = torch.tensor(steps(state), dtype=torch.float32, device=counts)
    wanted = tensors(plan, rule, layout, p.dtype)
    if COMPENSATION not in wanted:
        state.pop(COMPENSATION, None)
    for name, (shape, dtype) in wanted.items():
        kept = state.get(name)
        if kept is None:
            state[name] = _zeros(p, name, shape, dtype, plan, layout)
        elif kept.dtype != dtype or kept.device != p.device or not sharding.lies_as(kept, p, dims(name, plan, layout)):
            state[name] = _placed(kept, p, dims(name, plan, layout), dtype)


@torch.inference_mode(False)
def copy_for(p: Tensor, state: Mapping[str, Any], plan: Plan, rule: Rule, layout: Layout) -> State:
    """A copy of a loaded state where p's step needs it: beside p, statistics in the dtypes they are kept in."""
    kept = tensors(plan, rule, layout, p.dtype)
    copy: State = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            _, dtype = kept.get(name, (None, value.dtype))
            device = value.device if name == "step" else p.device
            if name == COMPENSATION and name not in kept:
                continue
            if name in kept:
                shape = kept[name][0]
                value = _placed(value.detach(), p, dims(name, plan, layout), dtype)
                if not p.is_contiguous() and value.shape == shape and not sharding.is_distributed(p):
                    value = _zeros(p, name, shape, dtype, plan, layout).copy_(value)
            else:
                value = value.detach().to(device, dtype, copy=True)
        copy[name] = value
    return copy


def _placed(value: Tensor, p: Tensor, of: tuple[int | None, ...], dtype: torch.dtype) -> Tensor:
    """A copy of a statistic of p, where and as p's step needs it."""
    here = sharding.part(value, p, of).to(p.device, dtype, copy=True)
    return sharding.like(p, here, of)


def _zeros(p: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype, plan: Plan, layout: Layout) -> Tensor:
    """Zeros whose dims lie in memory in the order of p's, so that a kernel can go along both; sharded as p is."""
    here, of = sharding.local(p), dims(name, plan, layout)
    stride = here.stride()
    order = sorted(range(here.dim()), key=lambda i: -stride[i])
    averaged = {layout.row: plan.cols, layout.col: plan.rows}.get(name, ())
    whole = [1 if i in averaged else size for i, size in enumerate(here.shape)]
    zeros = torch.zeros([whole[i] for i in order], dtype=dtype, device=here.device)
    zeros = zeros.permute([order.index(i) for i in range(here.dim())])
    return sharding.like(p, zeros.view([1 if i is None else here.shape[i] for i in of]), of)


def _step_is_kept(state: Mapping[str, Any], counts: torch.device) -> bool:
    """Whether the step count is where it is kept: tools move all tensors of a state at once, or put an int there."""
    step = state.get("step")
    return isinstance(step, Tensor) and step.dtype is torch.float32 and step.dim() == 0 and step.device == counts
