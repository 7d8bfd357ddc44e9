"""Progress of a job after a sign of a failure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from trainmedic_server.engine.job_failure import Stepping

NOW = datetime(2026, 3, 5, tzinfo=UTC)


def test_steps_after_a_rollback_are_progress() -> None:
    """From the step to which it went, below the earlier largest one. A repeated report is none, nor is the rollback."""
    minute = timedelta(minutes=1)
    stepping = Stepping(1000, "a", NOW, minute).moved(500, "a", NOW + minute)
    assert stepping.since == NOW
    assert stepping.moved(500, "a", NOW + 2 * minute).since == NOW
    assert stepping.moved(501, "a", NOW + 2 * minute) == Stepping(501, "a", NOW + 2 * minute, 2 * minute)
