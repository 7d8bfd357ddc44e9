"""Deleting what is old, hour by hour: whether the last try has failed is told."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

import pytest

from tests.support.clocks import START, ManualClock
from trainmedic_server import errors, telemetry
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.ports.archive import RunArchive
from trainmedic_server.wiring.background import prune_for_ever

HOUR = timedelta(hours=1)


class FailingStore(InMemoryStore):
    """Fails, or not, as it is told for each try, and keeps what the gauge said before it; then all ends."""

    def __init__(self, metrics: telemetry.Metrics, *outcomes: Exception | None) -> None:
        super().__init__()
        self._metrics, self._outcomes = metrics, list(outcomes)
        self.told: list[float | None] = []

    async def prune(self, older_than: datetime, archive: RunArchive | None = None) -> int:
        self.told.append(self._metrics.registry.get_sample_value("trainmedic_retention_failing"))
        if not self._outcomes:
            raise asyncio.CancelledError
        if outcome := self._outcomes.pop(0):
            raise outcome
        return 0


@pytest.mark.parametrize(
    "error", [errors.ArchiveUnavailable("away"), errors.StoreUnavailable("away"), KeyError("a bug")], ids=repr
)
async def test_a_metric_tells_from_a_try_that_fails_until_one_succeeds(error: Exception) -> None:
    """Whatever it was; of the errors of loops only those count that nobody expects."""
    metrics, clock = telemetry.Metrics(), ManualClock()
    store = FailingStore(metrics, None, error, error, None)
    with pytest.raises(asyncio.CancelledError):
        await prune_for_ever(store, clock, metrics, lambda: START)
    assert store.told == [0, 0, 1, 1, 0]
    assert clock.now() == START + timedelta(minutes=1) + 4 * HOUR
    counted = metrics.registry.get_sample_value("trainmedic_loop_errors_total", {"loop": "retention"})
    assert counted == (2 if isinstance(error, KeyError) else None)
