"""Line as rules see it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from trainmedic_logs.domain.finding import Origin, TimeSource

LONGEST = 8 * 1024
"""Bytes of a line for rules; `Line.is_cut` marks longer ones."""


class Line(NamedTuple):
    """Line, or joined block of lines such as a traceback. A tuple for speed. `text` is decoded with replacements,
    without colours, progress bar redraws and prefixes.
    """

    origin: Origin
    at: datetime
    """UTC."""
    text: str
    time_source: TimeSource = TimeSource.ARRIVAL
    place: int = 0
    """Byte offset in the stream, or another growing number; part of `Finding.id`."""
    number: int = 0
    """Line number in the stream (a block's first line) from 1; 0 if not counted."""
    record: Mapping[str, Any] | None = None
    """Members of a step or event line, named as in ``records``; else None."""
    is_cut: bool = False
    has_words: bool = False
    """The text states more than the record, so text rules are tried too."""
