"""One stream of lines on its way to the rules: joined to blocks, and each given to them once, also after a restart.

A block that is not whole yet is read again after a restart. Of the lines from its first one on only those count that
were held back: the rules have seen the others already.
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

BYTES_AROUND = 64 * 1024
"""Bytes before a line, and from it on, in which the lines of its excerpt are looked for."""


class PendingExcerpt(Struct, frozen=True):
    """A finding that was sent without the lines around it, because those after it had not come."""

    finding_id: str
    place: int
    update: str
    """What was said of it first, as ``finding_codec`` writes it; empty where it is told once it has lasted."""
    due: float = 0.0
    """By the monotonic clock; at once after a restart."""


class LineStream:
    """What is kept of one stream between two of its lines."""

    def __init__(self, origin: Origin, booted_at: datetime | None, kept: Mapping[str, Any]) -> None:
        """`kept` is what `to_json` gave before a restart, or empty. Raises TypeError, ValueError for something else."""
        self.origin = origin
        self.owner: BudgetOwner = NODE_ITSELF
        """Whose budget its findings use."""
        self.excerpts = [
            PendingExcerpt(str(finding_id), int(place), str(update))
            for finding_id, place, update in kept.get("excerpts", ())
        ]
        self._assembler = LineAssembler(origin, booted_at)
        # Of the lines up to `_fed_to`, which a process before this one has fed, those that it held back.
        self._held = {int(place) for place in kept.get("held", ())}
        self._fed_to = int(kept.get("fed_to", -1))

    def to_json(self) -> dict[str, Any]:
        return {
            "held": sorted(self._assembler.held_places),
            "fed_to": self._fed_to,
            "excerpts": [[each.finding_id, each.place, each.update] for each in self.excerpts],
        }

    @property
    def oldest_place(self) -> int | None:
        """Where the oldest line begins that is held back."""
        return self._assembler.oldest_place

    def feed(self, placed: Sequence[PlacedLine], arrived: datetime, prefilter: Prefilter | None = None) -> list[Line]:
        """Take physical lines; return those that the rules are to see now. With a prefilter, not those that none of
        its rules can take."""
        fresh = [(place, raw) for place, raw in placed if place > self._fed_to or place in self._held]
        if not fresh:
            return []
        self._fed_to = max(self._fed_to, fresh[-1][0])
        return self._assembler.feed_many(fresh, arrived, prefilter)

    def flush(self, now: datetime | None) -> list[Line]:
        """The blocks that have waited for long enough; all where `now` is None, because nothing more comes."""
        return self._assembler.flush(now)


def excerpt_of(before: Sequence[bytes], after: Sequence[bytes]) -> Excerpt | None:
    """The excerpt of the lines before the finding's and of those from it on, masked."""
    if not after:
        return None
    kept = before[-MOST_AROUND:]
    lines = [_shown(raw) for raw in (*kept, *after[: MOST_AROUND + 1])]
    lines[len(kept)] = f"\0{lines[len(kept)]}"
    # Masked together, for a key is a secret of several lines. The finding's line is found again by its mark.
    together = masked("\n".join(lines)).split("\n")
    at = next((number for number, line in enumerate(together) if "\0" in line), 0)
    return Excerpt(tuple(line.replace("\0", "") for line in together), at).within()


def _shown(raw: bytes) -> str:
    return raw[:LONGEST].decode("utf-8", "replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
