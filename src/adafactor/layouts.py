"""The names and shapes under which each system keeps and saves its state: recognise a file, and read it in another's.

Statistics differ between systems only in their names and in whether R and C keep their averaged dims, so that a
translation loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import checks
from .shapes import MODES, Factoring, Plan

COMPENSATION = "compensation"
"""What rounding="kahan" keeps, under the same name in every layout: the systems have nothing like it."""


@dataclass(frozen=True)
class Layout:
    """How one system names its state.

    Attributes:
        name: the system, for messages.
        row, col, full, momentum: the names of R, C, V and m.
        keepdim: whether R and C keep their averaged dims with size 1.
        int_step: whether the step count is saved as an int (and an ``RMS`` float beside it), else as a float32 tensor.
        marks: hyper-parameters by which a param group of this system is known.
        factoring: what the system factors where a group does not say.
    """

    name: str
    row: str
    col: str
    full: str
    momentum: str
    keepdim: bool
    int_step: bool
    marks: frozenset[str]
    factoring: Factoring

    @property
    def names(self) -> tuple[str, str, str, str]:
        """The names of R, C, V and m."""
        return self.row, self.col, self.full, self.momentum

    def dims(self, plan: Plan) -> dict[str, tuple[int | None, ...]]:
        """The dims of the statistics of a plan: for each, the dim of the parameter that it is, or None, of size 1."""
        every = range(len(plan.shape))
        if not plan.factored:
            return {self.full: tuple(every)}
        averaged = {self.row: plan.cols, self.col: plan.rows}
        if self.keepdim:
            return {name: tuple(None if i in dims else i for i in every) for name, dims in averaged.items()}
        return {name: tuple(i for i in every if i not in dims) for name, dims in averaged.items()}

    def shapes(self, plan: Plan) -> dict[str, tuple[int, ...]]:
        """The shapes of the statistics of a plan."""
        size = plan.shape
        return {name: tuple(1 if i is None else size[i] for i in dims) for name, dims in self.dims(plan).items()}

    def factoring_of(self, group: Mapping[str, Any]) -> Factoring:
        """What a saved group's parameters were factored over."""
        own = self.factoring
        mode = own.mode if group.get("factor") is None else checks.choice("factor", group["factor"], MODES)
        return Factoring(
            mode if checks.flag("factored", group.get("factored", True)) else "none",
            checks.count("min_dim_size_to_factor", group.get("min_dim_size_to_factor", own.min_dim)),
            checks.count("batch_dims", group.get("batch_dims", own.batch_dims)),
        )


TORCH = Layout(
    name="torch",
    row="row_var",
    col="col_var",
    full="variance",
    momentum="momentum",
    keepdim=True,
    int_step=False,
    marks=frozenset({"beta2_decay"}),
    factoring=Factoring("last"),
)
TRANSFORMERS = Layout(
    name="transformers",
    row="exp_avg_sq_row",
    col="exp_avg_sq_col",
    full="exp_avg_sq",
    momentum="exp_avg",
    keepdim=False,
    int_step=True,
    marks=frozenset({"clip_threshold", "relative_step"}),
    factoring=Factoring("last"),
)
PAPER = replace(TORCH, name="paper", marks=frozenset({"d", "decay_rate"}))
OPTAX = replace(TORCH, name="optax", marks=frozenset({"weight_decay_rate"}), factoring=Factoring("largest", 128))
BIG_VISION = replace(
    TORCH,
    name="big_vision",
    row="exp_avg_sq_r",
    col="exp_avg_sq_c",
    full="exp_avg_sq",
    momentum="exp_avg",
    marks=frozenset({"beta2_cap"}),
    factoring=Factoring("largest", 16),
)
TIMM = replace(TRANSFORMERS, name="timm", marks=frozenset({"eps_scale"}), factoring=Factoring("timm", 16))
# timm's groups have all that marks transformers' and more, so it comes first.
LAYOUTS = (TORCH, PAPER, OPTAX, BIG_VISION, TIMM, TRANSFORMERS)


def detect(state_dict: Mapping[str, Any], own: Layout) -> Layout:
    """The layout of a state dict: by its groups' keys, else by its state's; own where it has neither.

    Raises:
        ValueError: it is no state dict, or of no layout known here (of another optimizer, say).
    """
    _check_structure(state_dict)
    group_keys = {key for group in state_dict["param_groups"] for key in group} - {"params", "param_names"}
    state_keys = {key for entry in state_dict["state"].values() if isinstance(entry, Mapping) for key in entry}
    state_keys -= {COMPENSATION}
    for layout in LAYOUTS:
        if layout.marks <= group_keys:
            return layout
    for layout in (own, *LAYOUTS):
        vectors = state_keys - {"step", "RMS"} == {layout.full} or state_keys == {"step", "RMS", *layout.names[2:]}
        if state_keys & {layout.row, layout.col} or vectors:
            return layout
    if not state_keys and not group_keys:
        return own
    raise ValueError(
        f"the state dict should be of one of the layouts {', '.join(layout.name for layout in LAYOUTS)}, "
        f"got group keys {sorted(group_keys)} and state keys {sorted(state_keys)}"
    )


def read(found: Layout, own: Layout, entry: Any, plan: Plan, label: str) -> dict[str, Any]:
    """One parameter's saved state, from the names and shapes of one layout to another's. Tensors are views.

    Raises:
        ValueError: something is missing, is no number or tensor, or has another shape than the parameter's plan.
    """
    if not isinstance(entry, Mapping):
        raise ValueError(f"the state of {label} should be a dict, got {entry!r}")
    saved, wanted = found.shapes(plan), own.shapes(plan)
    for name in (found.row, found.col, found.full):
        if (name in entry) != (name in saved):
            kept = "factored" if plan.factored else "not factored"
            raise ValueError(
                f"the state of {label} should hold {', '.join(sorted(saved))} (its shape {plan.shape} is {kept}), "
                f"got {', '.join(sorted(map(str, entry))) or 'nothing'}"
            )
    state: dict[str, Any] = {"step": _step(entry, label)}
    names = {**dict(zip(found.names, own.names, strict=True)), COMPENSATION: COMPENSATION}
    for key, value in entry.items():
        if key in names:
            shape = saved.get(key, plan.shape)
            real = isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided
            if not real or tuple(value.shape) != shape:
                raise ValueError(f"{key} of {label} should be a dense real tensor of shape {shape}, got {_told(value)}")
            shape = wanted.get(names[key], plan.shape)
            state[names[key]] = value if value.shape == shape else value.reshape(shape)
        # What a user put there stays there; RMS is derived.
        elif key not in ("step", "RMS"):
            state[key] = value
    return state


def write(layout: Layout, state: Mapping[str, Any], rms: Callable[[], float | None]) -> dict[str, Any]:
    """One parameter's state as its layout saves it. Tensors are the state's own.

    Args:
        layout: the layout that the state is in.
        state: the state.
        rms: gives rms(p) at the last step, where the layout saves it; what is not known is saved as 0.
    """
    if not layout.int_step or "step" not in state:
        return dict(state)
    step = int(state["step"])
    return {**state, "step": step, "RMS": (rms() if step else None) or 0.0}


def _check_structure(state_dict: Any) -> None:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        keys = ", ".join(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(f"a state dict should hold state and param_groups, got {keys}")
    if not isinstance(state_dict["state"], Mapping):
        raise ValueError(f"the state of a state dict should be a dict, got {type(state_dict['state']).__name__}")
    groups = state_dict["param_groups"]
    if not isinstance(groups, (list, tuple)) or not all(isinstance(g, Mapping) and "params" in g for g in groups):
        raise ValueError("the param_groups of a state dict should be a list of dicts with params, got something else")


def _told(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{tuple(value.shape)}" if value.is_floating_point() else f"{value.dtype}"


def _step(entry: Mapping[str, Any], label: str) -> Tensor:
    step = entry.get("step")
    if isinstance(step, Tensor) and step.numel() == 1:
        step = step.item()
    if isinstance(step, bool) or not isinstance(step, (int, float)) or not 0 <= step < 2**32:
        raise ValueError(f"the step of {label} should be a number >= 0 and below 2^32, got {step!r}")
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")
