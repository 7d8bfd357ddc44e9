"""Cron schedules and windows, over changes of the clock too."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from pydantic import ValidationError

from trainmedic_server.domain import cron
from trainmedic_server.domain.cron import CronWindow

BERLIN = "Europe/Berlin"


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def test_next_time_is_in_the_zone_and_after_the_instant() -> None:
    """02:00 in Berlin is 01:00 UTC in winter and 00:00 UTC in summer; the instant itself does not count."""
    assert cron.next_after("0 2 * * *", BERLIN, at("2026-01-10T12:00")) == at("2026-01-11T01:00")
    assert cron.next_after("0 2 * * *", BERLIN, at("2026-07-10T12:00")) == at("2026-07-11T00:00")
    assert cron.next_after("0 2 * * *", BERLIN, at("2026-01-11T01:00")) == at("2026-01-12T01:00")
    assert cron.next_after("0 2 * * 2", "UTC", at("2026-01-10T12:00")) == at("2026-01-13T02:00")


def test_skipped_time_comes_after_the_change_of_the_clock() -> None:
    """On 2026-03-29 the clock in Berlin goes from 02:00 to 03:00, which is 01:00 UTC."""
    assert cron.next_after("30 2 * * *", BERLIN, at("2026-03-28T12:00")) == at("2026-03-29T01:00")
    assert cron.next_after("30 2 * * *", BERLIN, at("2026-03-29T01:00")) == at("2026-03-30T00:30")


def test_repeated_time_comes_once() -> None:
    """On 2026-10-25 Berlin has 02:45 twice, at 00:45 and 01:45 UTC: only the first counts, asked in between too."""
    assert cron.next_after("45 2 * * *", BERLIN, at("2026-10-25T00:00")) == at("2026-10-25T00:45")
    for asked in ("2026-10-25T00:45", "2026-10-25T01:30", "2026-10-25T01:50"):
        assert cron.next_after("45 2 * * *", BERLIN, at(asked)) == at("2026-10-26T01:45")


def test_window_holds_from_its_start_until_its_end() -> None:
    window = CronWindow(schedule="0 22 * * 5", duration=timedelta(hours=4), timezone=BERLIN)
    assert not cron.holds_at(window, at("2026-01-09T20:59:59"))
    assert cron.holds_at(window, at("2026-01-09T21:00"))
    assert cron.holds_at(window, at("2026-01-10T00:59:59.999"))
    assert not cron.holds_at(window, at("2026-01-10T01:00"))


def test_window_longer_than_its_interval_is_always_open() -> None:
    window = CronWindow(schedule="0 * * * *", duration=timedelta(hours=2))
    assert all(cron.holds_at(window, at("2026-01-09T00:00") + timedelta(minutes=13 * n)) for n in range(200))
    for schedule in ("0 * * * *", "0 0 29 2 *"):  # one that opens before the year 1
        assert cron.holds_at(CronWindow(schedule=schedule, duration=timedelta(days=900_000)), at("2026-01-09T00:00"))


@pytest.mark.parametrize("zone", ["UTC", "America/Los_Angeles", "Pacific/Kiritimati"])
@pytest.mark.parametrize("schedule", ["0 2 * * *", "*/7 * * * *", "0 0 29 2 *"])
def test_windows_end_with_the_calendar(zone: str, schedule: str) -> None:
    """None opens before the year 1 or after 9999, in any zone."""
    for length in (timedelta(minutes=1), timedelta(days=900_000)):
        window = CronWindow(schedule=schedule, duration=length, timezone=zone)
        assert not cron.holds_at(window, at("0001-01-01T00:00"))
        assert cron.holds_at(window, at("9999-12-31T23:59:59")) == (length.days > 0)
    with pytest.raises(ValueError, match="never comes"):
        cron.next_after(schedule, zone, at("9999-12-31T23:59:59"))
    assert cron.next_after(schedule, zone, at("0001-01-01T00:00")) < at("0005-01-01T00:00")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"schedule": "@daily", "duration": "1h"}, "does not have the five fields"),
        ({"schedule": "0 0 2 * * 2", "duration": "1h"}, "does not have the five fields"),
        ({"schedule": "0 25 * * *", "duration": "1h"}, "bad hour"),
        ({"schedule": "0 0 30 2 *", "duration": "1h"}, "bad day-of-month"),
        ({"schedule": "0 2 * * 2", "duration": "0s"}, "greater than"),
        ({"schedule": "0 2 * * 2", "duration": "1h", "timezone": "Europe/Atlantis"}, "no time zone"),
        ({"schedule": "0 2 * * 2", "duration": "1h", "timezone": "../etc/passwd"}, "no time zone"),
        ({"schedule": "0 2 * * 2", "duration": "1h", "timezone": "Europe"}, "no time zone"),
    ],
)
def test_wrong_window_is_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        CronWindow.model_validate(given)
