"""What hyper-parameters, parameters and gradients may be: each check raises an error with the rule and the value."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from math import inf
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor

from . import sharding

# A schedule that ends at 0 may land on a negative rounding error (LinearLR to 0 does): it means 0.
_ROUNDING_OF_ZERO = 1e-12


def is_number(value: Any) -> bool:
    """Whether value is a real number that float can hold, of Python's or numpy's kind, and no bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def learning_rate(name: str, value: Any, *, finite: bool = True) -> float | Tensor:
    """A number >= 0, or a one-element tensor.

    A tensor on the CPU is read here. One on an accelerator is returned as it is, since reading it would wait for the
    device: its value is the caller's to keep in range.
    """
    rule = f"{name} should be a {'finite ' if finite else ''}number >= 0 or a tensor of one element"
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{rule}, got a tensor of shape {tuple(value.shape)}")
        if value.device.type != "cpu":
            return value
        value = value.item()
    if not is_number(value) or not value >= -_ROUNDING_OF_ZERO or (finite and value == inf):
        raise ValueError(f"{rule}, got {value!r}")
    return max(float(value), 0.0)


def at_least_zero(name: str, value: Any) -> float:
    """A finite number >= 0."""
    if not is_number(value) or not 0 <= value < inf:
        raise ValueError(f"{name} should be a finite number >= 0, got {value!r}")
    return float(value)


def decay_exponent(name: str, value: Any) -> float:
    """A finite number <= 0: 1 - beta2 is t to this power."""
    if not is_number(value) or not -inf < value <= 0:
        raise ValueError(f"{name} should be a finite number <= 0, got {value!r}")
    return float(value)


def threshold(name: str, value: Any) -> float | None:
    """A number > 0, inf among them, or None for no clipping."""
    if value is not None and not (is_number(value) and value > 0):
        raise ValueError(f"{name} should be > 0 or None, got {value!r}")
    return None if value is None else float(value)


def momentum(name: str, value: Any) -> float | None:
    """A number in [0, 1), or None. 0 is no momentum, so it is None too and keeps no buffer."""
    if value is not None and not (is_number(value) and 0 <= value < 1):
        raise ValueError(f"{name} should be in [0, 1) or None, got {value!r}")
    return float(value) if value else None


def flag(name: str, value: Any) -> bool:
    """True or False, or 1 or 0."""
    if not _is_flag(value):
        raise ValueError(f"{name} should be True or False, got {value!r}")
    return bool(value)


def _is_flag(value: Any) -> bool:
    return not isinstance(value, Tensor) and getattr(value, "shape", ()) == () and value in (True, False)


def count(name: str, value: Any) -> int:
    """A whole number >= 0."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 0:
        raise ValueError(f"{name} should be a whole number >= 0, got {value!r}")
    return int(value)


def positive(name: str, value: Any) -> int:
    """A whole number >= 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
        raise ValueError(f"{name} should be a whole number >= 1, got {value!r}")
    return int(value)


def fraction(name: str, value: Any) -> float:
    """A number in [0, 1]."""
    if not is_number(value) or not 0 <= value <= 1:
        raise ValueError(f"{name} should be in [0, 1], got {value!r}")
    return float(value)


def choice(name: str, value: Any, known: Sequence[str]) -> str:
    """One of the known names."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} should be one of {', '.join(known)}, got {value!r}")
    return value


def float_dtype(name: str, value: Any) -> torch.dtype:
    """float32, float16 or bfloat16, or one of their names."""
    dtypes = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    for known, dtype in dtypes.items():
        if value in (known, dtype):
            return dtype
    raise ValueError(f"{name} should be one of {', '.join(dtypes)}, got {value!r}")


def boost(name: str, value: Any) -> float | None:
    """A number >= 1, or None for no limit."""
    if value is not None and not (is_number(value) and value >= 1):
        raise ValueError(f"{name} should be >= 1 or None, got {value!r}")
    return None if value is None else float(value)


def skip(name: str, value: Any) -> Literal["step", "parameter"] | None:
    """True is "step", False is None, or "parameter"."""
    if isinstance(value, str) and value == "parameter":
        return "parameter"
    if not _is_flag(value):
        raise ValueError(f"{name} should be True, False or 'parameter', got {value!r}")
    return "step" if value else None


def absent(group: Mapping[str, Any], *names: str) -> None:
    """Refuse options that stand for another algorithm, where a file of the original brings them."""
    for name in names:
        if group.get(name):
            raise ValueError(f"{name} should be False, since it is an algorithm of its own, got {group[name]!r}")


def epsilons(name: str, value: Any, *, none: bool) -> tuple[float | None, float]:
    """A pair of finite numbers >= 0; with none=True the first may be None."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise ValueError(f"{name} should be a pair (epsilon1, epsilon2), got {value!r}")
    eps1 = None if none and value[0] is None else at_least_zero(f"{name}[0]", value[0])
    return eps1, at_least_zero(f"{name}[1]", value[1])


def name(group: Mapping[str, Any], index: int, position: int) -> str:
    """A parameter's name where it has one, else its place in words."""
    names = group.get("param_names")
    return str(names[position]) if names else label(group, index, position)


def label(group: Mapping[str, Any], index: int, position: int) -> str:
    """How messages name a parameter: by its name where it has one, and by its place."""
    names = group.get("param_names")
    name = f" ({names[position]})" if names else ""
    return f"parameter {position} of group {index}{name}"


def parameter(p: Tensor, group: Mapping[str, Any], index: int, position: int) -> None:
    """Refuse a parameter that Adafactor is not defined for: anything but a dense tensor of real floats, all of it or
    known parts of it."""
    rounding = group.get("rounding", "nearest")
    where = label(group, index, position)
    if p.is_complex():
        raise ValueError(f"{where} should be real, got {p.dtype}: optimize torch.view_as_real of it instead")
    if not p.is_floating_point():
        raise ValueError(f"{where} should have a floating-point dtype, got {p.dtype}: leave it out")
    if p.layout is not torch.strided:
        raise ValueError(f"{where} should be a dense tensor, got layout {p.layout}: optimize its values instead")
    if rounding != "nearest" and p.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ValueError(f"{where} should have a dtype that rounding={rounding!r} knows, got {p.dtype}: use 'nearest'")
    if hasattr(p, "_fsdp_flattened"):
        raise ValueError(
            f"{where} should have rows and columns, got a flat piece of an FSDP1 unit: "
            "use FSDP2, torch.distributed.fsdp.fully_shard, instead"
        )
    try:
        sharding.find(p)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from None


def gradient(p: Tensor, g: Tensor, group: Mapping[str, Any], index: int, position: int) -> None:
    """Refuse a gradient that is not a dense tensor beside its parameter, of its shape, placed as it is.

    Sparse ones would save nothing: the statistics of all rows decay at every step.
    """
    if g.shape != p.shape or g.device != p.device:
        raise ValueError(
            f"the gradient of {label(group, index, position)} should have its shape {tuple(p.shape)} and its device "
            f"{p.device}, got {type(g).__name__} of shape {tuple(g.shape)} on {g.device}"
        )
    if not sharding.is_placed_alike(g, p):
        raise ValueError(
            f"the gradient of {label(group, index, position)} should be placed as it is, {sharding.told(p)}, got "
            f"{sharding.told(g)}: set p.grad = p.grad.redistribute(p.device_mesh, p.placements) before the step"
        )
    if g.is_complex():
        raise ValueError(f"the gradient of {label(group, index, position)} should be real, got {g.dtype}")
    if g.layout is not torch.strided:
        raise RuntimeError(
            f"the gradient of {label(group, index, position)} should be dense, got layout {g.layout}: "
            "make the embedding with sparse=False, or set p.grad = p.grad.to_dense() before the step"
        )


def warn(message: str) -> None:
    """Warn at the caller's line: the nearest one outside torch and this package, however many wrappers are between."""
    frame, depth = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", __package__):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, stacklevel=depth)
