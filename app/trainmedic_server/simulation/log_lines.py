"""What log rules make of each line of a file, without a server. Who calls it: ``cli.logs``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainmedic_server.domain.finding import Origin
from trainmedic_server.logs.assembly import LineAssembler
from trainmedic_server.logs.line import Line
from trainmedic_server.logs.matcher import LineMatch, LineMatcher
from trainmedic_server.logs.rule import RuleSet


@dataclass(frozen=True, slots=True)
class LineExplanation:
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


def explain(raw: Iterable[bytes], source: str, rules: RuleSet, now: datetime) -> Iterator[LineExplanation]:
    """Yield an explanation of each physical line, in their order. Raises ValueError for a rule that is none."""
    matcher, assembler = LineMatcher(rules), LineAssembler(Origin(source))
    waiting: dict[int, Line] = {}
    number = told = 0
    for number, physical in enumerate(raw, start=1):
        for line in assembler.feed(physical.rstrip(b"\n"), now, number):
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
