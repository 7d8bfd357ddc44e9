"""Line as rules see it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from trainmedic_logs.domain.finding import Origin, TimeSource

LONGEST = 8 * 1024
"""Bytes; `Line.is_cut` marks longer lines."""


class Line(NamedTuple):  # a tuple for speed
    """Line, or joined block such as a traceback.

    `text` is decoded, without colours, redraws and prefixes.
    """

    origin: Origin
    at: datetime
    """UTC."""
    text: str
    time_source: TimeSource = TimeSource.ARRIVAL
    place: int = 0
    """Byte offset in the stream, or another growing number."""
    number: int = 0
    """From 1; 0 if not counted."""
    record: Mapping[str, Any] | None = None
    """Members of a step or event line."""
    is_cut: bool = False
    has_words: bool = False
    """True if the text states more than the record."""
    group_rank: int | None = None
    """Rank, in a checkpoint's group, of a quoted exception."""
