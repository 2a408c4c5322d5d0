"""What processes tell each other in a step: after the first sweep the sums of shards, after the second those of u^2.

Everything of one kind goes in one vector, in segments that are summed over some of the process groups. Groups are gone
through one after the other, so that a segment that is summed over two of them is in both vectors: a collective for each
group and round, however many parameters there are. Where all segments are summed over the same groups, it is one for
all of them.

Sizes follow from whole shapes, placements and options alone, never from what is here: all processes of a group have the
same. That they do is made sure of in a collective of its own, where anything of it is new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import sharding
from .rule import Form
from .shapes import Plan
from .sharding import Shards


class Link(NamedTuple):
    """A process group, and the type of the devices that it sends between."""

    group: Any
    device: str


Links = Mapping[str, Link]
"""Process groups by name, in the order in which all processes go through them."""


class Segments:
    """A vector in segments, each of which is summed over some process groups.

    Args:
        dtype, device: the vector's.
        order: the names of all groups, in the order in which they are gone through.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, order: Sequence[str]) -> None:
        self._dtype, self._device, self._order = dtype, device, list(order)
        self._wanted: list[tuple[frozenset[str], int]] = []
        self._route: list[tuple[Link, list[slice]]] = []
        self.starts: list[int] = []
        self.values = torch.zeros(0, dtype=dtype, device=device)

    def add(self, groups: frozenset[str], size: int) -> int:
        """Ask for a segment; returns its index in ``starts``."""
        self._wanted.append((groups, size))
        return len(self._wanted) - 1

    @property
    def wanted(self) -> set[frozenset[str]]:
        """The sets of groups that segments are summed over, those of size 0 too: sizes are this process's own."""
        return {groups for groups, _ in self._wanted if groups}

    @property
    def sets(self) -> list[frozenset[str]]:
        """The sets of groups that segments are summed over; those of one group follow each other if they can."""
        found = {groups for groups, size in self._wanted if groups and size > 0}
        return sorted(found, key=lambda groups: sorted(map(self._order.index, groups)))

    def place(self, links: Links, together: Link | None) -> None:
        """Give all segments their places, and the vector its memory.

        Args:
            links: the groups.
            together: one group for all processes of the set, where all segments are summed over the same.
        """
        runs: dict[frozenset[str], slice] = {}
        self.starts = [0] * len(self._wanted)
        end = 0
        # Those that are summed over no group come last.
        for groups in [*self.sets, frozenset[str]()]:
            start = end
            for i, (own, size) in enumerate(self._wanted):
                if own == groups:
                    self.starts[i] = end
                    end += size
            runs[groups] = slice(start, end)
        self.values = torch.zeros(end, dtype=self._dtype, device=self._device)
        if together is not None:
            # Of stacks there may be no slice here, nor on any other process of the group.
            self._route = [(together, [runs[groups] for groups in self.sets])] if self.sets else []
            return
        self._route = []
        for name in self._order:
            found: list[slice] = []
            for groups in self.sets:
                if name in groups:
                    run = runs[groups]
                    if found and found[-1].stop == run.start:
                        run = slice(found.pop().start, run.stop)
                    found.append(run)
            if found:
                self._route.append((links[name], found))

    def reduce(self) -> None:
        """Sum all segments over their groups."""
        for (group, device), runs in self._route:
            pieces = [self.values[run] for run in runs]
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            # The devices that a group sends between need not be where the parameters are.
            there = whole if whole.device.type == device else whole.to(device)
            dist.all_reduce(there, group=group)
            if there is not pieces[0]:
                torch._foreach_copy_(
                    pieces, list(torch.split(there.to(whole.device), [piece.numel() for piece in pieces]))
                )

    @property
    def links(self) -> list[Link]:
        """The process group of each collective."""
        return [link for link, _ in self._route]

    @property
    def sent(self) -> list[int]:
        """The bytes of each collective."""
        width = self.values.element_size()
        return [width * sum(run.stop - run.start for run in runs) for _, runs in self._route]


class Peer(NamedTuple):
    """A shard that takes part: its parameter, how that is shared out, the plan of what is here, and what it needs."""

    p: Tensor
    shards: Shards
    plan: Plan
    form: Form


class Sums(NamedTuple):
    """Where the sums of one shard are to be left, to be reduced; None where they need not be.

    rows, cols: in R's and C's shapes, with dims of 1. totals: [slices.., 2, matrices], see sweeps.Item.
    """

    rows: Tensor | None = None
    cols: Tensor | None = None
    totals: Tensor | None = None


class Spots(NamedTuple):
    """Where numbers of one shard are in the vector of the first round, and those of u^2 in that of the second.

    One of live, bad and g2 for the parameter; of p2 and u2 for each slice of it that is here.
    """

    live: int
    bad: int | None
    g2: int | None
    p2: list[int]
    u2: list[int]


FLAGS = ("bad", "overflow", "stop", "new")
"""What is told beside the tensors' own numbers: whether some gradient is not finite where that calls the whole step
off, whether a GradScaler has said so, whether a process refuses the step, and whether one has other parameters or
options than before."""


class Flags(NamedTuple):
    """What was told, as 0-d masks; None where it is known to be false."""

    bad: Tensor | None
    overflow: Tensor | None


class Exchange:
    """What is exchanged of the shards of one arithmetic dtype, on one type of device.

    Args:
        peers: the shards, by number.
        dtype: of the arithmetic.
        device: where the shards are.
        links: the process groups.
        leads: whether the flags of a step are in this one.
        joined: process groups that stand for several, by name, where they need not be made.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        peers: Mapping[int, Peer],
        dtype: torch.dtype,
        device: torch.device,
        links: Links,
        *,
        leads: bool = True,
        joined: Mapping[frozenset[str], Link] | None = None,
    ) -> None:
        # Not as inference tensors, which no later step could write to.
        self.first = Segments(dtype, device, list(links))
        self.second = Segments(dtype, device, list(links))
        flags = self.first.add(frozenset(links), len(FLAGS)) if leads else None
        asked = [self._ask(peer) for peer in peers.values()]
        for segments in (self.first, self.second):
            segments.place(links, _together(segments, list(peers.values()), links, joined or {}))
        self._flags = self.first.values[:0] if flags is None else self._view(flags, (len(FLAGS),))
        self.sums: dict[int, Sums] = {}
        self.spots: dict[int, Spots] = {}
        for (number, peer), (sums, numbers, slices) in zip(peers.items(), asked, strict=True):
            self.sums[number] = Sums(*(None if i is None else self._view(i, shape) for i, shape in sums))
            live, bad, g2 = (None if i is None else self.first.starts[i] for i in numbers)
            assert live is not None
            p2, u2 = (
                [] if i is None else list(range(each.starts[i], each.starts[i] + _slices(peer)))
                for each, i in zip((self.first, self.second), slices, strict=True)
            )
            self.spots[number] = Spots(live, bad, g2, p2, u2)

    def _ask(self, peer: Peer) -> tuple[list[Any], list[int | None], list[int | None]]:
        """Ask for one shard's segments."""
        _, shards, plan, form = peer
        add, dims = self.first.add, range(len(plan.shape))
        whole = shards.everywhere
        sums: list[tuple[int | None, tuple[int, ...]]] = []
        by_row, by_col = shards.over(plan.cols), shards.over(plan.rows)
        for groups, shape in ((by_row, plan.row_shape), (by_col, plan.col_shape)):
            sums.append((add(groups, prod(shape)) if groups else None, shape))
        count = _slices(peer)
        matrices = prod(shape for i, shape in enumerate(plan.shape) if i not in (*plan.rows, *plan.cols))
        totals = (*plan.shape[: plan.slices], 2, matrices // count if count else 0)
        sums.append((add(by_row | by_col, prod(totals)) if by_row else None, totals))
        numbers = [add(whole, 1), add(whole, 1) if form.skip else None, add(whole, 1) if form.clips else None]
        each = shards.over(dims[plan.slices :])
        return sums, numbers, [add(each, count) if form.scale else None, self.second.add(each, count)]

    def _view(self, index: int, shape: tuple[int, ...]) -> Tensor:
        start = self.first.starts[index]
        return self.first.values[start : start + prod(shape)].view(shape)

    @property
    def is_read(self) -> bool:
        """Whether the host reads the flags; on an accelerator it would wait for them."""
        return self._flags.device.type == "cpu"

    def tell(self, **marks: Tensor | bool | None) -> None:
        """Write flags; those that are not given are false."""
        self._flags.zero_()
        for name, mark in marks.items():
            if mark is not None:
                self._flags[FLAGS.index(name)] = mark

    def hear(self) -> Flags:
        """The flags of all processes.

        Raises:
            RuntimeError: one of them refuses the step, and the flags are read.
        """
        if not self.is_read:
            bad, *others = (self._flags != 0).unbind()
            return Flags(bad, torch.stack(others).any())
        bad, overflow, stop, new = (self._flags != 0).unbind()
        if stop or new:
            raise refused()
        return Flags(bad if bad else None, overflow if overflow else None)

    def count(self, flag: str) -> int:
        """How many processes have told a flag. Waits for the device."""
        return round(float(self._flags[FLAGS.index(flag)]))


def abstain(exchanges: Sequence[Exchange], flag: str) -> None:
    """Take part in the first round with nothing but a flag."""
    for exchange in exchanges:
        exchange.first.values.zero_()
    exchanges[0].tell(**{flag: True})
    for exchange in exchanges:
        exchange.first.reduce()


def leave(exchanges: Sequence[Exchange]) -> None:
    """Take part in what the others go on with, after the first round, where they have not read that one abstains."""
    if not exchanges[0].is_read:
        for exchange in exchanges:
            exchange.second.values.zero_()
            exchange.second.reduce()


def _slices(peer: Peer) -> int:
    return prod(peer.plan.shape[: peer.plan.slices])


def _together(
    segments: Segments, peers: Sequence[Peer], links: Links, joined: Mapping[frozenset[str], Link]
) -> Link | None:
    """The one group that all segments are summed over, where they are all summed over the same several."""
    wanted = segments.wanted
    if len(wanted) != 1 or len(min(wanted)) == 1:
        return None
    [names] = wanted
    p = next((peer.p for peer in peers if names <= peer.shards.everywhere), None)
    if names in joined or p is None:
        return joined.get(names)
    return Link(_joined(tuple(sharding.ranks(p, names)), dist.group.WORLD), links[min(names)].device)


@lru_cache(maxsize=64)
def _joined(ranks: tuple[int, ...], world: Any) -> Any:
    """A process group of so many processes, made once. All of them call it at once."""
    if len(ranks) == dist.get_world_size():
        return world
    return dist.new_group(list(ranks), use_local_synchronization=True)


def find_links(params: Sequence[Tensor], *, replicas: bool = False) -> Links:
    """The process groups that parameters are shared out over, in the order in which they come; and replicated over."""
    return {name: Link(*link) for name, link in sharding.process_groups(params, replicas=replicas).items()}


def agree(links: Links, facts: Any, *, stop: bool = False) -> None:
    """Make sure that all processes have the same facts. They all have to call it.

    Args:
        links: the process groups, of replicas too.
        facts: what has to be the same, as text can show it.
        stop: whether this process refuses the step; facts are not looked at then.

    Raises:
        RuntimeError: they have not, or one of them refuses.
    """
    from hashlib import sha256  # takes longer to import than all of this module

    digest = int.from_bytes(sha256(repr(facts).encode()).digest()[:7], "big")
    mine = [-1, -(1 << 60), 1] if stop else [digest, -digest, 0]
    told = torch.tensor(mine, dtype=torch.int64, device="cpu")
    for group, device in links.values():
        there = told.to(device)
        dist.all_reduce(there, op=dist.ReduceOp.MAX, group=group)
        told = there.to("cpu")
    most, least, stopped = told.tolist()
    if stop:
        return
    if stopped:
        raise refused()
    if most != -least:
        raise RuntimeError(
            "sharded parameters should have the same shapes, placements, order and options on all processes, got others"
        )


def refused() -> RuntimeError:
    """What a process raises that takes no step since another one refuses it."""
    return RuntimeError("the step should be refused by no process, got one that has: its own error says why")
