"""Rules that match a file's lines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from io import BufferedIOBase
from typing import Any, NamedTuple

from msgspec import Struct, field

from trainmedic.wire.envelope import write_time
from trainmedic_logs.domain.finding import Origin
from trainmedic_logs.domain.log_search import LogLevel
from trainmedic_logs.lines import kernel_text, parsed_line, raw_text, records
from trainmedic_logs.lines.assembly import LineAssembler
from trainmedic_logs.lines.line import LONGEST, Line
from trainmedic_logs.lines.matcher import LineMatch, LineMatcher
from trainmedic_logs.lines.rule import RuleSet


class LineExplanation(Struct, frozen=True):
    """Explanation of a physical line; a block's rule is at its first line."""

    number: int
    text: str
    """Whole block at its first line."""
    match: LineMatch
    level: LogLevel = LogLevel.INFO
    at: str | None = None
    """ISO 8601; None without a date."""
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        rule = self.match.rule
        return {
            "line": self.number,
            "level": self.level.value,
            "time": self.at,
            "metrics": {name: _plain(value) for name, value in self.metrics.items()},
            "rule": rule.name if rule else None,
            "role": str(self.match.role) if rule else None,
            "cause": str(self.match.cause) if rule else None,
            "fields": {name: _plain(value) for name, value in self.match.fields.items()},
            "near": list(self.match.near),
            "ends": [ended.name for ended, _ in self.match.ended],
        }


_PIECE = 256 * 1024  # bytes
_LOCAL_TIME = re.compile(r"\b(\d{4})[-/](\d\d)[-/](\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?")
_BEGINNING = 120  # characters searched for a time
# `parse` uses the boot time for kernel lines only, and is not given any here.
_ANY_BOOT_TIME = datetime(2000, 1, 1, tzinfo=UTC)


def lines_of(file: BufferedIOBase) -> Iterator[bytes]:
    """Yield physical lines, cut to what rules see."""
    begun, is_skipping = b"", False
    while piece := file.read1(_PIECE):
        *whole, rest = piece.split(b"\n")
        for line in whole:
            if not is_skipping:
                yield (begun + line)[: LONGEST + 1]  # a byte more shows that it is cut
            begun, is_skipping = b"", False
        if not is_skipping:
            begun += rest
        if len(begun) > LONGEST:
            yield begun[: LONGEST + 1]
            begun, is_skipping = b"", True
    if begun:
        yield begun


def explain(file: BufferedIOBase, source: str, rules: RuleSet, now: datetime) -> Iterator[LineExplanation]:
    """Raises ValueError for an invalid rule."""
    matcher, assembler = LineMatcher(rules), LineAssembler(Origin(source))
    waiting: dict[int, Line] = {}
    facts: dict[int, _LineFacts] = {}
    number = explained_until = 0  # the assembler may hold back later lines, in blocks
    for number, physical in enumerate(lines_of(file), start=1):
        facts[number] = _facts_of(physical, source)
        for line in assembler.feed(physical, now, number):
            waiting[line.number] = line
        until = (assembler.oldest_place or number + 1) - 1
        yield from _explained(waiting, facts, explained_until, until, matcher)
        explained_until = max(explained_until, until)
    for line in assembler.finish():
        waiting[line.number] = line
    yield from _explained(waiting, facts, explained_until, number, matcher)


class _LineFacts(NamedTuple):
    level: LogLevel
    at: str | None
    metrics: Mapping[str, Any]


def _facts_of(physical: bytes, source: str) -> _LineFacts:
    if source == "kernel":
        text, _ = raw_text.text_of(physical)
        return _LineFacts(parsed_line.level_of_kernel(text), _written(kernel_text.split(text, None).at, text), {})
    line = parsed_line.parse(physical, source, _ANY_BOOT_TIME)
    if line is None:
        return _NO_FACTS
    return _LineFacts(line.level, _written(line.at, line.text), records.metrics_of(line.text))


def _written(at: datetime | None, text: str) -> str | None:
    if at is not None:
        return write_time(at)
    match = _LOCAL_TIME.search(text[:_BEGINNING])
    if match is None:
        return None
    year, month, day, clock, fraction = match.groups()
    return f"{year}-{month}-{day}T{clock}" + (f".{fraction}" if fraction else "")


_NO_FACTS = _LineFacts(LogLevel.INFO, None, {})


def _explained(
    waiting: dict[int, Line], facts: dict[int, _LineFacts], after: int, until: int, matcher: LineMatcher
) -> Iterator[LineExplanation]:
    for number in range(after + 1, until + 1):
        line = waiting.pop(number, None)
        match = matcher.match(line) if line else LineMatch()
        yield LineExplanation(number, line.text if line else "", match, *facts.pop(number, _NO_FACTS))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
