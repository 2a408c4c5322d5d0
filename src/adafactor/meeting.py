"""What the processes of an optimizer have agreed to exchange, from step to step; and how one stays out of a step.

A process that refuses a step still takes part in what the others wait for, and tells them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import sharding
from .exchange import Exchange, Link, Links, Peer, agree, find_links
from .rule import Form
from .shapes import Plan
from .state import arithmetic


class Proposal(NamedTuple):
    """What one process would exchange. facts: what has to be the same on all of them; empty without shards."""

    peers: list[Peer]
    links: Links
    facts: tuple[Any, ...]


def sort(peers: Sequence[Peer], links: Links, joined: dict[frozenset[str], Link]) -> list[Exchange]:
    """The exchanges of all shards: one for each dtype of the arithmetic and each device. See ``Exchange``."""
    sorts: dict[tuple[torch.dtype, torch.device], dict[int, Peer]] = {}
    for number, peer in enumerate(peers):
        sorts.setdefault((arithmetic(peer.p.dtype), peer.p.device), {})[number] = peer
    return [Exchange(some, *each, links, joined) for each, some in sorts.items()]


class Meeting:
    """What is agreed on. ``exchanges`` are empty where no tensor is shared out."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self._facts: tuple[Any, ...] = ()
        self._proposal: Proposal | None = None
        self._joined: dict[frozenset[str], Link] = {}

    def propose(self, params: Sequence[Tensor], found: Sequence[tuple[Tensor, int, Plan, Form]]) -> None:
        """Look at what this process would exchange; nothing is sent.

        Args:
            params: all parameters of the optimizer.
            found: those that a step is for, with the number of its group, its plan and its form.
        """
        peers, facts = [], []
        for p, group, plan, form in found:
            shards = sharding.find(p)
            if shards is not None:
                peers.append(Peer(p, shards, plan.shard(shards.shape, speaks=True), form))
                facts.append((sharding.describe(p), p.dtype, group, plan, form))
        self._proposal = Proposal(peers, find_links(params), tuple(facts))

    def agree(self) -> Sequence[Exchange]:
        """What is exchanged as proposed, once all processes have proposed the same. They all have to call it.

        Raises:
            RuntimeError: they have not, or one of them refuses the step.
        """
        assert self._proposal is not None
        (peers, links, facts), self._proposal = self._proposal, None
        if facts == self._facts:
            return self.exchanges
        agree(links, facts)
        self.exchanges = sort(peers, links, self._joined)
        self._facts = facts
        return self.exchanges

    def withdraw(self, params: Sequence[Tensor]) -> None:
        """Tell the others that this process refuses the step, wherever they wait for it.

        Args:
            params: all parameters of the optimizer.
        """
        is_new = self._proposal is not None and self._proposal.facts != self._facts
        self._proposal = None
        if self.exchanges and not is_new:
            for exchange in self.exchanges:
                exchange.withdraw()
        else:
            agree(find_links(params), (), stop=True)
