"""Assembly of a stream's lines into blocks, each processed once, also across restarts.

An unfinished block is read again after a restart; the rules have seen the lines around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct

from trainmedic_agent.log_reading.budgets import NODE_ITSELF, BudgetOwner
from trainmedic_agent.log_reading.line_cutter import PlacedLine
from trainmedic_logs.domain.finding import MOST_AROUND, Excerpt, Origin
from trainmedic_logs.lines.assembly import LineAssembler
from trainmedic_logs.lines.line import LONGEST, Line
from trainmedic_logs.lines.masks import masked
from trainmedic_logs.lines.prefilter import Prefilter

BYTES_AROUND = 64 * 1024  # bytes searched on each side of a line for its excerpt


class PendingExcerpt(Struct, frozen=True):
    finding_id: str
    place: int
    update: str
    """The finding, encoded; empty if it is reported only once it has lasted."""
    due: float = 0.0
    """Monotonic time; 0 after a restart."""


class LineStream:
    def __init__(self, origin: Origin, booted_at: datetime | None, kept: Mapping[str, Any]) -> None:
        """`kept`: the earlier `to_json`, or empty. Raises TypeError, ValueError if invalid."""
        self.origin = origin
        self.owner: BudgetOwner = NODE_ITSELF
        self.excerpts = [
            PendingExcerpt(str(finding_id), int(place), str(update))
            for finding_id, place, update in kept.get("excerpts", ())
        ]
        self._assembler = LineAssembler(origin, booted_at)
        # Lines up to `_fed_to` were processed, except these of an unfinished block, until they are read again.
        self._held = {int(place) for place in kept.get("held", ())}
        self._fed_to = int(kept.get("fed_to", -1))

    def to_json(self) -> dict[str, Any]:
        return {
            "held": sorted({*self._held, *self._assembler.held_places}),
            "fed_to": self._fed_to,
            "excerpts": [[each.finding_id, each.place, each.update] for each in self.excerpts],
        }

    @property
    def oldest_place(self) -> int | None:
        """First line of unfinished blocks, if any."""
        return self._assembler.oldest_place

    def feed(self, placed: Sequence[PlacedLine], arrived: datetime, prefilter: Prefilter | None = None) -> list[Line]:
        """Return finished blocks. Lines excluded by `prefilter` may be missing."""
        fresh = [(place, raw) for place, raw in placed if place > self._fed_to or place in self._held]
        if self._held and placed:
            self._held = {place for place in self._held if place > placed[-1][0]}
        if not fresh:
            return []
        self._fed_to = max(self._fed_to, fresh[-1][0])
        return self._assembler.feed_many(fresh, arrived, prefilter)

    def flush(self, now: datetime | None) -> list[Line]:
        """Return blocks that have waited long enough, or all if `now` is None."""
        return self._assembler.flush(now)


def excerpt_of(before: Sequence[bytes], after: Sequence[bytes]) -> Excerpt | None:
    """Return masked lines around the first of `after`, if any."""
    if not after:
        return None
    kept = before[-MOST_AROUND:]
    lines = [_text(raw) for raw in (*kept, *after[: MOST_AROUND + 1])]
    # Masking joins lines of a key, so mark the finding's line to find it afterwards.
    lines[len(kept)] = f"\0{lines[len(kept)]}"
    safe_lines = masked("\n".join(lines)).split("\n")
    at = next((number for number, line in enumerate(safe_lines) if "\0" in line), 0)
    return Excerpt(tuple(line.replace("\0", "") for line in safe_lines), at).within()


def _text(raw: bytes) -> str:
    return raw[:LONGEST].decode("utf-8", "replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
