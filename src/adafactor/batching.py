"""What a step is for: the parameters that take part, what is here of them, and whether that is as it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backends, rounding, sharding
from .layouts import COMPENSATION, Layout
from .rounding import Counter
from .rule import Form
from .shapes import Factoring, Plan
from .sharding import Shards
from .state import State
from .sweeps import Columns, Item, broadcasting


class Setting(NamedTuple):
    """What of a group decides how its tensors are batched."""

    choice: backends.Choice
    factoring: Factoring
    form: Form
    momentum_dtype: torch.dtype | None
    seed: int


class Found(NamedTuple):
    """The parameters with gradients: how many each group has, and all of them in a row.

    Shards count where they may have a gradient on another process, with zeros where they have none here.

    p, grads: what is here of the parameters and their gradients. absent: which have no gradient here; or empty, none.
    placements: of gradients that are DTensors.
    labels: what tells apart parameters that are rounded with random bits: the name where there are names, else the
    place among all. None where all are rounded to the nearest.
    """

    counts: list[int]
    params: list[Tensor]
    p: list[Tensor]
    grads: list[Tensor]
    absent: list[bool]
    placements: list[Any]
    states: list[State | None]
    labels: list[str] | None

    @property
    def groups(self) -> list[int]:
        """The index of each parameter's group."""
        return [index for index, count in enumerate(self.counts) for _ in range(count)]


def find(groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, State], *, are_whole: bool = False) -> Found:
    """What a step is for.

    Args:
        groups, states: the optimizer's.
        are_whole: whether no parameter is known to be a DTensor, for less. Those that are then stand for themselves.
    """
    some = _has_gradient if are_whole else takes_part
    live = [list(filter(some, group["params"])) for group in groups]
    params: list[Tensor] = list(chain.from_iterable(live))
    labels = None
    if any(group.get("rounding", "nearest") != "nearest" for group in groups):
        labels = list(_labels(groups))
    here: Sequence[Tensor] = params
    grads: Sequence[Tensor | None] = [p.grad for p in params]
    absent: list[bool] = []
    placements: list[Any] = []
    if not are_whole:
        shown = [p if g is None else g for p, g in zip(params, grads, strict=True)]
        placements = [sharding.placements_of(x) for x in shown if sharding.is_distributed(x)]
        here, grads = list(map(sharding.local, params)), list(map(sharding.local, grads))
        absent = [g is None for g in grads]
        if any(absent):
            grads = _filled(grads, here)
    return Found(
        list(map(len, live)),
        params,
        list(here),
        list(grads),  # type: ignore[arg-type]  # none is None
        absent,
        placements,
        list(map(states.get, params)),
        labels,
    )


def takes_part(p: Tensor) -> bool:
    """Whether a step is for a parameter: it has a gradient, or is shared out, where another process may have one."""
    if p.requires_grad:
        return p.grad is not None or sharding.is_shared(p)
    return p.grad is not None and not sharding.is_shared(p)


def _has_gradient(p: Tensor) -> bool:
    return p.grad is not None


def _filled(grads: Sequence[Tensor | None], params: Sequence[Tensor]) -> list[Tensor]:
    """Gradients, with zeros for those that are missing: the same zeros for all of a dtype."""
    zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}
    for g, p in sorted(zip(grads, params, strict=True), key=lambda pair: -pair[1].numel()):
        if g is None:
            zeros.setdefault((p.dtype, p.device), torch.zeros(p.numel(), dtype=p.dtype, device=p.device))
    return [
        zeros[p.dtype, p.device][: p.numel()].view(p.shape) if g is None else g
        for g, p in zip(grads, params, strict=True)
    ]


def _labels(groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    place = 0
    for group in groups:
        names = group.get("param_names")
        for i, p in enumerate(group["params"]):
            if takes_part(p):
                yield names[i] if names else str(place + i)
        place += len(group["params"])


def item(p: Tensor, plan: Plan, own: Mapping[str, Any], form: Form, layout: Layout) -> Item:
    """What the next step of a parameter is for, with as much of its state as there is, and p for a missing gradient."""
    names = [layout.row, layout.col, None] if plan.factored else [None, None, layout.full]
    names.append(None if form.momentum is None else layout.momentum)
    names.append(COMPENSATION if form.rounding == "kahan" else None)
    held = [None if name is None else sharding.local(own.get(name)) for name in names]
    shards = sharding.find(p)
    at = _counter(0, plan, shards) if is_drawn(p, form) else None
    g = p if p.grad is None else p.grad
    return broadcasting(here(plan, shards), sharding.local(p), sharding.local(g), *held, None, None, None, at)


def here(plan: Plan, shards: Shards | None) -> Plan:
    """The plan of what is here of a tensor."""
    if shards is None:
        return plan
    return plan.shard(shards.shape, speaks=shards.over(plan.rows) <= shards.first)


def _counter(key: int, plan: Plan, shards: Shards | None) -> Counter:
    """Where the elements that are here of a tensor are among all draws."""
    at = rounding.counter(key, plan.shape)
    if shards is None:
        return at
    return at._replace(start=sum(i * step for i, step in zip(shards.starts, at.strides, strict=True)))


def is_drawn(p: Tensor, form: Form) -> bool:
    """Whether a parameter is rounded with random bits."""
    return form.rounding != "nearest" and p.dtype in rounding.LOW


def counters(
    found: Found, plans: Sequence[Plan], shards: Sequence[Shards | None], settings: Sequence[Setting]
) -> list[Counter | None]:
    """Where the elements of the parameters found are among all draws; None where they are rounded to the nearest."""
    ats: list[Counter | None] = [None] * len(plans)
    for i, (group, p) in enumerate(zip(found.groups, found.params, strict=True)):
        if is_drawn(p, settings[group].form) and found.labels is not None:
            ats[i] = _counter(rounding.key(settings[group].seed, found.labels[i]), plans[i], shards[i])
    return ats


def sharing(params: Sequence[Tensor]) -> set[int]:
    """The places of parameters on CPUs whose memory overlaps with that of another one."""
    spans = []
    for place, p in enumerate(params):
        if p.device.type == "cpu" and p.numel() > 0 and type(p) in (Tensor, torch.nn.Parameter):
            reach = 1 + sum((size - 1) * step for size, step in zip(p.shape, p.stride(), strict=True))
            spans.append((p.data_ptr(), p.data_ptr() + reach * p.element_size(), place))
    found: set[int] = set()
    end, last = 0, -1
    for start, stop, place in sorted(spans):
        # A parameter that was passed twice is one.
        if start < end and params[place] is not params[last]:
            found |= {place, last}
        if stop > end:
            end, last = stop, place
    return found


# Strides, dtype and bytes say what the shape of a dense tensor is, for less.
_dtype, _device, _bytes = map(attrgetter, ("dtype", "device", "nbytes"))


def facts(found: Found, columns: Columns, steps: Sequence[Tensor]) -> Iterator[Iterable[Any]]:
    """All that a step relies on, and that a user may change between two steps.

    Parameters and state are looked at less closely than gradients, which are new ones at every step. In columns, each
    to be looked at and let go of before the next: Python's garbage collector goes over all that are held at once.

    Raises:
        TypeError, RuntimeError: tensors have no addresses.
    """
    state = (columns.R, columns.C, columns.V, columns.m, columns.comp, steps)
    held = [x for column in state for x in column if x is not None]
    yield found.counts, len(held), found.labels, found.placements, backends.kernel.modes()
    yield map(id, found.params)
    yield map(id, held)
    yield map(Tensor.data_ptr, found.p)
    yield map(Tensor.data_ptr, held)
    yield map(_bytes, held)
    yield map(_dtype, found.p)
    yield map(_bytes, found.p)
    yield map(Tensor.stride, found.p)
    yield map(type, found.grads)
    yield map(_dtype, found.grads)
    yield map(_device, found.grads)
    yield map(_bytes, found.grads)
    yield map(Tensor.stride, found.grads)
    yield map(Tensor.is_neg, found.grads)
    yield map(backends.kernel.is_zerotensor, found.grads)


def known(found: Found, columns: Columns, steps: Sequence[Tensor]) -> list[list[Any]] | None:
    """The facts to compare later ones with; None where tensors have no addresses."""
    try:
        return list(map(list, facts(found, columns, steps)))
    except (TypeError, RuntimeError):
        return None
