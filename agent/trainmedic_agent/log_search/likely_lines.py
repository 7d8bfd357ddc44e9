"""Which of many lines are worth a closer look when a regular expression is looked for, before any of them is decoded.

The results are the same as without this selection, with the same times. A skipped line neither matches nor states a
time that bounds the time of a match.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from trainmedic_agent.log_reading.line_cutter import PlacedLine
from trainmedic_core.expressions.required_text import required_patterns
from trainmedic_logs.lines import raw_text
from trainmedic_logs.lines.prefilter import LineSearch

_KEY = "-----BEGIN"
_ESCAPED = rb"\{\"log\":\".*\\[^n]"
"""In a container's log of JSON, whose text stands there otherwise than it is searched."""


class LikelyLines:
    """Made for one regular expression."""

    def __init__(self, patterns: Sequence[bytes]) -> None:
        self._search = LineSearch([*patterns, _KEY.encode(), _ESCAPED])

    @classmethod
    def of(cls, grep: str) -> LikelyLines | None:
        """None where every line has to be looked at."""
        patterns = required_patterns(grep) if grep else None
        return cls(patterns) if patterns is not None else None

    def among(self, lines: Sequence[PlacedLine], states_time: Callable[[PlacedLine], bool]) -> Sequence[PlacedLine]:
        """Return the possible matches, with the last timed line before each and the first one after it. The first and
        the last timed lines of all are included, for the lines of the neighbouring pieces."""
        raws = [raw for _, raw in lines]
        suspects = self._search.suspects(raws)
        if any(_KEY in raw_text.text_of(raws[at])[0] for at in suspects):
            return lines  # the lines of a private key are masked, whatever is in them
        kept = set(suspects)
        states_time = cache(states_time)
        for after, until in zip([-1, *suspects], [*suspects, len(raws)], strict=True):
            kept.update(_first(range(until - 1, after, -1), lines, states_time))
            kept.update(_first(range(after + 1, until), lines, states_time))
        return [lines[at] for at in sorted(kept)]


def _first(positions: range, lines: Sequence[PlacedLine], states_time: Callable[[PlacedLine], bool]) -> list[int]:
    """Return the first position whose line states a time, if any."""
    return next(([at] for at in positions if states_time(lines[at])), [])
