"""A log line as HTML. Everything is escaped, and invisible characters are shown as their code. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Self

from markupsafe import Markup
from msgspec import Struct

from trainmedic_core.expressions.regexes import SearchPattern
from trainmedic_core.plain_text import visible
from trainmedic_logs.domain.log_search import read_time
from trainmedic_logs.lines.raw_text import text_of

# In characters of a line.
LONGEST_SHOWN = 8000
FOLDED_FROM = 600
_BEFORE_FOLD = 300
_AROUND_MATCH = 100

_MOST_MATCHES = 50  # marked in a line
_LONGEST_NAME = 253
_LEAST_OF_FINDING = 6  # Shorter lines of a finding could match other lines
_MARK = Markup("<mark>{}</mark>")
_TIMES = {
    "guessed": "The line states no time. This is the time of the line before it, or of its file.",
    "arrival": "The line states no time. It arrived in its file at this time, or earlier.",
    "neighbours": "The line states no time. This is between the times of the lines before and after it.",
    "file": "No line of the file states a time. This is when the file was last written.",
}
"""Why a time is not the line's own, by the API's `time_source`."""
_OWN_TIME_SOURCES = (None, "line", "node_zone", "arrival_zone")  # None: not stated


class ShownLine(Struct, frozen=True):
    at: datetime
    text: str
    left_out: int = 0  # Omitted characters at its end
    node: str = ""
    source: str = ""
    file: str = ""
    level: str = ""
    rank: str = ""
    attempt: str = ""
    time_note: str = ""
    """Why its time is not its own, "" if the line states it."""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Raises ValueError if the document is not a line."""
        raw = document.get("line")
        if not isinstance(raw, str):
            raise ValueError("it has no line")
        kept = raw[:LONGEST_SHOWN]
        text, _ = text_of(kept.encode("utf-8", "replace"), 4 * LONGEST_SHOWN)
        return cls(
            at=read_time(document.get("at")),
            text=text,
            left_out=len(raw) - len(kept),
            node=_name(document.get("node")),
            source=_name(document.get("source")),
            file=_name(document.get("file") or document.get("stream")),
            level=_name(document.get("level")),
            rank=_name(document.get("rank")),
            attempt=_name(document.get("attempt")),
            time_note=_time_note(document),
        )

    def body(self, pattern: SearchPattern | None = None) -> Markup:
        return line_body(self.text, self.left_out, pattern)


def line_body(text: str, left_out: int = 0, pattern: SearchPattern | None = None) -> Markup:
    """Fold a long line to its beginning and first match. `left_out`: characters beyond `text`."""
    spans = _spans(text, pattern)
    whole = _marked(text, spans, 0, len(text))
    if len(text) <= FOLDED_FROM and not left_out:
        return whole
    first = next((span for span in spans if span[1] > _BEFORE_FOLD), None)
    brief = _marked(text, spans, 0, _BEFORE_FOLD)
    shown = min(_BEFORE_FOLD, len(text))
    if first is not None:
        begin, end = max(_BEFORE_FOLD, first[0] - _AROUND_MATCH), min(first[1] + _AROUND_MATCH, len(text))
        brief += Markup('<span class="dim"> … </span>') + _marked(text, spans, begin, end)
        shown += end - begin
    if left_out:
        whole += Markup('<span class="dim"> … and {} characters that this page does not show</span>').format(
            f"{left_out:,}"
        )
    more = Markup('<span class="dim"> … {} more characters</span>').format(f"{len(text) + left_out - shown:,}")
    return Markup('<details class="long"><summary>{}</summary>{}</details>').format(brief + more, whole)


def finding_of(line: ShownLine, findings: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    for finding in findings:
        text = str(finding.get("line") or "").strip()
        if len(text) >= _LEAST_OF_FINDING and text in line.text and line.node in (finding.get("nodes") or ()):
            return finding
    return None


def _spans(text: str, pattern: SearchPattern | None) -> list[tuple[int, int]]:
    """Return the matches in characters. The pattern works on bytes."""
    if pattern is None:
        return []
    data = text.encode("utf-8", "replace")
    spans, at, count = [], 0, 0
    for start, end in pattern.spans(data, _MOST_MATCHES):
        count += len(data[at:start].decode("utf-8", "replace"))
        length = len(data[start:end].decode("utf-8", "replace"))
        spans.append((count, count + length))
        at, count = end, count + length
    return spans


def _marked(text: str, spans: Iterable[tuple[int, int]], begin: int, end: int) -> Markup:
    pieces, at = [], begin
    for start, stop in spans:
        start, stop = max(start, begin), min(stop, end)
        if start >= stop:
            continue
        pieces += [Markup.escape(_plain(text[at:start])), _MARK.format(_plain(text[start:stop]))]
        at = stop
    return Markup("").join([*pieces, Markup.escape(_plain(text[at:end]))])


def _plain(text: str) -> str:
    return visible(text, keep="\t")


def _time_note(document: Mapping[str, Any]) -> str:
    known_by = document.get("time_source", document.get("clock"))
    if known_by in _OWN_TIME_SOURCES:
        return ""
    error = document.get("time_error")
    bound = f" It may be off by {error:g} s." if isinstance(error, int | float) and not isinstance(error, bool) else ""
    return _TIMES.get(_name(known_by), "The line does not state its time itself.") + bound


def _name(value: Any) -> str:
    return str(value)[:_LONGEST_NAME] if isinstance(value, str | int) and not isinstance(value, bool) else ""
