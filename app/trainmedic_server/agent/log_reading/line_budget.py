"""How many lines of one file the rules look at, so that a program which prints without end costs little."""

from __future__ import annotations

from trainmedic_server.agent.log_reading.line_cutter import PlacedLine

_SECONDS = 10.0
"""For so long a file may have saved up what it has not used."""
_ONE_IN = 100
"""Of the lines beyond the budget, each hundredth is looked at."""


class LineBudget:
    """Counts the lines of one file; `per_second` on the average of ten seconds, None for no bound."""

    def __init__(self, per_second: int | None) -> None:
        self._per_second = per_second
        self._left = (per_second or 0) * _SECONDS
        self._counted_at: float | None = None

    def within(self, lines: list[PlacedLine], now: float) -> list[PlacedLine]:
        """Those of the next lines that are to be looked at: all while there are few, then a sample. `now` in seconds,
        by a clock that is not set."""
        if self._per_second is None:
            return lines
        if self._counted_at is not None:
            saved = self._left + (now - self._counted_at) * self._per_second
            self._left = min(saved, self._per_second * _SECONDS)
        self._counted_at = now
        free = int(self._left)
        self._left -= min(free, len(lines))
        return lines if len(lines) <= free else [*lines[:free], *lines[free::_ONE_IN]]
