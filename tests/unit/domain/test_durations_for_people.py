"""Durations as people read them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from trainmedic_core import duration


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (timedelta(0), "0s"),
        (timedelta(milliseconds=400), "1s"),
        (timedelta(minutes=15, milliseconds=1), "15m1s"),
        (timedelta(hours=3, seconds=9), "3h9s"),
        (timedelta(days=2, hours=22, minutes=44, seconds=43, milliseconds=371), "2d22h45m"),
    ],
)
def test_a_duration_for_people_is_rounded_up(value: timedelta, written: str) -> None:
    """So that an alert which is a little older than 15m is not said to have begun 15m ago, over 15m."""
    assert duration.write_rounded(value) == written
