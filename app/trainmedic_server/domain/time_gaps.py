"""Gaps in the wall clock: downtimes and forward clock steps. Periods skip them.

A backward step makes no gap; older data is then retained longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from msgspec import Struct

SHORTEST = timedelta(minutes=1)  # Shortest stored gap: restarts and NTP corrections take seconds

_EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)  # no data is older

Ago: TypeAlias = Callable[[timedelta], datetime]  # The time this far back, excluding gaps


class TimeGap(Struct, frozen=True):
    ended_at: datetime
    length: timedelta
    is_downtime: bool
    """False if the server ran, but the clock was set or the machine slept."""


def ago(now: datetime, span: timedelta, gaps: Sequence[TimeGap]) -> datetime:
    """Return the time `span` before `now`, excluding gaps (oldest first), 1970 at the earliest.

    Gaps ending after `now` stem from a wrong clock and are skipped.
    """
    moment = now - min(span, now - _EARLIEST)
    for gap in reversed(gaps):
        if gap.ended_at > now:
            continue
        if moment >= gap.ended_at:
            break
        moment -= min(gap.length, moment - _EARLIEST)
    return moment
