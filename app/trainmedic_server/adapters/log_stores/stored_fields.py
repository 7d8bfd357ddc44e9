"""Fields of stored lines."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from datetime import UTC, datetime

from trainmedic_logs.domain.log_search import FoundLine, LogLevel, LogQuery, TimeKnownBy
from trainmedic_logs.lines.masks import masked
from trainmedic_server.adapters.log_stores.paging import NANOSECONDS, StoredLine, moment, nanoseconds
from trainmedic_server.errors import LogsUnavailable

_LEVELS = {
    "trace": LogLevel.DEBUG,
    "warn": LogLevel.WARNING,
    "err": LogLevel.ERROR,
    "critical": LogLevel.ERROR,
    "fatal": LogLevel.ERROR,
    **{level.value: level for level in LogLevel},
}
_KNOWN_BY = {each.value: each for each in TimeKnownBy}  # By the field ``time_source``.
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")


def stored_line(at: int, text: str, fields: Mapping[str, str]) -> StoredLine:
    """Mask the text: other shippers may send secrets. Raises LogsUnavailable if the time is invalid."""
    try:
        time = moment(at)
    except (OverflowError, ValueError) as error:
        raise LogsUnavailable("the log store returns a line with an invalid time") from error
    line = FoundLine(
        at=time,
        text=masked(text),
        node=fields.get("node", ""),
        source=fields.get("source", "training"),
        level=_LEVELS.get(fields.get("level", "").lower(), LogLevel.INFO),
        job=fields.get("job"),
        attempt=_number(fields.get("attempt")),
        rank=_number(fields.get("rank")),
        local_rank=_number(fields.get("local_rank")),
        known_by=_KNOWN_BY.get(fields.get("time_source", ""), TimeKnownBy.LINE),
    )
    who = "\0".join(f"{name}={value}" for name, value in sorted(fields.items()))
    return StoredLine(at, f"{who}\0{text}", line)


def equal_fields(query: LogQuery) -> dict[str, str | int]:
    names = ("job", "node", "rank", "attempt", "node_rank", "local_rank")
    return {name: value for name in names if (value := getattr(query, name)) is not None}


def kernel_nodes(query: LogQuery, nodes: Collection[str]) -> list[str]:
    asked = [query.node] if query.node is not None else sorted(nodes)
    return asked if query.kernel else []


def quoted(text: str) -> str:
    """Quote for LogQL and LogsQL, which read JSON's escapes, surrogate halves excepted."""
    return json.dumps(text.encode("utf-8", "replace").decode(), ensure_ascii=False).replace("\x7f", "\\u007f")


def level_names(level: LogLevel) -> list[str]:
    return [name for name, each in _LEVELS.items() if each in level.at_least]


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else None


def rfc3339(at: int) -> str:
    seconds, rest = divmod(at, NANOSECONDS)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"


def nanoseconds_of(text: str) -> int:
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is not a time")
    at = datetime.fromisoformat(match[1] + match[3].replace("Z", "+00:00")).astimezone(UTC)
    return nanoseconds(at) + int(f"{match[2] or '0':0<9}")
