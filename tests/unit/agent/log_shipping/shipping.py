"""Shipping in virtual time, on real files, into the stand-in for Loki without a socket between.

Here: an `Agent` that is told when to look and to push, can be killed, and goes on from its database. Not here: HTTP
(``tests/integration/agent/test_log_shipping.py``).
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, Self

from starlette.testclient import TestClient

from tests.support.log_stores.loki_stand_in import LokiStandIn
from tests.unit.agent.log_reading.reading import NODE, policy_of
from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.journal import Journal
from trainmedic_agent.log_opening.node_files import NodeFiles
from trainmedic_agent.log_opening.own_files import OwnFiles
from trainmedic_agent.log_reading.discovery import Discovery
from trainmedic_agent.log_reading.log_store import NodeBoot
from trainmedic_agent.log_reading.reading_context import ReadingContext
from trainmedic_agent.log_shipping.entries import StoreEntry
from trainmedic_agent.log_shipping.shipper import LogShipping
from trainmedic_agent.log_shipping.store_push import Answer, Outcome, answer_of, body_of

HEADERS = {"Content-Type": "application/json", "Content-Encoding": "gzip"}


class PushIntoStandIn:
    """Pushes as `StorePush` does, by a call in place of a connection."""

    def __init__(self, store: LokiStandIn) -> None:
        self._client = TestClient(store.app)
        self.is_away = False
        self.pushes: list[int] = []
        """How many lines each had."""

    def push(self, entries: Sequence[StoreEntry]) -> Answer:
        self.pushes.append(len(entries))
        if self.is_away:
            return Answer(Outcome.LATER, "unavailable", "connection refused")
        answer = self._client.post("/loki/api/v1/push", content=gzip.compress(body_of(entries)), headers=HEADERS)
        return answer_of(answer.status_code, answer.text, len(entries), answer.headers.get("Retry-After"))

    def close(self) -> None:
        return


class Agent:
    """An agent's shipping, from the database in `state`. Its time begins `hours_ago`."""

    running: ClassVar[list[Self]] = []
    """Those that a test has not killed."""

    def __init__(
        self,
        state: Path,
        *,
        hours_ago: float = 0.0,
        kmsg: str = "/nowhere",
        pods_in: str = "/nowhere",
        opened_by: NodeFiles = OwnFiles(),
        **logs: Any,
    ) -> None:
        self._files = opened_by
        self.elapsed = 1000.0
        self.began = datetime.now(UTC) - timedelta(hours=hours_ago)
        self._pods_in = pods_in
        self.store = LokiStandIn()
        self.push = PushIntoStandIn(self.store)
        self._state = state
        self._kmsg = kmsg
        self.policy = policy_of(ship={"url": "http://loki:3100", **logs.pop("ship", {})}, **logs)
        self.start()

    def start(self) -> None:
        """A process begins, after the one before has gone."""
        self.journal = Journal(self._state)
        context = ReadingContext(NODE, self.journal, AgentCounters(), self.now)
        assert self.policy.ship is not None
        boot = NodeBoot(NODE, "boot-1", self.began)
        self.shipping = LogShipping(
            context,
            self.policy,
            self.policy.ship,
            boot,
            self.push,
            files=self._files,
            monotonic=lambda: self.elapsed,
            kmsg=self._kmsg,
        )
        self.discovery = Discovery(self.policy, NODE, self._pods_in, files=self._files)
        self.running.append(self)

    def kill(self) -> None:
        """The process is gone, with what it had in memory."""
        self.shipping._following.close()
        self.journal.close()
        self.running.remove(self)

    def now(self) -> datetime:
        return self.began + timedelta(seconds=self.elapsed - 1000.0)

    def look(self) -> None:
        self.shipping.take_scan(self.discovery.scan(self.shipping.known_keys, lambda: False))

    def step(self, seconds: float = 2.1) -> None:
        """So much later it looks for files, and pushes until nothing more is to be done at once."""
        self.elapsed += seconds
        self.look()
        idle = 0
        for _ in range(10_000):  # what was read before an outage goes first, and the rest after it
            idle = idle + 1 if self.shipping.round() >= 1.0 else 0
            if idle == 2:
                break

    def lost(self) -> dict[str, float]:
        """Lines and bytes that were lost, by reason."""
        return {
            sample.labels["reason"]: sample.value
            for family in self.shipping.counters.families()
            for sample in family.samples
            if "_lost_" in sample.name and sample.name.endswith("_total") and sample.value
        }

    def value(self, name: str, **labels: str) -> float:
        """Of a metric."""
        return next(
            sample.value
            for family in self.shipping.counters.families()
            for sample in family.samples
            if sample.name == f"trainmedic_agent_{name}" and labels.items() <= sample.labels.items()
        )
