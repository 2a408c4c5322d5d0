"""The names and shapes under which each system saves its state: recognise a file, read it, write one.

Inside, the optimizer keeps torch's layout, plus ``momentum`` where a dialect has it. Statistics differ between systems
only in their names and in whether R and C keep their averaged dim, so that a translation loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .shapes import Plan


@dataclass(frozen=True)
class Layout:
    """How one system names its state.

    Attributes:
        name: the system, for messages.
        row, col, full, momentum: the names of R, C, V and m; no momentum where the system has none.
        keepdim: whether R and C keep their averaged dim with size 1.
        int_step: whether the step count is an int (and an ``RMS`` float lies beside it), else a float32 tensor.
        marks: hyper-parameters by which a param group of this system is known.
    """

    name: str
    row: str
    col: str
    full: str
    momentum: str | None
    keepdim: bool
    int_step: bool
    marks: frozenset[str]


TORCH = Layout("torch", "row_var", "col_var", "variance", None, True, False, frozenset({"beta2_decay", "d"}))
TRANSFORMERS = Layout(
    "transformers",
    "exp_avg_sq_row",
    "exp_avg_sq_col",
    "exp_avg_sq",
    "exp_avg",
    False,
    True,
    frozenset({"decay_rate", "clip_threshold"}),
)
LAYOUTS = (TORCH, TRANSFORMERS)

STATISTICS = ("row_var", "col_var", "variance", "momentum")
"""The names of tensors inside, in the dtype of the arithmetic."""


def detect(state_dict: Mapping[str, Any], own: Layout) -> Layout:
    """The layout of a state dict: by its groups' keys, else by its state's; own where it has neither.

    Raises:
        ValueError: it is no state dict, or of no layout known here (of another optimizer, say).
    """
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(f"a state dict should hold state and param_groups, got {', '.join(map(str, state_dict))}")
    group_keys = {key for group in state_dict["param_groups"] for key in group} - {"params", "param_names"}
    state_keys = {key for entry in state_dict["state"].values() if isinstance(entry, Mapping) for key in entry}
    for layout in LAYOUTS:
        if layout.marks <= group_keys:
            return layout
    for layout in LAYOUTS:
        if state_keys & {layout.row, layout.col} or state_keys - {"step", "RMS"} == {layout.full}:
            return layout
    if not state_keys and not group_keys:
        return own
    raise ValueError(
        f"the state dict should be of one of the layouts {', '.join(layout.name for layout in LAYOUTS)}, "
        f"got group keys {sorted(group_keys)} and state keys {sorted(state_keys)}"
    )


def read(layout: Layout, entry: Mapping[str, Any], plan: Plan, label: str) -> dict[str, Any]:
    """One parameter's saved state in the names and shapes used inside. Tensors are views of what was saved.

    Raises:
        ValueError: something is missing, is no number or tensor, or has another shape than the parameter's plan.
    """
    shapes = _shapes(layout, plan)
    for name in (layout.row, layout.col, layout.full):
        if (name in entry) != (name in shapes):
            kept = "factored" if plan.factored else "not factored"
            raise ValueError(
                f"the state of {label} should hold {', '.join(sorted(shapes))} (its shape {plan.shape} is {kept}), "
                f"got {', '.join(sorted(map(str, entry))) or 'nothing'}"
            )
    state: dict[str, Any] = {"step": _step(entry, label)}
    names = _names(layout)
    for key, value in entry.items():
        if key not in names:
            # What a user put there stays there; RMS is derived.
            if key not in ("step", "RMS"):
                state[key] = value
            continue
        name, shape = names[key], shapes.get(key, plan.shape)
        if not isinstance(value, Tensor) or tuple(value.shape) != shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{key} of {label} should be a tensor of shape {shape}, got {found}")
        state[name] = value.reshape(_inside_shape(name, plan))
    return state


def write(layout: Layout, state: Mapping[str, Any], plan: Plan, rms: Callable[[], float]) -> dict[str, Any]:
    """One parameter's state under the names and in the shapes of a layout. Tensors share memory with the state.

    Args:
        layout: the layout to write.
        state: the state inside.
        plan: the parameter's plan.
        rms: gives rms(p) at the last step, where the layout saves it.
    """
    shapes = _shapes(layout, plan)
    saved_names = {name: key for key, name in _names(layout).items()}
    entry: dict[str, Any] = {}
    for name, value in state.items():
        if name == "step" and layout.int_step:
            entry["step"] = int(value)
            entry["RMS"] = rms() if entry["step"] else 0.0
        elif name in saved_names:
            key = saved_names[name]
            entry[key] = value.reshape(shapes.get(key, plan.shape))
        elif name not in STATISTICS:
            entry[name] = value
    return entry


def _names(layout: Layout) -> dict[str, str]:
    names = {layout.row: "row_var", layout.col: "col_var", layout.full: "variance"}
    if layout.momentum is not None:
        names[layout.momentum] = "momentum"
    return names


def _inside_shape(name: str, plan: Plan) -> tuple[int, ...]:
    return {"row_var": plan.row_shape, "col_var": plan.col_shape}.get(name, plan.shape)


def _shapes(layout: Layout, plan: Plan) -> dict[str, tuple[int, ...]]:
    """The shapes of the statistics that a layout saves for a plan."""
    if not plan.factored:
        return {layout.full: plan.shape}
    if layout.keepdim:
        return {layout.row: plan.row_shape, layout.col: plan.col_shape}
    size = plan.shape
    return {
        layout.row: tuple(size[i] for i in range(len(size)) if i not in plan.cols),
        layout.col: tuple(size[i] for i in range(len(size)) if i not in plan.rows),
    }


def _step(entry: Mapping[str, Any], label: str) -> Tensor:
    step = entry.get("step")
    if isinstance(step, Tensor) and step.numel() == 1:
        step = step.item()
    if isinstance(step, bool) or not isinstance(step, (int, float)) or not 0 <= step < float("inf"):
        raise ValueError(f"the step of {label} should be a finite number >= 0, got {step!r}")
    return torch.tensor(float(step), dtype=torch.float32)
