"""One parameter's state inside: what it holds, when it fits, how it is made and moved.

``step`` (float32, 0-d, on the CPU); ``row_var`` and ``col_var`` (R and C, each with size 1 in the dims it averages)
or ``variance`` (V); ``momentum`` (m) where the rule has it. The tensors are in the dtype of the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .layouts import STATISTICS
from .rule import Rule
from .shapes import Plan, plan

State = dict[str, Any]


def plan_of(p: Tensor) -> Plan:
    """The parameter's plan."""
    return plan(tuple(p.shape))


def arithmetic(p: Tensor) -> torch.dtype:
    """What a parameter's arithmetic runs in and its statistics are kept in."""
    return torch.float64 if p.dtype is torch.float64 else torch.float32


def saved_plan(state: Mapping[str, Any]) -> Plan:
    """The plan that a state was made for: p may be flattened or empty at the moment."""
    if "variance" in state:
        return plan(tuple(state["variance"].shape))
    sizes = zip(state["row_var"].shape, state["col_var"].shape, strict=True)
    return plan(tuple(row if col == 1 else col for row, col in sizes))


def fits(state: Mapping[str, Any], p: Tensor) -> bool:
    """Whether a state was made for p's shape."""
    made = {name: tuple(value.shape) for name, value in state.items() if name in STATISTICS}
    wanted = _shapes(p)
    return all(made.get(name) == shape for name, shape in wanted.items() if name != "momentum") and all(
        wanted.get(name) == shape for name, shape in made.items()
    )


def ensure(state: State, p: Tensor, rule: Rule) -> None:
    """Make what p's state lacks, all of it where it was made for another shape, and move what p has moved away from."""
    if not fits(state, p):
        state.clear()
        state["step"] = torch.zeros((), dtype=torch.float32)
    dtype = arithmetic(p)
    for name, shape in _shapes(p).items():
        kept = state.get(name)
        if kept is None:
            if name != "momentum" or rule.beta1 is not None:
                state[name] = torch.zeros(shape, dtype=dtype, device=p.device)
        elif kept.dtype != dtype or kept.device != p.device:
            state[name] = kept.to(p.device, dtype)


def copy_for(p: Tensor, state: Mapping[str, Any]) -> State:
    """A copy of a loaded state where p's step needs it: statistics beside p in the dtype of the arithmetic."""
    copy: State = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and name != "step":
            dtype = arithmetic(p) if name in STATISTICS else value.dtype
            value = value.detach().to(p.device, dtype, copy=True)
        copy[name] = value
    return copy


def _shapes(p: Tensor) -> dict[str, tuple[int, ...]]:
    """Every tensor that p's state may hold."""
    factors = plan_of(p)
    if not factors.factored:
        return {"variance": factors.shape, "momentum": factors.shape}
    return {"row_var": factors.row_shape, "col_var": factors.col_shape, "momentum": factors.shape}
