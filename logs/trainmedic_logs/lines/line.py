"""One line as rules see it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from trainmedic_logs.domain.finding import Origin, TimeSource

LONGEST = 8 * 1024
"""Bytes of a line that rules see; the rest is left out, and `Line.is_cut` says so."""


class Line(NamedTuple):
    """A line, or a block of lines that belong together, such as a traceback. A tuple, because one is made of each line
    that is read.

    `text` is UTF-8 that was read with replacements, without colours, without what redraws a progress bar, and without
    the prefixes of those who passed it on; of a block it has all lines, with line feeds between them.
    """

    origin: Origin
    at: datetime
    """Aware, UTC."""
    text: str
    time_source: TimeSource = TimeSource.ARRIVAL
    place: int = 0
    """Where in its stream it begins: a byte offset, or a number that only grows. `Finding.id` is made of it."""
    number: int = 0
    """Which line of its stream it is (of a block the first), counted from 1; 0 where nobody counts."""
    record: Mapping[str, Any] | None = None
    """What a line says that reports a step or an event, by the names of ``trainmedic_logs.lines.records``; None for
    every other line."""
    is_cut: bool = False
    has_words: bool = False
    """True if the text states more than the record. Then rules over text are tried on it too."""
