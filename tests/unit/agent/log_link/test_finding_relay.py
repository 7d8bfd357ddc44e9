"""What the agent signs of that which the reader hands it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.support.findings import RULES, of_training
from trainmedic.wire.findings import RulesNotice
from trainmedic.wire.signing import Signer
from trainmedic_agent.log_link.finding_relay import FindingRelay
from trainmedic_agent.log_link.messages import AgentMessage, FindingBatch, FindingsTaken, QueuedFinding
from trainmedic_agent.log_link.rule_news import RuleNews
from trainmedic_logs.domain import finding_codec
from trainmedic_logs.domain.finding_codec import FindingUpdate

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Pipeline:
    """Of Redis what the relay uses to send."""

    def __init__(self, taken: list[dict[Any, Any]]) -> None:
        self._taken = taken

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None: ...

    def xadd(self, _: str, fields: dict[Any, Any]) -> None:
        self._taken.append(fields)

    def execute(self) -> None: ...


class Redis:
    """A Redis with room for some entries."""

    def __init__(self, waiting: int) -> None:
        self.waiting = waiting
        self.notice: bytes | None = None
        self.taken: list[dict[Any, Any]] = []

    def time(self) -> tuple[int, int]:
        return 0, 0

    def get(self, _: str) -> bytes | None:
        return self.notice

    def getrange(self, *_: Any) -> bytes:
        return RULES.encode()

    def xlen(self, _: str) -> int:
        return self.waiting + len(self.taken)

    def pipeline(self, **_: Any) -> Pipeline:
        return Pipeline(self.taken)


class Relayed:
    """A relay, and what it says to the reader."""

    def __init__(self, waiting: int = 0, connection: Any = None) -> None:
        self.sends, self.accepts = threading.Event(), threading.Event()
        self.sent: list[AgentMessage] = []
        self.link_is_open = True
        self.redis: Any = Redis(waiting)
        signer = Signer.of(b"a key of the tests")
        self.relay = FindingRelay("n1", connection, signer, RuleNews("n1", signer), self._send, lambda: 0.0)
        self.relay.begin_generation(1)

    def told(self) -> list[AgentMessage]:
        """Return what the reader is told since the last call."""
        unsent = self.relay._unsent
        return [each[0] for _ in range(unsent.qsize()) if (each := unsent.get()) is not None]

    def _send(self, message: AgentMessage, _: int) -> bool:
        self.sends.set()
        self.accepts.wait(60)
        self.sent += [message] if self.link_is_open else []
        return self.link_is_open


class Connection:
    """A connection to Redis, with one turn at a time."""

    def __init__(self) -> None:
        self.redis: Any = None
        self.lock = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[Any]:
        with self.lock:
            yield self.redis

    def succeeded(self) -> None: ...
    def failed(self, error: BaseException) -> float:
        raise AssertionError from error

    def close(self) -> None: ...


def queued(number: int, node: str = "n1", stated: int | None = None) -> QueuedFinding:
    finding = of_training("cuda-oom", node, "llm-1", number, NOW)
    update = FindingUpdate(node, "instance", stated or number, finding)
    return QueuedFinding(number, finding_codec.encode(update))


def test_findings_are_signed_sent_and_acknowledged() -> None:
    relayed = Relayed()
    assert relayed.relay.offer(FindingBatch([queued(1), queued(2)]), 1)
    assert relayed.relay._relay_batch(relayed.redis)
    assert len(relayed.redis.taken) == 2
    assert relayed.told() == [FindingsTaken([1, 2])]


@pytest.mark.parametrize(
    "hostile", [queued(1, node="n2"), queued(1, stated=7), QueuedFinding(1, b"{}"), QueuedFinding(1, b"\xff")]
)
def test_only_findings_of_this_node_are_signed(hostile: QueuedFinding) -> None:
    """Others are dropped and acknowledged, so that the next ones are sent."""
    relayed = Relayed()
    assert relayed.relay.offer(FindingBatch([hostile, queued(2)]), 1)
    assert relayed.relay._relay_batch(relayed.redis)
    assert len(relayed.redis.taken) == 1
    assert relayed.told() == [FindingsTaken([1, 2])]


def test_findings_without_capacity_in_redis_wait() -> None:
    """The rest of the batch is sent when there is capacity; the reader keeps it until then."""
    relayed = Relayed(waiting=999)
    assert relayed.relay.offer(FindingBatch([queued(1), queued(2)]), 1)
    assert not relayed.relay._relay_batch(relayed.redis)
    assert relayed.told() == [FindingsTaken([1])]
    assert not relayed.relay.offer(FindingBatch([queued(3)]), 1)
    relayed.redis.waiting = 0
    assert relayed.relay._relay_batch(relayed.redis)
    assert relayed.told() == [FindingsTaken([2])]


def test_a_new_reader_does_not_inherit_the_previous_batch() -> None:
    """It offers the same findings again, with the same numbers."""
    relayed = Relayed()
    assert relayed.relay.offer(FindingBatch([queued(1)]), 1)
    relayed.relay.begin_generation(2)
    assert relayed.relay.offer(FindingBatch([queued(1)]), 2)


def test_a_reader_that_accepts_nothing_does_not_block_redis_access() -> None:
    """Commands arrive on the same connection."""
    connection = Connection()
    relayed = Relayed(connection=connection)
    connection.redis = relayed.redis
    relayed.relay.start()
    try:
        assert relayed.relay.offer(FindingBatch([queued(1)]), 1)
        assert relayed.sends.wait(60)
        assert connection.lock.acquire(timeout=30)
        connection.lock.release()
        assert not relayed.accepts.is_set()
    finally:
        relayed.accepts.set()
        relayed.relay.stop(60)
    assert len(relayed.redis.taken) == 1


def test_rules_that_no_reader_received_are_sent_again() -> None:
    """If a reader ends before it has the rules, its successor needs them."""
    relayed = Relayed()
    relayed.redis.notice = RulesNotice.of(RULES.encode(), NOW).encode("n1", Signer.of(b"a key of the tests"))
    relayed.accepts.set()
    for relayed.link_is_open in (False, True, True):
        relayed.relay._fetch_rules(relayed.redis, relayed.relay._rules_due)
        relayed.relay._unsent.put(None)
        relayed.relay._send_all()
    assert [type(message).__name__ for message in relayed.sent] == ["RulesNow"]
