"""Background loops: a round that fails ends nothing, an outage is logged when it begins and when it is over."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta

import pytest
from structlog.testing import capture_logs

from trainmedic.wire.backoff import Backoff
from trainmedic_server import errors, telemetry
from trainmedic_server.engine import loops


class Rounds:
    """Does as told, round by round, and counts; the waits between are kept, and the last one ends it all."""

    def __init__(self, *outcomes: object) -> None:
        self._outcomes = list(outcomes)
        self.done = 0
        self.waits: list[float] = []

    async def work(self) -> object:
        self.done += 1
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def rest(self, seconds: float) -> None:
        self.waits.append(seconds)
        if not self._outcomes:
            raise asyncio.CancelledError

    async def run(self, retries: Backoff | None = None) -> telemetry.Metrics:
        metrics = telemetry.Metrics()
        with contextlib.suppress(asyncio.CancelledError):
            await loops.repeat(self.work, timedelta(seconds=7), "rounds", metrics, retries=retries, sleep=self.rest)
        return metrics


AWAY = errors.StoreUnavailable("away")


async def test_while_there_is_something_to_do_nobody_waits() -> None:
    """The next round comes at once after one that did something, and after the interval otherwise."""
    rounds = Rounds(3, 1, 0, None, 0)
    await rounds.run()
    assert (rounds.done, rounds.waits) == (5, [7, 7, 7])


async def test_an_outage_is_logged_when_it_begins_and_when_it_is_over() -> None:
    """Once each, however long it lasts, and it is no unexpected error."""
    rounds = Rounds(AWAY, AWAY, AWAY, 0, 0)
    with capture_logs() as logs:
        metrics = await rounds.run()
    held_up, goes_on = logs
    assert (held_up["event"], held_up["error"]) == ("background loop delayed; retrying", "away")
    assert (goes_on["event"], goes_on["loop"]) == ("background loop recovered", "rounds")
    assert metrics.registry.get_sample_value("trainmedic_loop_errors_total", {"loop": "rounds"}) is None


async def test_an_unexpected_error_is_counted_each_time_and_ends_nothing() -> None:
    """Whatever one thing does, the next round comes."""
    rounds = Rounds(KeyError("a bug"), KeyError("a bug"), 0)
    with capture_logs() as logs:
        metrics = await rounds.run()
    assert rounds.done == 3
    assert [entry["log_level"] for entry in logs] == ["error", "error", "info"]
    assert metrics.registry.get_sample_value("trainmedic_loop_errors_total", {"loop": "rounds"}) == 2


@pytest.mark.parametrize("error", [AWAY, KeyError("a bug")], ids=["outage", "bug"])
async def test_retries_wait_longer_each_time_until_one_succeeds(error: Exception) -> None:
    """And from the first wait on again at the next outage."""
    rounds = Rounds(error, error, 0, error)
    with capture_logs():
        await rounds.run(Backoff(1, 60))
    assert rounds.waits == [1, 2, 7, 1]


async def test_whoever_gets_on_now_and_then_does_not_wait_longer_each_time() -> None:
    """Of much that waits some is done between two failures, so the next try is soon."""
    rounds = Rounds(AWAY, AWAY, 1, AWAY, 1, AWAY)
    with capture_logs():
        await rounds.run(Backoff(1, 60))
    assert rounds.waits == [1, 2, 1, 1]
