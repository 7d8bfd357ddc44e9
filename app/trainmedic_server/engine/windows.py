"""Allowed times of a playbook (``only_during``)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime

from trainmedic_core import duration
from trainmedic_server.domain import cron
from trainmedic_server.domain.cron import CronWindow
from trainmedic_server.domain.upcoming import clock

WINDOW = "window"  # value of `Run.waiting_on`


def why_outside(windows: Sequence[CronWindow], now: datetime) -> str | None:
    """Return None inside a window, or if there is none."""
    if not windows or any(cron.holds_at(window, now) for window in windows):
        return None
    try:
        following = f"the next one opens at {clock(opens_at(windows, now))}"
    except ValueError:
        following = "none opens again"
    return f"the playbook may act only in its windows; {following}"


def opens_at(windows: Sequence[CronWindow], now: datetime) -> datetime:
    """Raises ValueError if none opens again."""
    times: list[datetime] = []
    for window in windows:
        with suppress(ValueError):
            times.append(cron.next_after(window.schedule, window.timezone, now))
    return min(times)


def could_act_since(windows: Sequence[CronWindow], begin: datetime, now: datetime) -> datetime:
    """Return `begin`, or if later, the first opening of the windows that are open now."""
    opened = [at for window in windows if (at := cron.opened_at(window, now)) is not None]
    return max(begin, min(opened)) if opened else begin


def sentences(windows: Sequence[CronWindow]) -> tuple[str, ...]:
    return tuple(f"only_during: {duration.write(each.duration)} from each {each}" for each in windows)
