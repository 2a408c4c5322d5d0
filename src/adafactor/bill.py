"""What a sharded model costs each process, before there are any: bytes of memory, and bytes that a step sends.

What is sent is read off the very exchanges that send it (``exchange.py``), laid out for a mesh that exists in numbers
alone: nothing is allocated, and no process group is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any, NamedTuple

import torch

from . import checks, meeting, memory, sharding
from .exchange import Link, Peer, Segments
from .models import Weight
from .optimizer import BaseAdafactor
from .sharding import Place, Shards

_NAMES = ("replicas", "fsdp", "tensor")
_FSDP, _TENSOR = 1, 2


@dataclass(frozen=True)
class Mesh:
    """How processes share a model out: replicas of it, each over FSDP2's processes, each over tensor parallelism's.

    Attributes:
        ranks: all processes.
        tensor_parallel: neighbours that split layers between them.
        replicas: of the whole model (HSDP); FSDP2 shares each out over the rest.

    Raises:
        ValueError: they do not come out even.
    """

    ranks: int = 1
    tensor_parallel: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            checks.positive(field.name, getattr(self, field.name))
        each = self.tensor_parallel * self.replicas
        if self.ranks % each:
            raise ValueError(f"ranks should be a multiple of tensor_parallel x replicas = {each}, got {self.ranks}")

    @property
    def fsdp(self) -> int:
        """The processes that FSDP2 shares each parameter out over."""
        return self.ranks // (self.tensor_parallel * self.replicas)

    def places(self, rank: int) -> list[Place]:
        """Where a process is. Neighbours are of one group of tensor parallelism, replicas are furthest apart."""
        here = (
            rank // (self.fsdp * self.tensor_parallel),
            rank // self.tensor_parallel % self.fsdp,
            rank % self.tensor_parallel,
        )
        return list(map(Place, _NAMES, here, (self.replicas, self.fsdp, self.tensor_parallel)))


class Message(NamedTuple):
    """One all-reduce: the processes that take part, and the bytes that each has to be summed."""

    processes: int
    bytes: int

    @property
    def sent(self) -> int:
        """The bytes that each process sends, and receives: as a ring does it, 2 (N - 1) / N of them."""
        return round(2 * (self.processes - 1) * self.bytes / self.processes)


@dataclass(frozen=True)
class Bill:
    """What one process keeps and sends, in bytes. What it sends it also receives.

    Attributes:
        parameters: of its shards; their gradients take as many.
        state: of Adafactor's, by kind: R, C, V, m, compensation and step.
        adamw: what ``torch.optim.AdamW`` would keep: two tensors of the parameter's shape and dtype, and a step count.
        first: the collectives of a step's first round, all-reduces.
        second: those of its second round.
        gathers: what FSDP2 sends to gather parameters, in forward and again in backward: 2 (N - 1) shards.
        scatters: what it sends to reduce and scatter gradients: N - 1 shards.
        reduces: what HSDP sends to sum gradients over H replicas, as a ring does it: 2 (H - 1) / H of the shards.
    """

    parameters: int
    state: Mapping[str, int]
    adamw: int
    first: tuple[Message, ...]
    second: tuple[Message, ...]
    gathers: int
    scatters: int
    reduces: int

    @property
    def kept(self) -> int:
        """All of Adafactor's state."""
        return sum(self.state.values())

    @property
    def sent(self) -> int:
        """What a step of the optimizer sends."""
        return sum(message.sent for message in (*self.first, *self.second))

    @property
    def fsdp(self) -> int:
        """What FSDP2 sends in one forward and one backward."""
        return self.gathers + self.scatters + self.reduces

    @property
    def share(self) -> float | None:
        """What the optimizer sends, as a share of what FSDP2 does; None where that sends nothing."""
        return self.sent / self.fsdp if self.fsdp else None


def bill(
    weights: Iterable[Weight],
    mesh: Mesh = Mesh(),
    dialect: str | type[BaseAdafactor] = "torch",
    *,
    dtype: torch.dtype = torch.float32,
    communication: torch.dtype = torch.bfloat16,
    rank: int = 0,
    **options: Any,
) -> Bill:
    """What a model costs each process of a mesh.

    Tensor parallelism splits the dim that each weight says, FSDP2 the first dim of what that leaves. FSDP2's own
    traffic is that of one forward and one backward, each of which gathers every parameter.

    Args:
        weights: the model's, see ``adafactor.models``.
        mesh: how processes share it out; without one, a single process has all of it.
        dialect: the name of a module in ``adafactor.dialects``, or an optimizer class of this package.
        dtype: the parameters', their gradients', and that of AdamW's state.
        communication: what FSDP2 sends parameters and gradients in.
        rank: whose bill; where dims do not come out even, no process has more than the first.
        options: the arguments that the optimizer will get (``factor``, ``beta1``, ...).

    Raises:
        ValueError: there is no such dialect, it refuses the options, or a weight cannot be shared out so.

    >>> from adafactor.models import MODELS
    >>> found = bill(MODELS["llama-2-7b"].weights, Mesh(64))
    >>> found.kept < found.adamw / 100, len(found.first), len(found.second), found.share < 1e-3
    (True, 1, 1, True)
    """
    if not 0 <= rank < mesh.ranks:
        raise ValueError(f"rank should be one of the {mesh.ranks} ranks, from 0, got {rank}")
    weights = list(weights)
    params = [torch.empty(weight.shape, dtype=dtype, device="meta") for weight in weights]
    cls = memory.class_of(dialect)
    [group] = cls(params, **options).param_groups
    rule, factoring = cls.rule({**group, "lr": 0.0}), cls.factoring(group)
    places = mesh.places(rank)
    # FSDP2 pads all shards to the first one's size.
    padded = [place._replace(here=0) if i == _FSDP else place for i, place in enumerate(places)]
    state: Counter[str] = Counter()
    peers = []
    elements = sends = 0
    for weight, p in zip(weights, params, strict=True):
        shards = _shards(weight, places)
        plan = factoring.plan(weight.shape).shard(shards.shape, speaks=True)
        state.update(memory.kinds(plan, rule, cls.layout, dtype))
        elements += prod(shards.shape)
        sends += prod(_shards(weight, padded).shape)
        if shards.everywhere:
            peers.append(Peer(p, shards, plan, rule.form))
    # Of a process group that nothing is sent over only the number of its processes is known.
    cut = frozenset[str]().union(*(peer.shards.everywhere for peer in peers))
    links = {place.group: Link(place.size, "cpu") for place in places if place.group in cut}
    joined = {frozenset(_NAMES[_FSDP:]): Link(mesh.fsdp * mesh.tensor_parallel, "cpu")}
    exchanges = meeting.sort(peers, links, joined)
    shard = sends * communication.itemsize
    return Bill(
        parameters=elements * dtype.itemsize,
        state=dict(state),
        adamw=2 * elements * dtype.itemsize + memory.STEP_BYTES * len(weights),
        first=tuple(message for exchange in exchanges for message in _messages(exchange.first)),
        second=tuple(message for exchange in exchanges for message in _messages(exchange.second)),
        gathers=2 * (mesh.fsdp - 1) * shard,
        scatters=(mesh.fsdp - 1) * shard,
        reduces=Message(mesh.replicas, shard).sent,
    )


def _shards(weight: Weight, places: list[Place]) -> Shards:
    """How a weight is shared out, as it is where such places are."""
    order: list[list[int]] = [[] for _ in weight.shape]
    tensor = places[_TENSOR].size
    if weight.split is not None:
        if weight.heads is not None and weight.heads % tensor:
            raise ValueError(f"tensor_parallel should divide the {weight.heads} heads of {weight.name}, got {tensor}")
        order[weight.split].append(_TENSOR)
    if not weight.shape:
        raise ValueError(f"{weight.name} should have a dim that FSDP2 can share out, got a shape of ()")
    order[0].append(_FSDP)
    return sharding.cut(weight.shape, order, places)


def _messages(segments: Segments) -> list[Message]:
    return [Message(link.group, bytes_) for link, bytes_ in zip(segments.links, segments.sent, strict=True)]
