"""The kernel's log as a source for a store. Overwritten lines are counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from trainmedic_agent.log_reading.kernel_log import KernelReader, with_plausible_time
from trainmedic_agent.log_reading.line_cutter import PlacedLine
from trainmedic_agent.log_shipping.entries import EntryMaker, ShippedLines, StoreEntry, UniqueTimes
from trainmedic_agent.log_shipping.ship_counters import LostReason, ShipCounters
from trainmedic_logs.domain.finding import Origin

KEY = "kernel"
_LIVE_SECONDS = 3.0  # lines read so soon after the last complete read are new


class ShippedKernel(ShippedLines):
    key = KEY

    def __init__(
        self,
        reader: KernelReader,
        origin: Origin,
        booted_at: datetime,
        oldest: timedelta,
        kept: Mapping[str, Any],
        counters: ShipCounters,
    ) -> None:
        super().__init__(kept)
        self.reader = reader
        self.origin = origin
        self._booted_at = booted_at
        self._maker = EntryMaker(origin, booted_at, oldest, UniqueTimes(kept))
        self._counters = counters
        self._raw: deque[PlacedLine] = deque()
        self._lost = 0  # overwritten lines that are counted already
        self._now = booted_at
        self._all_read_at: datetime | None = None  # last read without lines; None while old lines are read

    def poll(self, now: datetime) -> None:
        self._now = now

    def _next_entry(self) -> StoreEntry | None:
        return self._maker.entry(self._raw.popleft(), self._now, self._now)

    def place_json(self) -> Mapping[str, Any]:
        place = {**self.reader.place_json(), "boot": self.origin.generation}
        waiting = [entry.place for entry in self._unsent] + [number for number, _ in self._raw]
        if self._head is not None:
            waiting.append(self._head.place)
        if self._maker.key_place is not None:  # read it again from its start, to mask the rest
            waiting.append(self._maker.key_place)
        return {**place, "next": min(waiting), "cursor": ""} if waiting else place

    def _read(self) -> bool:
        placed = self.reader.read()
        self._counters.lost_lines.add(LostReason.OVERWRITTEN, self.reader.lost - self._lost)
        self._lost = self.reader.lost
        is_live = self._all_read_at is not None and (self._now - self._all_read_at).total_seconds() < _LIVE_SECONDS
        if is_live:
            since_boot = (self._now - self._booted_at).total_seconds()
            placed = [(place, with_plausible_time(raw, since_boot)) for place, raw in placed]
        self._raw.extend(placed)
        if not placed:
            self._all_read_at = self._now
        elif not is_live:
            self._all_read_at = None
        return bool(placed)
