"""What one physical line says, for people who search: its text, time, level and rank; and secrets that go over lines.

Rules see blocks of lines (``assembly``). Who uses it: searching the files of a node, and shipping them to a store.
"""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct

from trainmedic_logs.domain.log_search import LogLevel
from trainmedic_logs.lines import kernel_text, levels, line_times, prefixes, raw_text, times
from trainmedic_logs.lines.line import LONGEST
from trainmedic_logs.lines.line_times import Stated
from trainmedic_logs.lines.masks import MASK, masked
from trainmedic_logs.lines.records import record_of

_KEY_BEGINS, _KEY_ENDS = "-----BEGIN", "PRIVATE KEY-----"
_LONGEST_KEY = 200


class ToldLine(Struct, frozen=True):
    """A line without the prefixes of those who passed it on; not masked."""

    text: str
    at: datetime | None
    """The time that it says; None where it says none with date and zone."""
    level: LogLevel
    rank: int | None = None
    local_rank: int | None = None
    """The torchrun that passed it on has said so."""
    stated: Stated | None = None
    """The line's time if `at` is None: without a zone, or in a form that other numbers share."""


def told(raw: bytes, source: str, booted_at: datetime, longest: int = LONGEST) -> ToldLine | None:
    """What a line of a source says, of which `longest` bytes are kept; None for what is no line of its own: more about
    the last line of a kernel."""
    text, _ = raw_text.text_of(raw, longest)
    if source == "kernel":
        kernel = kernel_text.split(text, booted_at)
        if kernel.is_more:
            return None
        stated = line_times.stated(text) if kernel.at is None else None
        return ToldLine(kernel.text, kernel.at, levels.level_of_kernel(text), stated=stated)
    prefixed = prefixes.split(text, source)
    record = record_of(prefixed.text)
    at = prefixed.at or times.said_by(prefixed.text, record)
    level = levels.level_of(prefixed.text, record)
    stated = line_times.stated(prefixed.text) if at is None else None
    return ToldLine(prefixed.text, at, level, prefixed.rank, prefixed.local_rank, stated)


class LineMask:
    """Masks the lines of one stream. A private key goes over many lines: all of them are masked."""

    def __init__(self) -> None:
        self._key_lines = 0

    @property
    def is_in_key(self) -> bool:
        """Whether what comes next may be the rest of a key."""
        return self._key_lines > 0

    def of(self, text: str) -> str:
        """The next line, masked."""
        is_of_key = self.is_in_key
        self.skip(text)
        return MASK if is_of_key else masked(text)

    def skip(self, text: str) -> None:
        """Take the next line without masking it, because it is not shown."""
        if self._key_lines:
            self._key_lines = 0 if "-----END" in text else self._key_lines - 1
        elif _KEY_BEGINS in text and _KEY_ENDS in text and "-----END" not in text:
            self._key_lines = _LONGEST_KEY
