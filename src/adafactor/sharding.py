"""How a parameter lies over processes: what of it is here, who has the rest, and where its state lies.

A DTensor says that, and keeps the state; the arithmetic runs on the tensors that are here, its local shards. What
processes tell each other between the sweeps is in ``exchange.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

T = TypeVar("T", Tensor, "Tensor | None")


class Place(NamedTuple):
    """Where a process is along one dim of a mesh: the group's name, its place in the group, and the group's size."""

    group: str
    here: int
    size: int


class Shards(NamedTuple):
    """A tensor that is shared out over processes, and what of it is here.

    Attributes:
        shape: of the shard that is here, which may be empty.
        starts: the place of its first element in the whole tensor, dim by dim.
        groups: for each dim of the tensor the names of the process groups that it is shared out over; groups of one
            process are left out.
        first: the names of the groups in which this process is the first.
    """

    shape: tuple[int, ...]
    starts: tuple[int, ...]
    groups: tuple[tuple[str, ...], ...]
    first: frozenset[str]

    def over(self, dims: Sequence[int]) -> frozenset[str]:
        """The groups that some of the dims are shared out over."""
        return frozenset(name for dim in dims for name in self.groups[dim])

    @property
    def everywhere(self) -> frozenset[str]:
        """The groups that the tensor is shared out over."""
        return self.over(range(len(self.groups)))


def is_distributed(x: Tensor) -> bool:
    """Whether a tensor is a DTensor. Costs nothing where there are none."""
    return hasattr(x, "device_mesh")


def is_shared(p: Tensor) -> bool:
    """Whether other processes have parts of a tensor that are not here. Of one without elements nobody has any."""
    if not is_distributed(p) or p.numel() == 0:
        return False
    mesh = _typed(p).device_mesh
    return any(mesh.size(i) > 1 and not each.is_replicate() for i, each in enumerate(_typed(p).placements))


def local(x: T) -> T:
    """The tensor that is here: a DTensor's local one, else the tensor itself."""
    # to_local() makes a new tensor at each call.
    here: Any = getattr(x, "_local_tensor", None)
    if here is None:
        return x
    # What a collective is still to bring has a type of its own.
    found: T = here if type(here) is Tensor or not hasattr(here, "wait") else here.wait()
    return found


def find(x: Tensor) -> Shards | None:
    """How a tensor is shared out; None where all of it is here, and of one without elements.

    Raises:
        ValueError: in a way that is not known here; the message goes on from the tensor's name.
    """
    if not is_distributed(x):
        return None
    x = _typed(x)
    mesh = x.device_mesh
    here = mesh.get_coordinate()
    if here is None:
        raise ValueError(f"should be on a mesh that this process is part of, got {mesh}")
    order: list[list[int]] = [[] for _ in x.shape]
    for i in reversed(range(mesh.ndim)):
        placement = x.placements[i]
        if placement.is_replicate():
            continue
        _check(placement)
        # To the inside of what it was applied after: a plain Shard is applied from left to right.
        before, factor = order[placement.dim], getattr(placement, "split_factor", 1)  # type: ignore[attr-defined]
        after = next((j for j in range(len(before) + 1) if prod(mesh.size(k) for k in before[:j]) == factor), None)
        if after is None:
            raise ValueError(f"should be placed by Shard and Replicate, got {x.placements} on {mesh}")
        before.insert(after, i)
    places = [Place(mesh.get_group(i).group_name, here[i], mesh.size(i)) for i in range(mesh.ndim)]
    shards = cut(x.shape, order, places)
    if shards.shape != tuple(local(x).shape):
        raise ValueError(
            f"should have a local shape of {shards.shape} here, as {x.placements} on {mesh} means it, got "
            f"{tuple(local(x).shape)}"
        )
    return shards if shards.everywhere and x.numel() > 0 else None


def cut(shape: Sequence[int], order: Sequence[Sequence[int]], places: Sequence[Place]) -> Shards:
    """How a tensor of a shape is shared out over a mesh.

    Args:
        shape: the whole tensor's.
        order: for each of its dims the mesh's dims that cut it, one after the other.
        places: where a process is along each of the mesh's dims.
    """
    ranges = [
        _range(size, [(places[i].here, places[i].size) for i in dims]) for size, dims in zip(shape, order, strict=True)
    ]
    return Shards(
        tuple(stop - start for start, stop in ranges),
        tuple(start for start, _ in ranges),
        tuple(tuple(places[i].group for i in dims if places[i].size > 1) for dims in order),
        frozenset(place.group for place in places if place.here == 0),
    )


def _range(size: int, cuts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The part of a dim that is left of it by cuts into so many pieces, of which the so-manyth is taken.

    >>> _range(7, [(1, 2)]), _range(7, [(1, 2), (1, 2)]), _range(5, [(3, 4)])
    ((4, 7), (6, 7), (5, 5))
    """
    start, stop = 0, size
    for place, count in cuts:
        piece = -(-(stop - start) // count)
        start, stop = min(start + place * piece, stop), min(start + (place + 1) * piece, stop)
    return start, stop


def _check(placement: Placement) -> None:
    if placement.is_partial():
        raise ValueError(
            f"should be placed by Shard and Replicate, got {placement}: redistribute it to Replicate() first"
        )
    if not hasattr(placement, "dim"):
        raise ValueError(f"should be placed by Shard and Replicate, got {placement}")


def describe(x: Tensor) -> tuple[Any, ...]:
    """What has to be the same of a tensor on all processes."""
    if not is_distributed(x):
        return (tuple(x.shape),)
    x = _typed(x)
    return tuple(x.shape), str(x.placements), tuple(x.device_mesh.shape), x.device_mesh.device_type


def told(x: Tensor) -> str:
    """How a tensor is placed, in words."""
    return f"{_typed(x).placements} on {_typed(x).device_mesh}" if is_distributed(x) else "whole"


def placements_of(x: Tensor) -> tuple[Placement, ...]:
    """The placements of a DTensor."""
    return _typed(x).placements


def is_placed_alike(x: Tensor, p: Tensor) -> bool:
    """Whether two tensors of a shape are shared out in the same way."""
    if not is_distributed(x) or not is_distributed(p):
        return is_distributed(x) == is_distributed(p)
    x, p = _typed(x), _typed(p)
    return x.placements == p.placements and x.device_mesh == p.device_mesh


def placements(p: Tensor, dims: Sequence[int | None]) -> tuple[Placement, ...]:
    """How a statistic of p lies: as p along the dims that it has of p's, and whole along the others.

    Args:
        p: a DTensor.
        dims: for each dim of the statistic the one of p's that it is, or None.
    """
    from torch.distributed.tensor import Replicate

    found: list[Placement] = []
    for placement in _typed(p).placements:
        dim = getattr(placement, "dim", None)
        if dim is None or dim not in dims:
            found.append(Replicate())
        elif hasattr(placement, "split_factor"):
            found.append(type(placement)(dims.index(dim), split_factor=placement.split_factor))  # type: ignore[call-arg]
        else:
            found.append(type(placement)(dims.index(dim)))  # type: ignore[call-arg]
    return tuple(found)


def like(p: Tensor, here: Tensor, dims: Sequence[int | None]) -> Tensor:
    """A statistic of p of which this is here; the tensor itself where p is no DTensor."""
    if not is_distributed(p):
        return here
    from torch.distributed.tensor import DTensor

    shape = torch.Size([1 if i is None else p.shape[i] for i in dims])
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    mesh = _typed(p).device_mesh
    return DTensor.from_local(here, mesh, placements(p, dims), run_check=False, shape=shape, stride=stride)


def lies_as(x: Tensor, p: Tensor, dims: Sequence[int | None]) -> bool:
    """Whether a tensor lies as a statistic of p has to."""
    if not is_distributed(p):
        return not is_distributed(x)
    if not is_distributed(x):
        return False
    x = _typed(x)
    return x.placements == placements(p, dims) and x.device_mesh == _typed(p).device_mesh


def part(x: Tensor, p: Tensor, dims: Sequence[int | None]) -> Tensor:
    """What is here of a statistic of p, of one that lies otherwise: whole, or over other processes.

    Every process has to call it where x is a DTensor that lies otherwise.
    """
    if lies_as(x, p, dims):
        return local(x)
    if is_distributed(x):
        x = _typed(x).full_tensor()
    shards = find(p)
    if shards is None:
        return x
    for dim, of in enumerate(dims):
        if of is not None:
            x = x.narrow(dim, shards.starts[of], shards.shape[of])
    return x


def _typed(x: Tensor) -> DTensor:
    found: DTensor = x  # type: ignore[assignment]
    return found


def process_groups(params: Sequence[Tensor], *, replicas: bool = False) -> dict[str, tuple[Any, str]]:
    """The process groups that tensors are shared out over, and the type of their devices; in the order they come in.

    Args:
        params: the tensors. Those that are placed in ways not known here count too.
        replicas: whether the groups that shards are replicated over count as well.
    """
    found: dict[str, tuple[Any, str]] = {}
    for p in params:
        if is_shared(p):
            mesh = _typed(p).device_mesh
            for i, placement in enumerate(_typed(p).placements):
                if mesh.size(i) > 1 and mesh.get_coordinate() is not None and (replicas or hasattr(placement, "dim")):
                    group = mesh.get_group(i)
                    found.setdefault(group.group_name, (group, mesh.device_type))
    return found


def ranks(p: Tensor, names: frozenset[str]) -> list[int]:
    """The ranks of all processes that are reached from here over groups of a DTensor's mesh."""
    mesh = _typed(p).device_mesh
    here = mesh.get_coordinate()
    assert here is not None
    free = [slice(None) if mesh.get_group(i).group_name in names else here[i] for i in range(mesh.ndim)]
    return sorted(mesh.mesh[tuple(free)].flatten().tolist())
