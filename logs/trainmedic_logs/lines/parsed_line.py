from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from msgspec import Struct

from trainmedic_logs.domain.log_search import LogLevel
from trainmedic_logs.lines import kernel_text, line_times, prefixes, raw_text, times
from trainmedic_logs.lines.line import LONGEST
from trainmedic_logs.lines.line_times import Stated
from trainmedic_logs.lines.masks import MASK, masked
from trainmedic_logs.lines.records import record_of

_KEY_BEGINS, _KEY_ENDS = "-----BEGIN", "PRIVATE KEY-----"
_MOST_KEY_LINES = 200  # masked lines of a private key without an end; RSA keys of 8192 bits have 100

_GLOG = re.compile(r"\[?([EWFI])\d{4} \d\d:\d\d:\d\d\.\d")
_LEVEL_WORD = re.compile(
    r"\b(?:(?P<error>ERROR|CRITICAL|FATAL|Traceback \(most recent call last\):)|(?P<warning>WARNING|WARN)"
    r"|(?P<debug>DEBUG)|(?P<info>INFO))(?:\b|$)"
)
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?::|$)")
_WARNING = re.compile(r"\b[A-Z]\w*Warning: ")
_KERNEL = re.compile(r"<(\d{1,3})>|(\d{1,4}),\d{1,20},\d{1,20},[^;]{0,40};|kern +:([a-z]{3,6}) *:")
_KERNEL_NAMES = {"emerg": 0, "alert": 1, "crit": 2, "err": 3, "warn": 4, "notice": 5, "info": 6, "debug": 7}
_LEVEL_MEMBER = re.compile(r'"(?:level|levelname|log\.level|severity|lvl)" ?: ?"([A-Za-z]{1,10})"')
# Level names; others mean info.
_LEVELS_BY_NAME: Mapping[str, LogLevel] = {
    **dict.fromkeys(("error", "err", "critical", "fatal", "panic", "exception", "emergency", "alert"), LogLevel.ERROR),
    **dict.fromkeys(("warning", "warn"), LogLevel.WARNING),
    **dict.fromkeys(("debug", "trace"), LogLevel.DEBUG),
}
_BEGINNING = 200  # characters searched for a level
_LEVELS_OF_GLOG = {"E": LogLevel.ERROR, "F": LogLevel.ERROR, "W": LogLevel.WARNING, "I": LogLevel.INFO}


class ParsedLine(Struct, frozen=True):
    """Line without prefixes, not masked."""

    text: str
    at: datetime | None
    """UTC. None unless date and zone, or a kernel's time since boot, are stated."""
    level: LogLevel
    rank: int | None = None
    local_rank: int | None = None
    """From torchrun's prefix."""
    stated: Stated | None = None
    """If `at` is None: a time in another form, perhaps without zone or date."""


def parse(raw: bytes, source: str, booted_at: datetime, longest: int = LONGEST) -> ParsedLine | None:
    """Parse a line, keeping `longest` bytes. None for a continuation of a kernel record."""
    text, _ = raw_text.text_of(raw, longest)
    if source == "kernel":
        kernel = kernel_text.split(text, booted_at)
        if kernel.is_more:
            return None
        stated = line_times.stated(text) if kernel.at is None else None
        return ParsedLine(kernel.text, kernel.at, level_of_kernel(text), stated=stated)
    prefixed = prefixes.split(text, source)
    record = record_of(prefixed.text)
    at = prefixed.at or times.stated_by(prefixed.text, record)
    level = level_of(prefixed.text, record)
    stated = line_times.stated(prefixed.text) if at is None else None
    return ParsedLine(prefixed.text, at, level, prefixed.rank, prefixed.local_rank, stated)


class LineMask:
    """Masking of a stream, including multi-line private keys."""

    def __init__(self) -> None:
        self._key_lines = 0

    @property
    def is_in_key(self) -> bool:
        return self._key_lines > 0

    def of(self, text: str) -> str:
        """Mask the stream's next line."""
        is_of_key = self.is_in_key
        self.skip(text)
        return MASK if is_of_key else masked(text)

    def skip(self, text: str) -> None:
        """Follow a key through a line that is not shown."""
        if self._key_lines:
            self._key_lines = 0 if "-----END" in text else self._key_lines - 1
        elif _KEY_BEGINS in text and _KEY_ENDS in text and "-----END" not in text:
            self._key_lines = _MOST_KEY_LINES


def level_of(text: str, record: Mapping[str, Any] | None = None) -> LogLevel:
    if record is not None:
        named = next((record[name] for name in ("level", "levelname", "severity") if name in record), "")
        return _LEVELS_BY_NAME.get(str(named).lower(), LogLevel.INFO)
    if text.startswith("{") and (match := _LEVEL_MEMBER.search(text[:4096])):
        return _LEVELS_BY_NAME.get(match[1].lower(), LogLevel.INFO)
    beginning = text[:_BEGINNING]
    if match := _GLOG.match(beginning):
        return _LEVELS_OF_GLOG[match[1]]
    if match := _LEVEL_WORD.search(beginning):
        return LogLevel(str(match.lastgroup))
    if _EXCEPTION.match(beginning):
        return LogLevel.ERROR
    return LogLevel.WARNING if _WARNING.search(beginning) else LogLevel.INFO


def level_of_kernel(raw: str) -> LogLevel:
    """The prefix has the priority, 0 (emergency) to 7 (debug)."""
    match = _KERNEL.match(raw)
    if match is None:
        return LogLevel.INFO
    priority = _KERNEL_NAMES.get(match[3], 6) if match[3] else int(match[1] or match[2]) & 7
    if priority <= 3:
        return LogLevel.ERROR
    return {4: LogLevel.WARNING, 7: LogLevel.DEBUG}.get(priority, LogLevel.INFO)
