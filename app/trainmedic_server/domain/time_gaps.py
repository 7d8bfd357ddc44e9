"""Where the time of day went on and no server was at work: a downtime, or a clock that was set forward.

What is forgotten after a while, such as old runs, must not be forgotten because of that. So "ninety days ago" is
counted back over the gaps. A clock that is set back makes no gap: what was written before looks younger then than it
is, and is kept for longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TypeAlias

from msgspec import Struct

SHORTEST = timedelta(minutes=1)
"""Less is no gap: a restart takes some seconds, and NTP corrects some."""

Ago: TypeAlias = Callable[[timedelta], datetime]
"""Returns the moment that lies so much time back."""


class TimeGap(Struct, frozen=True):
    """A stretch of the time of day in which no server was at work."""

    ended_at: datetime
    """The first moment after it (aware UTC)."""
    length: timedelta
    """How far the time of day went in it."""
    is_downtime: bool
    """Whether no server ran, as far as is known; else the clock was set while one did, or the machine slept."""


def ago(now: datetime, span: timedelta, gaps: Sequence[TimeGap]) -> datetime:
    """The moment from which `span` has passed until `now`, apart from these gaps, which are given oldest first.

    A gap that ends after `now` belongs to a time that was wrong, and is passed over.
    """
    moment = now - span
    for gap in reversed(gaps):
        if gap.ended_at > now:
            continue
        if moment >= gap.ended_at:
            break
        moment -= gap.length
    return moment
