"""Indexes of GPUs on their nodes, as agents last reported them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from trainmedic_core import gpu_names
from trainmedic_server.domain.topology import AgentTopology
from trainmedic_server.engine.shared_presences import SharedPresences
from trainmedic_server.errors import BusUnavailable
from trainmedic_server.ports.outside import Presence

_MOST = 400_000  # Entries. Beyond it, those of lost agents are dropped.


class GpuIndexes:
    def __init__(self, presences: SharedPresences) -> None:
        self._presences = presences
        self._read: Sequence[Presence] = ()
        self._known: Mapping[str, int] = {}

    def of(self, uuid: str) -> int | None:
        return self._known.get(gpu_names.uuid_key(uuid))

    async def refresh(self) -> None:
        """Keep the earlier indexes while Redis is unavailable."""
        try:
            agents = await self._presences.recent_agents()
        except BusUnavailable:
            return
        if agents is not self._read:  # the same list until the presences are read again
            self._known = await asyncio.to_thread(_indexes, agents, self._known)
            self._read = agents


def _indexes(agents: Sequence[Presence], earlier: Mapping[str, int]) -> Mapping[str, int]:
    topology = AgentTopology.of({agent.name: agent.details for agent in agents})
    cards = (card for cards in topology.gpus_by_node.values() for card in cards)
    newest = {gpu_names.uuid_key(card.uuid): card.index for card in cards if card.index is not None}
    return newest if len(earlier) + len(newest) > _MOST else {**earlier, **newest}
