"""Where a backend is chosen, by the group's engine arguments and by the tensor.

What a user asks for with True is never replaced by another. ADAFACTOR_BACKEND goes before a False.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from .. import checks, reference
from ..sweeps import Backend, Item, stacked
from . import cpu, foreach, kernel

VARIABLE = "ADAFACTOR_BACKEND"
"""The environment variable that forces a backend on all groups."""

BACKENDS: dict[str, Backend] = {"reference": reference, "foreach": foreach, "cpu": cpu}
"""All backends, by the names that ``ADAFACTOR_BACKEND`` takes and ``why`` gives."""


class Choice(NamedTuple):
    """What a group asks for: a backend, and whether another may stand in for tensors that it does not support."""

    name: str
    only: bool


class Unsupported(Exception):  # noqa: N818, caught where the parameter can be named
    """The backend that was asked for does not support a tensor."""


class Taken(NamedTuple):
    """What one parameter's step takes: its label, the name of the backend, and why not a faster one, if there is."""

    parameter: str
    backend: str
    reason: str | None


def check(group: Mapping[str, Any]) -> None:
    """Refuse engine arguments that cannot be honoured.

    Raises:
        ValueError: an argument is neither None, True nor False, or ADAFACTOR_BACKEND is unknown.
        RuntimeError: the compiled kernel is asked for, and there is none.
    """
    for name in ("foreach", "fused"):
        if group.get(name) is not None:
            checks.flag(name, group[name])
    if group.get("foreach") and group.get("fused"):
        raise ValueError("foreach and fused should not both be True, since each is a backend")
    forced = _forced()
    asked = "cpu" if group.get("fused") else "foreach" if group.get("foreach") else None
    if forced and asked and forced != asked:
        raise ValueError(
            f"{'fused' if asked == 'cpu' else 'foreach'}=True should agree with ADAFACTOR_BACKEND, got {forced}"
        )
    missing = kernel.missing()
    if missing and "cpu" in (forced, asked):
        argument = "ADAFACTOR_BACKEND=cpu" if forced else "fused=True"
        raise RuntimeError(f"{argument} needs the compiled kernel, and there is none: {missing}")


def choose(group: Mapping[str, Any]) -> Choice:
    """The compiled kernel where it supports the tensor, else plain PyTorch tensor by tensor, unless the group says.

    foreach=True is plain PyTorch over all tensors at once, which costs memory, so nobody gets it who does not ask.
    """
    forced = _forced()
    if forced:
        return Choice(forced, only=True)
    if group.get("foreach"):
        return Choice("foreach", only=True)
    if group.get("fused") is False:
        return Choice("reference", only=True)
    return Choice("cpu", only=bool(group.get("fused")))


def pick(choice: Choice, item: Item, *, shared: bool) -> tuple[str, str | None]:
    """The name of the backend that takes an item, and why it is not the one asked for.

    Args:
        choice: the group's.
        item: a parameter's; of a stack, the slices are looked at.
        shared: whether another parameter lies in the same memory.

    Raises:
        Unsupported: no other may stand in.
    """
    reason = None
    if item.plan.numel == 0:
        # A shard with nothing of the tensor may have some of its statistics.
        return "reference", None
    if choice.name == "cpu":
        # The kernel goes over all parameters at once.
        reason = "it shares memory with another parameter" if shared else None
        reason = reason or cpu.unsupported(next(iter(stacked(item)), item))
    if reason and choice.only:
        raise Unsupported(f"should suit the compiled kernel: {reason}")
    return ("reference", reason) if reason else (choice.name, None)


class Explains(Protocol):
    """An optimizer of this package."""

    def taken(self) -> list[Taken]:
        """See ``why``."""
        ...


def why(optimizer: Explains) -> list[Taken]:
    """What the next step of each parameter takes, and why not the compiled kernel where that is not asked against.

    Parameters without a gradient are taken to have one like themselves.
    """
    return optimizer.taken()


def _forced() -> str | None:
    name = os.environ.get(VARIABLE) or None
    if name is not None and name not in BACKENDS:
        raise ValueError(f"{VARIABLE} should be one of {', '.join(BACKENDS)}, got {name!r}")
    return name
