"""Periods that skip gaps in the wall clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from trainmedic_server.domain import time_gaps
from trainmedic_server.domain.time_gaps import TimeGap

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def test_a_period_longer_than_the_calendar_begins_in_1970() -> None:
    """Such as a cooldown of 3000y."""
    gap = TimeGap(NOW - timedelta(hours=1), timedelta(hours=2), is_downtime=True)
    assert time_gaps.ago(NOW, timedelta(hours=2), [gap]) == NOW - timedelta(hours=4)
    assert time_gaps.ago(NOW, timedelta(days=3000 * 365), [gap]) == datetime(1970, 1, 1, tzinfo=UTC)
