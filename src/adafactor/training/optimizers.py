"""The optimizers `adafactor train` knows by name, and how their arguments are given as text."""

import ast
import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..optimizer import BaseAdafactor
from .errors import InputError


class Choice(NamedTuple):
    """Where an optimizer is found, what it is, and the peak learning rate it gets where none is given.

    With `relative`, it sets its own step size unless it is given one. `lr_name` is what its constructor calls the
    learning rate; None takes none.
    """

    module: str
    about: str
    lr: float | None
    relative: bool = False
    attribute: str = "Adafactor"
    lr_name: str | None = "lr"


CHOICES = {
    "adafactor": Choice("adafactor", "this library's, as in torch.optim", 0.05),
    "towhee": Choice("adafactor.dialects.towhee", "as in towhee", 0.05, relative=True),
    "transformers": Choice("adafactor.dialects.transformers", "as in transformers", 0.05, relative=True),
    "paper": Choice("adafactor.dialects.paper", "as in the paper", None, relative=True, lr_name=None),
    "optax": Choice("adafactor.dialects.optax", "as in optax", 0.05, lr_name="learning_rate"),
    "big_vision": Choice("adafactor.dialects.big_vision", "as in big_vision", 3e-3),
    "timm": Choice("adafactor.dialects.timm", "as in timm", None, relative=True),
    "torch": Choice("torch.optim", "PyTorch's own Adafactor", 0.05),
    "adamw": Choice("torch.optim", "PyTorch's AdamW", 3e-3, attribute="AdamW"),
}


def parse(options: Sequence[str]) -> dict[str, Any]:
    """Turn texts NAME=VALUE into arguments: VALUE is a Python literal where it is one, else a string."""
    arguments: dict[str, Any] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"--option must be NAME=VALUE, got {option!r}")
        if name in arguments:
            raise InputError(f"--option {name} is given twice: the second time as {option!r}")
        try:
            arguments[name] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            arguments[name] = value
    return arguments


def build(name: str, parameters: Iterable[Parameter], lr: float | None, options: Sequence[str]) -> Optimizer:
    """Construct the optimizer called `name` over `parameters`.

    lr: the peak learning rate, or None for the optimizer's default here (which for those with relative steps is
    to choose their own). options: more constructor arguments, as texts NAME=VALUE. Raises InputError for an
    unknown name of either sort, and for whatever the constructor refuses.
    """
    if name not in CHOICES:
        raise InputError(f"--optimizer must be one of {', '.join(CHOICES)}, got {name!r}")
    choice = CHOICES[name]
    constructor = getattr(importlib.import_module(choice.module), choice.attribute)
    arguments = parse(options)
    known = [key for key in inspect.signature(constructor).parameters if key not in ("params", choice.lr_name)]
    for key in arguments:
        if key in ("lr", choice.lr_name):
            raise InputError(f"the learning rate is given with --lr, not with --option {key}=...")
        if key not in known:
            raise InputError(f"optimizer {name} has no option {key!r}; it has {', '.join(known)}")
    if "relative_step" in known:
        arguments.setdefault("relative_step", lr is None)
    if lr is None and not (choice.relative and arguments.get("relative_step", True)):
        lr = choice.lr
    if lr is not None:
        if choice.lr_name is None:
            raise InputError(f"optimizer {name} takes no --lr, got {lr}: its step size is its own")
        arguments[choice.lr_name] = lr
    try:
        optimizer = constructor(parameters, **arguments)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise _refusal(name, error) from error
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # RecursionError and the like are no word about the options
            raise
        raise _refusal(name, error) from error
    assert isinstance(optimizer, Optimizer)
    return optimizer


def _refusal(name: str, error: Exception) -> InputError:
    return InputError(f"optimizer {name} refuses its options: {str(error) or type(error).__name__}")


def try_out(
    name: str,
    lr: float | None,
    options: Sequence[str],
    dtype: torch.dtype = torch.float32,
    split: Callable[[Tensor], Tensor] = torch.clone,
) -> None:
    """Take one step on parameters of a dtype made for it: some options pass the constructor and fail only there.

    So do some optimizers where `split` makes sharded tensors. Raises InputError where `build` would, and where the step
    fails. May draw from PyTorch's generator.
    """
    shapes = ((64, 2), (64,))  # the ranks the model has, and rows for many processes
    parameters = [Parameter(split(torch.ones(shape, dtype=dtype))) for shape in shapes]
    optimizer = build(name, parameters, lr, options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    try:
        optimizer.step()
    except Exception as error:  # any: the step is known to work, so it is the options that break it
        if any(hasattr(parameter, "device_mesh") for parameter in parameters):
            raise InputError(f"optimizer {name} takes no step of shards with these options: {error}") from error
        raise _refusal(name, error) from error


def sets_own_steps(optimizer: Optimizer) -> bool:
    """Say whether the optimizer chooses its own step size, so that a scheduler would have no effect."""
    return isinstance(optimizer, BaseAdafactor) and optimizer.rule(optimizer.param_groups[0]).relative


def _bytes_here(value: Any) -> int:
    """Bytes of a tensor in this process: all, or those of its shard."""
    return int((value.to_local() if hasattr(value, "to_local") else value).nbytes)


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of all tensors the optimizer keeps between steps, in this process."""
    return sum(
        _bytes_here(value) for state in optimizer.state.values() for value in state.values() if hasattr(value, "nbytes")
    )


def adamw_state_bytes(parameters: Iterable[Parameter]) -> int:
    """Bytes AdamW would keep for these parameters in this process: two moments and a float32 step count for each."""
    return sum(2 * _bytes_here(parameter) + 4 for parameter in parameters)
