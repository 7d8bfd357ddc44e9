"""The reader's end of the link."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from tests.unit.agent.log_reading.reading import NODE, policy_of
from trainmedic_agent.log_link.frames import FrameStream
from trainmedic_agent.log_link.messages import (
    LARGEST_OF_AGENT,
    LARGEST_OF_READER,
    LogMetric,
    Ping,
    Pong,
    ReaderStatus,
    RulesNow,
    Welcome,
    encoded,
    reader_message,
)
from trainmedic_agent.log_link.reader_end import ReaderEnd
from trainmedic_agent.log_reading.log_store import NodeBoot

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Parts:
    """What reads, as far as it takes rules."""

    def __init__(self) -> None:
        self.rules: list[bytes] = []

    def take_rules(self, at: datetime, raw: bytes) -> None:
        self.rules.append(raw)

    def search(self, params: Mapping[str, Any], is_stopping: Any) -> Sequence[str]:
        raise AssertionError("nothing searches")

    def status(self) -> ReaderStatus:
        return ReaderStatus()

    def loop_errors(self) -> Mapping[str, int]:
        return {}

    def metrics(self) -> list[LogMetric]:
        return []


def test_rules_that_arrive_before_the_greeting_are_accepted() -> None:
    """The agent does not resend them, so the reader would otherwise find nothing until they change."""
    ours, theirs = socket.socketpair()
    agent, link = FrameStream(ours, LARGEST_OF_READER), ReaderEnd(FrameStream(theirs, LARGEST_OF_AGENT))
    parts = Parts()
    agent.send(encoded(RulesNow(NOW, b"first")))
    agent.send(encoded(Welcome(policy_of(roots=["/logs"]), NodeBoot(NODE, "boot-1", NOW))))
    assert link.wait_for_welcome().boot.node == NODE
    link.serve(parts)
    agent.send(encoded(RulesNow(NOW, b"second")))
    agent.send(encoded(Ping(1)))
    assert isinstance(reader_message(agent.receive()), Pong)
    assert parts.rules == [b"first", b"second"]
    link.close()
    link.stream.release()
    agent.release()
