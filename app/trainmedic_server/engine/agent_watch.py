"""Detection of lost agents.

If an agent is lost while the server is down, its last report is the last recorded one.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from trainmedic_server import telemetry
from trainmedic_server.domain import agent_life
from trainmedic_server.domain.agent_life import AgentChanges, AgentLife
from trainmedic_server.domain.event_codec import recorded
from trainmedic_server.domain.event_kinds import AgentLost, AgentReturned
from trainmedic_server.domain.node_names import NodeNames
from trainmedic_server.engine import loops
from trainmedic_server.engine.absence_detection import AbsenceDetection
from trainmedic_server.errors import BusUnavailable
from trainmedic_server.ports.jobs import PresenceSource
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.store import RunStore, Transaction

LOOK_EVERY = timedelta(seconds=10)
_LATEST_LOOK = timedelta(seconds=30)  # A later check means that the server was stalled

log = telemetry.logger(__name__)


class AgentWatch:
    """``ago`` excludes downtimes; ``elapsed`` is a monotonic clock in seconds."""

    def __init__(
        self,
        source: PresenceSource,
        store: RunStore,
        clock: Clock,
        metrics: telemetry.Metrics,
        ago: Callable[[timedelta], datetime],
        elapsed: Callable[[], float] | None = None,
        retention: timedelta = agent_life.KEPT,
    ) -> None:
        self._source = source
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._ago = ago
        self._absences = AbsenceDetection(agent_life.LOST_AFTER, _LATEST_LOOK, elapsed)
        self._retention = retention  # of lost agents
        self._lives: dict[str, AgentLife] | None = None  # None before loading
        self._names = NodeNames()  # of all agents in `_lives`, also lost ones
        self._heard: dict[str, datetime] = {}  # last trusted presence since the server's start

    async def watch(self) -> None:
        await loops.repeat(self.look, LOOK_EVERY, "agents", self._metrics)

    def names(self) -> NodeNames:
        return self._names

    async def load(self) -> None:
        """Load the agents, for `names`. Raises StoreUnavailable."""
        await self._known_lives()

    async def _known_lives(self) -> dict[str, AgentLife]:
        if self._lives is None:
            self._lives = {life.name: life for life in await self._store.transact(lambda tx: tx.agents.all())}
            self._update_names()
        return self._lives

    def _update_names(self) -> None:
        if self._lives is not None and self._lives.keys() != self._names.names:
            self._names = NodeNames(frozenset(self._lives))

    async def look(self) -> None:
        """Raises BusUnavailable, StoreUnavailable."""
        lives, now = await self._known_lives(), self._clock.now()
        try:
            agents = await self._source.agents()
        except BusUnavailable:
            self._absences.forget()
            raise
        seen = {agent.name: agent.last_seen for agent in agents if agent.doubt is None}
        self._heard |= seen
        missing = self._absences.note([name for name in lives if name not in seen])
        heard = {name: self._heard.get(name, lives[name].seen_at) for name in missing}
        changes = agent_life.changes(lives, seen, heard, now, self._ago(self._retention))
        if changes.save or changes.forget:
            await self._store.transact(lambda tx: _store_changes(tx, changes, now))
        for life in changes.lost:
            log.warning("agent lost", node=life.name, last_heard=life.seen_at.isoformat())
        for name in changes.forget:
            del lives[name]
            self._heard.pop(name, None)
        lives |= {life.name: life for life in changes.save}
        self._update_names()
        since = self._ago(agent_life.KEPT)  # the metric drops lost agents sooner than the store does
        lost = (life for life in lives.values() if life.lost_at is not None and life.lost_at >= since)
        self._metrics.agents_lost.set(sum(1 for _ in lost))


def _store_changes(tx: Transaction, changes: AgentChanges, now: datetime) -> None:
    tx.agents.save(changes.save)
    tx.agents.forget(changes.forget)
    lost = [recorded(AgentLost(life.name, life.seen_at), now) for life in changes.lost]
    tx.append([*lost, *(recorded(AgentReturned(life.name), now) for life in changes.returned)])
