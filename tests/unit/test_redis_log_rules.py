"""Log rules for agents that are not published."""

from __future__ import annotations

from typing import cast

from structlog.testing import capture_logs

from tests.support.clocks import ManualClock
from trainmedic.wire import findings as wire
from trainmedic_logs.lines.rule import RuleSet
from trainmedic_server.adapters.redis_log_rules import RedisLogRules
from trainmedic_server.telemetry import Metrics


class Rules:
    def __init__(self, size: int) -> None:
        self._size = size

    def encode(self) -> bytes:
        return b"x" * self._size


async def test_rules_that_are_too_large_are_reported_once() -> None:
    """They are looked at every second, and stay too large. Other ones are reported again."""
    rules = Rules(wire.LARGEST_RULES + 1)
    publisher = RedisLogRules(
        "redis://127.0.0.1:1", lambda: cast("RuleSet", rules), lambda: ["n1"], ManualClock(), Metrics()
    )
    with capture_logs() as logged:
        for _ in range(3):
            await publisher.publish()
        rules = Rules(wire.LARGEST_RULES + 2)
        await publisher.publish()
    await publisher.close()
    assert [entry["bytes"] - wire.LARGEST_RULES for entry in logged] == [1, 2]
