"""What the processes of an optimizer have agreed to exchange, from step to step; and how one stays out of a step.

A process that refuses a step still takes part in what the others wait for, and tells them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import sharding
from .exchange import Exchange, Link, Links, Peer, abstain, agree, find_links, leave, refused
from .rule import Form, Rule
from .shapes import Plan
from .state import arithmetic


class Proposal(NamedTuple):
    """What one process would exchange.

    Attributes:
        peers: its shards.
        links: the process groups that parameters are shared out over.
        everyone: those, and the ones that shards are replicated over.
        facts: what has to be the same on all processes.
        rules: of all groups, with their seeds, which have to be the same too. They change from step to step, so that it
            is only where something else is new that this is made sure of.
    """

    peers: list[Peer]
    links: Links
    everyone: Links
    facts: tuple[Any, ...]
    rules: Sequence[tuple[Rule, int]]

    @property
    def key(self) -> tuple[Any, ...]:
        """What may not change while exchanges are used again: how all lies here, too."""
        return self.facts, self.links, [(peer.shards, peer.p.device) for peer in self.peers]


def sort(peers: Sequence[Peer], links: Links, joined: Mapping[frozenset[str], Link] | None = None) -> list[Exchange]:
    """The exchanges of all shards: one for each dtype of the arithmetic and each device, of which the first leads.

    Where parameters are shared out and none takes part, there is still one, of the flags. See ``Exchange``.
    """
    sorts: dict[tuple[torch.dtype, torch.device], dict[int, Peer]] = {}
    for number, peer in enumerate(peers):
        sorts.setdefault((arithmetic(peer.p.dtype), peer.p.device), {})[number] = peer
    if links and not sorts:
        sorts = {(torch.float32, torch.device("cpu")): {}}
    return [
        Exchange(some, *each, links, leads=place == 0, joined=joined)
        for place, (each, some) in enumerate(sorts.items())
    ]


class Meeting:
    """What is agreed on. ``exchanges`` are empty where no tensor is shared out."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self._key: tuple[Any, ...] | None = None
        self._links: Links = {}
        self._proposal: Proposal | None = None
        # Groups of another one are gone.
        self._world: Any = None

    def propose(
        self,
        params: Sequence[Tensor],
        found: Sequence[tuple[Tensor, int, Plan, Form]],
        rules: Sequence[tuple[Rule, int]],
    ) -> None:
        """Look at what this process would exchange; nothing is sent.

        Args:
            params: all parameters of the optimizer.
            found: those that a step is for, with the number of its group, its plan and its form.
            rules: of all groups, with their seeds.
        """
        peers, facts = [], []
        for p, group, plan, form in found:
            shards = sharding.find(p)
            if shards is not None:
                peers.append(Peer(p, shards, plan.shard(shards.shape, speaks=True), form))
                facts.append((sharding.describe(p), p.dtype, p.device.type, group, plan, form))
        links, everyone = find_links(params), find_links(params, replicas=True)
        # Values on a device would be waited for.
        rules = [(replace(rule, lr=0.0) if isinstance(rule.lr, Tensor) else rule, seed) for rule, seed in rules]
        self._proposal = Proposal(peers, links, everyone, tuple(facts), rules)

    def agree(self) -> Sequence[Exchange]:
        """What is exchanged as proposed, once all processes have proposed the same. They all have to call it.

        Raises:
            RuntimeError: they have not, or one of them refuses the step.
        """
        assert self._proposal is not None
        proposal, self._proposal = self._proposal, None
        if proposal.key == self._key:
            return self.exchanges
        if self._is_standing():
            self._announce()
        if proposal.everyone:
            agree(proposal.everyone, (proposal.facts, proposal.rules))
            self._world = dist.group.WORLD
        self.exchanges, self._key = sort(proposal.peers, proposal.links), proposal.key
        self._links = proposal.links
        return self.exchanges

    def withdraw(self, params: Sequence[Tensor]) -> None:
        """Tell the others that this process refuses the step: those that it shares parameters with.

        Args:
            params: all parameters of the optimizer.
        """
        self._proposal = None
        if self._is_standing():
            abstain(self.exchanges, "stop")
            leave(self.exchanges)
        else:
            agree(find_links(params, replicas=True), (), stop=True)

    def _is_standing(self) -> bool:
        """Whether the others wait in an exchange that was agreed on."""
        if self.exchanges and self._world is not dist.group.WORLD:
            self.exchanges = []
        return bool(self.exchanges)

    def _announce(self) -> None:
        """Tell, in the round that the others may be in, that something is new, and make sure that it is everywhere."""
        abstain(self.exchanges, "new")
        lead = self.exchanges[0]
        if lead.count("stop"):
            leave(self.exchanges)
            raise refused()
        if lead.count("new") != prod(link.group.size() for link in self._links.values()):
            leave(self.exchanges)
            raise RuntimeError(
                "parameters and options of a sharded optimizer should change on all processes at the same step, got a "
                "change on some"
            )
