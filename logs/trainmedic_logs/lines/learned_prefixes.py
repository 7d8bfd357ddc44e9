"""Unlisted prefixes (of pdsh, loggers, scripts), learned from a traceback's first line."""

from __future__ import annotations

import re

from trainmedic_logs.lines.blocks import HEADING, TRACEBACK

_LONGEST = 160  # characters of a prefix
_MOST_PREFIXES = 64
_TIME = re.compile(r"\d{4}[-/]\d\d[-/]\d\d|\d\d:\d\d:\d\d(?:[.,]\d{1,9})?|\d{10}(?:\.\d{1,9})?")
_RICH_FRAME = re.compile(rf"(.{{0,{_LONGEST}}}?)[╭┌+][─-]+ {re.escape(HEADING)} [─-]+[╮┐+]\s*")
# Number of a line, not of a rank: long, or filled with zeros
_LINE_NUMBER = re.compile(r"(?:\d{4,8}|0\d{2,8})(?=[ \t:|]+\Z)")
# Text before a traceback in torchrun's failure table.
_TABLE_MEMBER = re.compile(r"(?:^|\s)(?:traceback|msg) *: *\Z")
_FRACTION = re.compile(r"[.,]\d{1,9}\Z")


class LearnedPrefixes:
    """Prefixes of the stream's tracebacks, until `forget`."""

    def __init__(self) -> None:
        self._patterns: dict[str, re.Pattern[str]] = {}

    def split(self, text: str) -> tuple[str, str]:
        """Return the text without its prefix, and the prefix's key, "" without one."""
        if frame := _RICH_FRAME.fullmatch(text) if HEADING in text else None:
            return TRACEBACK, self._learn(frame[1]) if frame[1] else ""
        end = text.rstrip()
        if end.endswith(TRACEBACK) and end != TRACEBACK and len(end) - len(TRACEBACK) <= _LONGEST:
            prefix = end[: -len(TRACEBACK)]
            # " + |" and "Exception Group" belong to the traceback of an exception group.
            if prefix.strip(" +|") and "Exception Group" not in prefix and not _TABLE_MEMBER.search(prefix):
                return TRACEBACK, self._learn(prefix)
        for key, pattern in self._patterns.items():
            if match := pattern.match(text):
                return text[match.end() :], key
        return text, ""

    def forget(self, key: str) -> None:
        self._patterns.pop(key, None)

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def _learn(self, prefix: str) -> str:
        parts, at = [], 0
        if number := _LINE_NUMBER.match(prefix):
            parts, at = [r"\d{1,9}"], number.end()
        for time in _TIME.finditer(prefix, at):
            parts += [re.escape(prefix[at : time.start()]), _digits(time[0])]
            at = time.end()
        # Trailing blanks of the prefix may be stripped before an empty line.
        tail = prefix[at:]
        kept = tail.rstrip()
        key = "".join(parts) + re.escape(kept) + ("(?:" + re.escape(tail[len(kept) :]) + "|$)" if kept != tail else "")
        if key not in self._patterns and len(self._patterns) >= _MOST_PREFIXES:
            self._patterns.pop(next(iter(self._patterns)))
        self._patterns[key] = re.compile(key)
        return key


def _digits(time: str) -> str:
    whole = _FRACTION.sub("", time)
    return re.sub(r"\d", r"\\d", re.escape(whole)) + r"(?:[.,]\d{1,9})?"
