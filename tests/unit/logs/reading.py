"""Lines for tests, read as the agent reads them."""

from __future__ import annotations

from datetime import UTC, datetime

from trainmedic_logs.domain.finding import Origin
from trainmedic_logs.lines.assembly import LineAssembler
from trainmedic_logs.lines.line import Line

NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)


def origin(source: str = "training", **members: object) -> Origin:
    return Origin(source, **{"node": "gpu-07", "stream": "/logs/a.log", **members})  # type: ignore[arg-type]


def lines(text: str | bytes, source: str = "training", **members: object) -> list[Line]:
    """All lines of a file."""
    raw = text.encode() if isinstance(text, str) else text
    assembler = LineAssembler(origin(source, **members))
    made, place = [], 0
    for physical in raw.split(b"\n"):
        made.extend(assembler.feed(physical, NOW, place))
        place += len(physical) + 1
    return made + assembler.flush()


def line(text: str | bytes, source: str = "training", **members: object) -> Line:
    """The one line that a file has."""
    (only,) = lines(text, source, **members)
    return only
