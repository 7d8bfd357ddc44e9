"""A bound on lines in the log that somebody else can bring about."""

from __future__ import annotations

from trainmedic.wire.log_limit import LogLimit


def test_the_number_of_lines_per_interval_is_limited() -> None:
    """The last of them is marked, so that it can state that others are left out."""
    now = 0.0
    limit = LogLimit(lines=2, seconds=60.0, clock=lambda: now)
    assert (limit.lets_through(), limit.is_last) == (True, False)
    assert (limit.lets_through(), limit.is_last) == (True, True)
    assert [limit.lets_through() for _ in range(100)] == [False] * 100
    now = 60.0
    assert limit.lets_through()
