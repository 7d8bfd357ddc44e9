"""What log rules make of each line of a file, without a server. Who calls it: ``cli.logs``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from io import BufferedIOBase
from typing import Any

from msgspec import Struct

from trainmedic_server.domain.finding import Origin
from trainmedic_server.logs.assembly import LineAssembler
from trainmedic_server.logs.line import LONGEST, Line
from trainmedic_server.logs.matcher import LineMatch, LineMatcher
from trainmedic_server.logs.rule import RuleSet


class LineExplanation(Struct, frozen=True):
    """Which rule takes a physical line; of a block of several, its first line has the rule."""

    number: int
    """Counted from 1."""
    text: str
    """The line; of a block, all of it, at its first."""
    match: LineMatch

    def as_data(self) -> dict[str, Any]:
        """Return it for JSON."""
        rule = self.match.rule
        return {
            "line": self.number,
            "rule": rule.name if rule else None,
            "role": str(self.match.role) if rule else None,
            "cause": str(self.match.cause) if rule else None,
            "fields": {name: _plain(value) for name, value in self.match.fields.items()},
            "near": list(self.match.near),
            "ends": [ended.name for ended, _ in self.match.ended],
        }


_PIECE = 256 * 1024


def lines_of(file: BufferedIOBase) -> Iterator[bytes]:
    """Yield the physical lines of a file; of one that is longer than rules see, the beginning. A file of one enormous
    line takes no more memory than others."""
    begun, is_skipping = b"", False
    while piece := file.read1(_PIECE):
        *whole, rest = piece.split(b"\n")
        for line in whole:
            if not is_skipping:
                yield (begun + line)[: LONGEST + 1]
            begun, is_skipping = b"", False
        if not is_skipping:
            begun += rest
        if len(begun) > LONGEST:
            yield begun[: LONGEST + 1]
            begun, is_skipping = b"", True
    if begun:
        yield begun


def explain(file: BufferedIOBase, source: str, rules: RuleSet, now: datetime) -> Iterator[LineExplanation]:
    """Yield an explanation of each physical line, in their order. Raises ValueError for a rule that is none."""
    matcher, assembler = LineMatcher(rules), LineAssembler(Origin(source))
    waiting: dict[int, Line] = {}
    number = told = 0
    for number, physical in enumerate(lines_of(file), start=1):
        for line in assembler.feed(physical, now, number):
            waiting[line.number] = line
        until = (assembler.oldest_place or number + 1) - 1
        yield from _told(waiting, told, until, matcher)
        told = max(told, until)
    for line in assembler.flush():
        waiting[line.number] = line
    yield from _told(waiting, told, number, matcher)


def _told(waiting: dict[int, Line], after: int, until: int, matcher: LineMatcher) -> Iterator[LineExplanation]:
    for number in range(after + 1, until + 1):
        line = waiting.pop(number, None)
        yield LineExplanation(number, line.text if line else "", matcher.match(line) if line else LineMatch())


def _plain(value: Any) -> Any:
    """Return a field as JSON has it: a number that is not finite as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
