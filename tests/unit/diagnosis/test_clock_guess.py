"""Years of lines that state none."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from trainmedic_logs.diagnosis import clock_guess


@pytest.mark.parametrize(
    ("line", "written", "year"),
    [
        ("Jul  5 12:00:00 node-1 kernel: x", datetime(2026, 7, 5, 11, tzinfo=UTC), 2026),  # local time is ahead of UTC
        ("Jul  7 12:00:00 node-1 kernel: x", datetime(2026, 7, 5, 11, tzinfo=UTC), 2025),
        ("Dec 31 12:00:00 node-1 kernel: x", datetime(2026, 1, 1, 11, tzinfo=UTC), 2025),
        ("Jan  1 05:00:00 node-1 kernel: x", datetime(2025, 12, 31, 22, tzinfo=UTC), 2026),
        ("Dec 31 12:00:00 node-1 kernel: x", datetime(2025, 12, 31, 22, tzinfo=UTC), 2025),
    ],
)
def test_a_missing_year_is_the_latest_up_to_a_day_after_the_last_write(line: str, written: datetime, year: int) -> None:
    at = clock_guess.of_line(line.encode(), written)
    assert at is not None
    assert at.year == year


@pytest.mark.parametrize("line", ["license valid until 9999-12-31 23:59:59", "finishedAt: 0001-01-01T00:00:00Z"])
def test_a_date_that_means_never_is_no_time_of_its_line(line: str) -> None:
    """Every line after it would be as late, or as early."""
    assert clock_guess.of_line(line.encode(), datetime(2026, 7, 5, tzinfo=UTC)) is None


def test_a_missing_year_is_found_in_a_file_without_modification_time() -> None:
    """As of archives."""
    written = datetime(1970, 1, 1, tzinfo=UTC)
    lines = [b"Nov 30 10:00:00 gpu-01 kernel: a", b"Nov 30 10:00:05 gpu-01 kernel: b"]
    first, second = (clock_guess.of_line(line, written) for line in lines)
    assert first is not None
    assert second is not None
    assert (second - first).total_seconds() == 5
