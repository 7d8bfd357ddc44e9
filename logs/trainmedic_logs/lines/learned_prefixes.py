"""Prefixes that nobody has listed, learned from the line that begins a traceback: what stands before it there stands
before each of its lines, but for the times in it. So tracebacks that pdsh, a logger or somebody's own script have
passed on are joined like others, and those of several hosts are kept apart. The same goes for the blanks before the
frame that Rich draws around a traceback, whose upper edge is read as the line that begins it.

A prefix counts for as long as its traceback is open, so other lines cost nothing and stay as they are.
"""

from __future__ import annotations

import re

from trainmedic_logs.lines.blocks import HEADING, TRACEBACK

_LONGEST = 160
_MOST = 64
_TIME = re.compile(r"\d{4}[-/]\d\d[-/]\d\d|\d\d:\d\d:\d\d(?:[.,]\d{1,9})?|\d{10}(?:\.\d{1,9})?")
_UPPER_EDGE = re.compile(rf"(.{{0,{_LONGEST}}}?)[╭┌+][─-]+ {re.escape(HEADING)} [─-]+[╮┐+]\s*")
_TABLE_MEMBER = re.compile(r"(?:^|\s)(?:traceback|msg) *: *\Z")
"""What a launcher's table of failures has before a traceback, and not before its other lines."""
_FRACTION = re.compile(r"[.,]\d{1,9}\Z")


class LearnedPrefixes:
    """The prefixes of one stream's open tracebacks."""

    def __init__(self) -> None:
        self._patterns: dict[str, re.Pattern[str]] = {}

    def split(self, text: str) -> tuple[str, str]:
        """The text without its prefix, and the key of the prefix; the text itself and nothing where it has none."""
        if edge := _UPPER_EDGE.fullmatch(text) if HEADING in text else None:
            return TRACEBACK, self._learn(edge[1]) if edge[1] else ""
        end = text.rstrip()
        if end.endswith(TRACEBACK) and end != TRACEBACK and len(end) - len(TRACEBACK) <= _LONGEST:
            prefix = end[: -len(TRACEBACK)]
            if prefix.strip(" +|") and "Exception Group" not in prefix and not _TABLE_MEMBER.search(prefix):
                return TRACEBACK, self._learn(prefix)
        for key, pattern in self._patterns.items():
            if match := pattern.match(text):
                return text[match.end() :], key
        return text, ""

    def forget(self, key: str) -> None:
        """The traceback with this prefix is whole."""
        self._patterns.pop(key, None)

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def _learn(self, prefix: str) -> str:
        """The key of a prefix: a pattern for it with any digits in the places of its times."""
        parts, at = [], 0
        for time in _TIME.finditer(prefix):
            parts += [re.escape(prefix[at : time.start()]), _digits(time[0])]
            at = time.end()
        # What ends a prefix may be left out before an empty line, whose blanks somebody has taken off.
        tail = prefix[at:]
        kept = tail.rstrip()
        key = "".join(parts) + re.escape(kept) + ("(?:" + re.escape(tail[len(kept) :]) + "|$)" if kept != tail else "")
        if key not in self._patterns and len(self._patterns) >= _MOST:
            self._patterns.pop(next(iter(self._patterns)))
        self._patterns[key] = re.compile(key)
        return key


def _digits(time: str) -> str:
    """A pattern for a time like this one; the fraction of a second may have another length, or be left out."""
    whole = _FRACTION.sub("", time)
    return re.sub(r"\d", r"\\d", re.escape(whole)) + r"(?:[.,]\d{1,9})?"
