"""Watching which agents are lost: outages, restarts of the server, and those that come back."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from datetime import timedelta

from trainmedic_server import telemetry
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.domain.agent_life import KEPT, LOST_AFTER
from trainmedic_server.engine.agent_watch import LOOK_EVERY, AgentWatch
from trainmedic_server.errors import BusUnavailable
from trainmedic_server.ports.outside import Presence
from trainmedic_server.simulation.virtual_time import VirtualClock

PATIENCE = LOST_AFTER + 2 * LOOK_EVERY


@dataclass
class Agents:
    """The agents that write their presence."""

    clock: VirtualClock
    there: set[str] = field(default_factory=set)
    is_away: bool = False

    async def agents(self) -> list[Presence]:
        if self.is_away:
            raise BusUnavailable("away")
        return [Presence(name, self.clock.now()) for name in sorted(self.there)]


class Watching:
    """A watch over agents in virtual time."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.redis = Agents(self.clock, {"node-1", "node-2"})
        self.store = InMemoryStore()
        self._began = self.clock.now()
        self.retention = KEPT
        self.begin()

    def begin(self) -> None:
        """Start a server on the same store."""
        self.metrics = telemetry.Metrics()
        clock = self.clock
        self.watch = AgentWatch(
            self.redis,
            self.store,
            clock,
            self.metrics,
            lambda span: clock.now() - span,
            lambda: (clock.now() - self._began).total_seconds(),
            retention=self.retention,
        )

    async def go_on(self, span: timedelta) -> None:
        for _ in range(round(span / LOOK_EVERY)):
            await self.clock.sleep_until(self.clock.now() + LOOK_EVERY)
            with contextlib.suppress(BusUnavailable):
                await self.watch.look()

    async def lost(self) -> list[str]:
        agents, _ = await self.store.lost(self.clock.now() - KEPT)
        return [life.name for life in agents]

    async def told(self) -> list[tuple[str, str]]:
        return [(event.kind, event.data["node"]) for event in await self.store.events_after(0, 100)]


async def test_an_agent_that_is_silent_for_a_minute_is_lost_since_it_was_heard_of() -> None:
    """Not when it was noticed; and it is lost no more when it is back."""
    watching = Watching()
    await watching.go_on(timedelta(minutes=2))
    heard = watching.clock.now()
    watching.redis.there.remove("node-2")
    await watching.go_on(LOST_AFTER / 2)
    assert await watching.lost() == []
    await watching.go_on(PATIENCE)
    [life], _ = await watching.store.lost(heard - KEPT)
    assert watching.metrics.registry.get_sample_value("trainmedic_agents_lost") == 1
    assert (life.name, life.seen_at) == ("node-2", heard)
    watching.redis.there.add("node-2")
    await watching.go_on(LOOK_EVERY)
    assert await watching.lost() == []
    assert watching.metrics.registry.get_sample_value("trainmedic_agents_lost") == 0
    assert await watching.told() == [("agent_lost", "node-2"), ("agent_returned", "node-2")]


async def test_one_that_goes_away_while_no_server_is_up_is_lost_too() -> None:
    """The new server knows from the store who was there."""
    watching = Watching()
    await watching.go_on(LOOK_EVERY)
    watching.redis.there.remove("node-1")
    watching.begin()
    await watching.go_on(PATIENCE)
    assert await watching.lost() == ["node-1"]
    watching.begin()
    await watching.go_on(LOOK_EVERY)
    assert await watching.lost() == ["node-1"]


async def test_while_redis_is_away_nobody_is_lost() -> None:
    """All vanish at once then, and none has gone."""
    watching = Watching()
    await watching.go_on(LOOK_EVERY)
    watching.redis.is_away = True
    await watching.go_on(2 * PATIENCE)
    watching.redis.is_away = False
    watching.redis.there.clear()
    await watching.go_on(LOST_AFTER / 2)
    assert await watching.lost() == []


async def test_it_is_forgotten_after_a_day() -> None:
    """An agent that was taken down for good is not shown for ever."""
    watching = Watching()
    await watching.go_on(LOOK_EVERY)
    watching.redis.there.remove("node-1")
    await watching.go_on(PATIENCE)
    await watching.clock.sleep_until(watching.clock.now() + KEPT)
    await watching.go_on(LOOK_EVERY)
    lives = await watching.store.transact(lambda tx: tx.agents.all())
    assert [life.name for life in lives] == ["node-2"]
    assert watching.watch._heard.keys() == {"node-2"}


async def test_a_node_whose_agent_is_gone_is_known_for_the_retention_and_after_a_restart() -> None:
    """As lost it is told for a day; its alerts are about a node that is known for longer."""
    w = Watching()
    w.retention = 3 * KEPT
    w.begin()
    await w.go_on(PATIENCE)
    w.redis.there.discard("node-2")
    await w.go_on(PATIENCE)
    assert w.metrics.agents_lost._value.get() == 1
    await w.clock.sleep_until(w.clock.now() + KEPT + LOST_AFTER)
    await w.go_on(LOOK_EVERY)
    assert (w.watch.names().names, w.metrics.agents_lost._value.get()) == ({"node-1", "node-2"}, 0)
    w.begin()
    assert not w.watch.names().names
    await w.watch.load()
    assert w.watch.names().names == {"node-1", "node-2"}
    await w.clock.sleep_until(w.clock.now() + 3 * KEPT)
    await w.go_on(2 * LOOK_EVERY)
    assert w.watch.names().names == {"node-1"}
