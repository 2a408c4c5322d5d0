"""Where a backend is chosen, by the group's engine arguments. A user's choice is never replaced in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import checks, reference
from ..sweeps import Backend
from . import foreach


def check(group: Mapping[str, Any]) -> None:
    """Refuse engine arguments that cannot be honoured.

    Raises:
        ValueError: an argument is neither None, True nor False.
        RuntimeError: fused=True, which has no kernel yet.
    """
    for name in ("foreach", "fused"):
        if group.get(name) is not None:
            checks.flag(name, group[name])
    if group.get("fused"):
        raise RuntimeError("fused=True needs a compiled kernel, and there is none yet; use fused=None or fused=False")


def choose(group: Mapping[str, Any]) -> Backend:
    """Plain PyTorch tensor by tensor, which keeps memory low, or with foreach=True over all tensors at once."""
    return foreach if group.get("foreach") else reference
