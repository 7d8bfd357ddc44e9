"""Results of a polled wait, and the time of its next look. In memory only."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec import Struct, field

_LATE = timedelta(minutes=2)  # A gap between looks that is longer than `every` plus this interrupts ``for``
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)  # begin of the grid of looks


class Look(Struct, frozen=True):
    """Call the action until its condition has held for `held_for`, or until the deadline; `once`: one call now."""

    key: tuple[str, int]  # of the step (`StepState.key`)
    action: str
    params: Mapping[str, Any]
    held_for: timedelta
    every: timedelta
    deadline: datetime
    once: bool = False


class Observed(Struct, frozen=True):
    holds: bool
    began: datetime
    ended: datetime
    why: str = ""  # error or missing data
    output: Mapping[str, Any] = field(default_factory=dict)


class Sight(Struct, frozen=True):
    """State of a polled condition. `holds` is None before the first result."""

    key: tuple[str, int]
    holds: bool | None = None
    since: datetime | None = None  # when it began to hold without interruption
    last: Observed | None = None

    def after(self, look: Look, observed: Observed) -> Sight:
        since: datetime | None = None
        if observed.holds:
            is_gap = self.last is None or observed.began - self.last.ended > look.every + _LATE
            is_set_back = self.since is not None and observed.began < self.since  # the clock
            since = observed.ended if self.since is None or is_gap or is_set_back else self.since
        return Sight(self.key, observed.holds, since, observed)

    def is_over(self, look: Look) -> bool:
        if self.since is None or self.last is None:
            return False
        return not look.held_for or self.last.began - self.since >= look.held_for

    def due(self, look: Look, now: datetime) -> datetime:
        """Return when to look next: on the condition's grid, and when ``for`` is over."""
        if self.last is None or look.once:
            return now
        grid = grid_time(look, self.last.began)
        return grid if self.since is None else min(grid, max(self.since + look.held_for, self.last.ended))

    @property
    def value(self) -> Any:
        # Only the output of ``prometheus.query`` has one.
        return self.last.output.get("compared") if self.last is not None else None


def grid_time(look: Look, after: datetime) -> datetime:
    """Return the next time for a look, the same for equal conditions, which share a request."""
    offset = look.every * ((zlib.crc32(f"{look.action} {sorted(look.params.items())}".encode()) % 1000) / 1000)
    passed = (after - _EPOCH - offset) // look.every
    return _EPOCH + offset + (passed + 1) * look.every
