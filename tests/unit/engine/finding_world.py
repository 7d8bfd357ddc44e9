"""A server's part that knows findings, without a server: a store in memory, and time that the test moves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any

from tests.support.clocks import ManualClock
from tests.support.findings import RULES, told
from trainmedic.wire import envelope
from trainmedic_logs.domain.finding import Finding
from trainmedic_logs.domain.finding_codec import FindingUpdate
from trainmedic_logs.domain.known_finding import KnownFinding
from trainmedic_server import telemetry
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine.finding_alert_sender import FindingAlertSender
from trainmedic_server.engine.finding_intake import FindingIntake
from trainmedic_server.engine.node_watch import NodeWatch
from trainmedic_server.errors import TemporaryFailure
from trainmedic_server.ports.findings import FindingFilter
from trainmedic_server.ports.outside import Presence


@dataclass
class PresencesInRedis:
    """Who is there."""

    clock: ManualClock
    job_details: dict[str, dict[str, Any]] = field(default_factory=dict)
    agent_details: dict[str, dict[str, Any]] = field(default_factory=dict)
    launchers_on: dict[str, str] = field(default_factory=dict)

    async def jobs(self) -> list[Presence]:
        return [Presence(name, self.clock.now(), details) for name, details in self.job_details.items()]

    async def agents(self) -> list[Presence]:
        return [Presence(name, self.clock.now(), details) for name, details in self.agent_details.items()]

    async def launchers(self) -> list[Presence]:
        return [Presence(job, self.clock.now(), {"node": node}) for job, node in self.launchers_on.items()]

    def notices(self) -> list[Any]:
        return []

    def discard_notices(self, entries: Iterable[bytes]) -> None:
        raise AssertionError("nobody here takes notices")


class TakingTeller:
    """Takes alerts, or refuses them."""

    def __init__(self) -> None:
        self.told: list[Alert] = []
        self.is_away = False

    async def tell(self, alerts: Iterable[Alert]) -> None:
        if self.is_away:
            raise TemporaryFailure("away")
        self.told += alerts


class FindingWorld:
    """A server's part that knows findings, with time that the test moves."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = InMemoryStore()
        self.metrics = telemetry.Metrics()
        self.presences = PresencesInRedis(self.clock)
        self.presences.job_details["llm-1"] = {
            "instance": envelope.new_id(int(self.clock.now().timestamp() * 1000) - 60_000),
            "step": 1,
            "placement": [{"rank": 0, "node": "node-1"}, {"rank": 1, "node": "node-2"}],
        }
        self.topology = Topology()
        self.rules = RULES
        self.taker = TakingTeller()
        self._ids = count(1)
        self.begin()

    @classmethod
    async def begun(cls) -> FindingWorld:
        """One that has looked who is there."""
        made = cls()
        await made.nodes.start()
        await made.nodes.look()
        return made

    def begin(self) -> None:
        """Have a new process of the server, on the same store."""
        self.nodes = NodeWatch(self.presences, self.store, self.clock, self.metrics)
        self.teller = FindingAlertSender(self.store, self.taker, self.clock, self.metrics, timedelta(minutes=1))
        self.intake = FindingIntake(
            self.store,
            lambda: self.rules,
            lambda: self.topology,
            self.nodes,
            self.clock,
            lambda span: self.clock.now() - span,
            self.metrics,
            lambda: f"{next(self._ids):04}",
            self.teller.touch,
        )

    async def tell(self, *updates: Finding | FindingUpdate) -> None:
        """Have nodes say this, each alone, and let the server do what follows at once."""
        for update in updates:
            await self.intake.take([update if isinstance(update, FindingUpdate) else told(update)])
        await self.tell_alerts()

    async def tell_alerts(self) -> None:
        while await self.teller.tell():
            pass

    async def pass_by(self, **span: float) -> None:
        self.clock.time += timedelta(**span)
        await self.nodes.look()
        await self.intake.check()
        await self.tell_alerts()

    async def findings(self) -> list[KnownFinding]:
        """The oldest first."""
        page, _ = await self.store.findings_page(FindingFilter(), 1000, None)
        return page[::-1]

    async def only(self) -> KnownFinding:
        [known] = await self.findings()
        return known

    def alerts(self) -> list[tuple[str, str]]:
        """Name and status of what was told, in order."""
        return [(alert.name, str(alert.status)) for alert in self.taker.told]
