"""A file whose lines are shipped, from the oldest that the store has not accepted."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Any

from msgspec.structs import asdict, replace

from trainmedic_agent.log_reading.followed_file import HALF_LINE_SECONDS, KnownFile, microseconds
from trainmedic_agent.log_reading.line_cutter import PlacedLine
from trainmedic_agent.log_reading.log_files import GrowingFile, ReadSizes
from trainmedic_agent.log_shipping.entries import (
    LONGEST_LINE,
    Arrivals,
    EntryMaker,
    ShippedLines,
    StoreEntry,
    UniqueTimes,
)
from trainmedic_agent.log_shipping.ship_counters import LostReason, ShipCounters
from trainmedic_agent.log_shipping.ship_positions import ShipPositions
from trainmedic_logs.domain.finding import Origin

SIZES = ReadSizes(piece=16 * 1024, longest=LONGEST_LINE)  # small pieces, because many files can have backlogs in memory
_MOST_PIECES = 64  # pieces read at once without a complete line
_HELD_SECONDS = 600.0  # seconds that a deleted file with a backlog may use disk space


class ShippedFile(ShippedLines):
    def __init__(
        self,
        file: GrowingFile,
        known: KnownFile,
        positions: ShipPositions,
        booted_at: datetime,
        oldest: timedelta,
        counters: ShipCounters,
    ) -> None:
        super().__init__(known.stream)
        self.file = file
        self.origin = replace(known.origin, generation=known.position.generation)
        self.maker = EntryMaker(self.origin, booted_at, oldest, UniqueTimes(known.stream))
        self._positions = positions
        self._counters = counters
        self._position = known.position
        self._arrivals = Arrivals()
        self._turn = 0  # number of truncations
        self._raw: deque[tuple[int, PlacedLine]] = deque()  # turn and line
        self._left_out = file.left_out  # skipped content from before the first start is not lost
        self._size = -1
        self._grown_at = self._polled_at = 0.0
        self._gone_at: float | None = None  # monotonic time when its deletion was seen
        self._is_turn_begun = True  # a line since the last truncation was taken, so `key_place` is of this content
        self._now = datetime.now(UTC)

    # --- called by ``files`` ---

    @property
    def key(self) -> str:
        return self.known().key

    @property
    def grown_at(self) -> float:
        """Monotonic time of the last new data; with a backlog the present, because quiet files are closed.

        A deleted file keeps its backlog for `_HELD_SECONDS`.
        """
        is_held_too_long = self._gone_at is not None and self._polled_at - self._gone_at > _HELD_SECONDS
        return self._polled_at if self.behind and not is_held_too_long else self._grown_at

    @property
    def behind(self) -> int:
        """Bytes that the store lacks."""
        oldest = self._oldest_place()
        return max(self.file.size - (self.file.offset if oldest is None else oldest), 0)

    def begin(self) -> None:
        self._positions.has_new_file = True

    def poll(self, now: datetime, monotonic: float) -> bool:
        if not self.file.look():
            self._restart(now)
            self.file.look()
        written_at = datetime.fromtimestamp(self.file.written_at, UTC) if self.file.written_at > 0 else now
        if self.file.size > self._size:
            self._arrivals.record(self.file.size, min(now, written_at) if self._polled_at == 0.0 else now)
            self._grown_at = monotonic
        self._size = self.file.size
        self._now, self._polled_at = now, monotonic
        if self._gone_at is None and self.file.link_count == 0:
            self._gone_at = monotonic
        quiet = monotonic - self._grown_at
        if quiet >= HALF_LINE_SECONDS and not self.file.has_more and self.file.has_unfinished_line:
            self._keep(self.file.take_unfinished_line())
        return False  # `head` reads

    def place_json(self) -> Mapping[str, Any]:
        self._position = self.file.position(self._oldest_place())
        return {"file": self._position.to_json(), "origin": asdict(self.origin)}

    def known(self) -> KnownFile:
        return KnownFile(self._position, self.origin, self.state())

    def has_origin(self, origin: Origin) -> bool:
        return replace(origin, stream=self.origin.stream, generation=self.origin.generation) == self.origin

    def change_origin(self, origin: Origin) -> None:
        self.origin = replace(origin, stream=self.origin.stream, generation=self.origin.generation)
        self.maker.set_origin(self.origin)

    def end(self, now: datetime) -> None:
        self._counters.lost_bytes.add(LostReason.DELETED, max(self.file.size - self._unread_place(), 0))
        self.file.close()
        self._positions.forget(self.key)

    # --- called by ``shipper`` ---

    def _next_entry(self) -> StoreEntry | None:
        turn, placed = self._raw.popleft()
        arrived = self._arrivals.of(placed[0], self._now) if turn == self._turn else self._now
        self._is_turn_begun = turn == self._turn
        return self.maker.entry(placed, arrived, self._now, turn)

    def _read(self) -> bool:
        for _ in range(_MOST_PIECES):
            if not self.file.has_more:
                return False
            self._keep(self.file.read())
            left_out = self.file.left_out - self._left_out
            self._left_out = self.file.left_out
            # One read drops at most two pieces of overlong lines; skipping ahead drops far more.
            is_long_line = left_out < SIZES.piece * 2
            self._counters.lost_bytes.add(LostReason.TOO_LARGE if is_long_line else LostReason.BEHIND, left_out)
            if self._raw:
                return True
        return False

    def _oldest_place(self) -> int | None:
        """Return where the store's lines end, since the last truncation. None if it has all lines read."""
        unsent = chain(self._unsent, filter(None, [self._head]))
        places = (entry.place for entry in unsent if entry.turn == self._turn)
        key_place = self.maker.key_place if self._is_turn_begun else None
        key_places = () if key_place is None else (key_place,)
        waiting = (place for turn, (place, _) in self._raw if turn == self._turn)
        return next(chain(places, key_places, waiting), None)

    def _unread_place(self) -> int:
        if self._head is not None:
            return self._head.place
        return self._raw[0][1][0] if self._raw else self.file.offset

    def _keep(self, placed: list[PlacedLine]) -> None:
        self._raw.extend((self._turn, line) for line in placed)

    def _restart(self, now: datetime) -> None:
        """Unread lines are lost."""
        self._counters.lost_bytes.add(LostReason.TRUNCATED, max(self.file.size - self.file.offset, 0))
        self._keep(self.file.take_unfinished_line())
        self._turn, self._is_turn_begun = self._turn + 1, False
        self._arrivals.forget()
        self._size = -1
        self._positions.forget(self.key)
        self.file.restart(microseconds(now))
        self._position = self.file.position(None)
        self.origin = replace(self.origin, generation=self._position.generation)
        self.maker.set_origin(self.origin)
