"""Gaps in the wall clock: downtimes and forward clock steps. Periods skip them.

A backward step makes no gap; older data is then retained longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TypeAlias

from msgspec import Struct

SHORTEST = timedelta(minutes=1)
"""Shortest stored gap: restarts and NTP corrections take seconds."""

Ago: TypeAlias = Callable[[timedelta], datetime]
"""The time this far back, excluding gaps."""


class TimeGap(Struct, frozen=True):
    ended_at: datetime
    length: timedelta
    is_downtime: bool
    """False if the server ran, but the clock was set or the machine slept."""


def ago(now: datetime, span: timedelta, gaps: Sequence[TimeGap]) -> datetime:
    """Return the time `span` before `now`, excluding gaps (oldest first).

    Gaps ending after `now` stem from a wrong clock and are skipped.
    """
    moment = now - span
    for gap in reversed(gaps):
        if gap.ended_at > now:
            continue
        if moment >= gap.ended_at:
            break
        moment -= gap.length
    return moment
