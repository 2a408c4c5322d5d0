"""The optimizers `adafactor train` knows by name, and how their arguments are given as text."""

import ast
import importlib
import inspect
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch.nn import Parameter
from torch.optim import Optimizer

from .errors import InputError


class Choice(NamedTuple):
    """Where an optimizer is found, what it is, and the peak learning rate it gets where none is given.

    With `relative`, it sets its own step size unless it is given one; `lr` is then used with relative_step=False only.
    """

    module: str
    attribute: str
    about: str
    lr: float
    relative: bool = False


CHOICES = {
    "adafactor": Choice("adafactor", "Adafactor", "this library's, as in torch.optim", 0.05),
    "towhee": Choice("adafactor.dialects.towhee", "Adafactor", "this library's, as in towhee", 0.05, relative=True),
    "transformers": Choice(
        "adafactor.dialects.transformers", "Adafactor", "this library's, as in transformers", 0.05, relative=True
    ),
    "torch": Choice("torch.optim", "Adafactor", "PyTorch's own Adafactor", 0.05),
    "adamw": Choice("torch.optim", "AdamW", "PyTorch's AdamW", 3e-3),
}


def parse(options: Sequence[str]) -> dict[str, Any]:
    """Turn texts NAME=VALUE into arguments: VALUE is a Python literal where it is one, else a string."""
    arguments: dict[str, Any] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"--option must be NAME=VALUE, got {option!r}")
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
    known = [key for key in inspect.signature(constructor).parameters if key not in ("params", "lr")]
    for key in arguments:
        if key == "lr":
            raise InputError("the learning rate is given with --lr, not with --option lr=...")
        if key not in known:
            raise InputError(f"optimizer {name} has no option {key!r}; it has {', '.join(known)}")
    if choice.relative:
        arguments.setdefault("relative_step", lr is None)
    if lr is None and not arguments.get("relative_step", False):
        lr = choice.lr
    try:
        optimizer = constructor(parameters, **arguments) if lr is None else constructor(parameters, lr=lr, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"optimizer {name} refuses its options: {error}") from error
    assert isinstance(optimizer, Optimizer)
    return optimizer


def sets_own_steps(optimizer: Optimizer) -> bool:
    """Say whether the optimizer chooses its own step size, so that a scheduler would have no effect."""
    return bool(optimizer.defaults.get("relative_step", False))


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of all tensors the optimizer keeps between steps."""
    return sum(
        value.nbytes for state in optimizer.state.values() for value in state.values() if hasattr(value, "nbytes")
    )


def adamw_state_bytes(parameters: Iterable[Parameter]) -> int:
    """Bytes AdamW would keep for these parameters: two moments each, and a float32 step count per tensor."""
    return sum(2 * parameter.nbytes + 4 for parameter in parameters)
