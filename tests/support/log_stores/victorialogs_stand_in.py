"""What the tests need of VictoriaLogs, in memory: Loki's push API and ``/select/logsql/query``.

Of LogsQL it knows a time range, equality, ``in(...)`` and ``~`` of fields, joined by AND, and sorting by time with a
limit. What else stands in a query is a parse error. Lines that are too long or out of the retention are dropped, and
the push is answered well all the same, as there.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import re2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from trainmedic_server.adapters.log_stores.stored_fields import nanoseconds_of, rfc3339

RETENTION_SECONDS = 7 * 24 * 3600
LONGEST_LINE = 256 * 1024
_STRING = r'"((?:[^"\\\n]|\\.)*)"'
_RANGE = re2.compile(r"\s*_time:\[(\S+),\s*(\S+)\)\s*")
_FILTER = re2.compile(
    r"\s*(?:AND\s+)?([a-zA-Z_]+):(?:(=|~)" + _STRING + r"|in\((" + _STRING + r"(?:," + _STRING + r")*)\))\s*"
)
_SORT = re2.compile(r"\|\s*sort by \(_time, _msg\) limit (\d+)\s*")


@dataclass
class VictoriaLogsStandIn:
    """One VictoriaLogs; lines by tenant."""

    lines: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    dropped: int = 0

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/insert/loki/api/v1/push", self.push, methods=["POST"]),
                Route("/select/logsql/query", self.query, methods=["GET", "POST"]),
            ]
        )

    async def push(self, request: Request) -> Response:
        raw = await request.body()
        if request.headers.get("content-encoding") == "gzip":
            raw = gzip.decompress(raw)
        now = time.time_ns()
        for stream in json.loads(raw)["streams"]:
            for at, text, *metadata in stream["values"]:
                if len(text.encode()) > LONGEST_LINE or now - int(at) > RETENTION_SECONDS * 10**9:
                    self.dropped += 1
                    continue
                fields = {**stream["stream"], **(metadata[0] if metadata else {})}
                line = {"_time": rfc3339(int(at)), "_msg": text, "_stream": "{}", **fields}
                self.lines.setdefault(_tenant(request), []).append(line)
        return Response(status_code=204)

    async def query(self, request: Request) -> Response:
        form = dict(request.query_params) or dict(parse_qsl((await request.body()).decode(), strict_parsing=True))
        try:
            takes, most = _parsed(form["query"])
        except ValueError as error:
            return PlainTextResponse(f"cannot parse query: {error}", 400)
        found = sorted((line for line in self.lines.get(_tenant(request), []) if takes(line)), key=lambda x: x["_time"])
        return Response("".join(f"{json.dumps(line)}\n" for line in found[:most]), media_type="application/stream+json")


def _tenant(request: Request) -> str:
    return f"{request.headers.get('accountid', '0')}:{request.headers.get('projectid', '0')}"


def _parsed(text: str) -> tuple[Any, int]:
    """What takes a line, and how many are wanted. Raises ValueError."""
    match = _RANGE.match(text)
    if match is None:
        raise ValueError(f"missing time filter at {text[:20]!r}")
    begin, end = nanoseconds_of(match[1]), nanoseconds_of(match[2])
    rest, filters = text[match.end() :], []
    while (match := _FILTER.match(rest)) is not None:
        name, operator, value, several = match[1], match[2], match[3], match[4]
        if several is not None:
            filters.append((name, "in", [str(each) for each in json.loads(f"[{several}]")]))
        else:
            unquoted = str(json.loads(f'"{value}"'))
            filters.append((name, operator, _compiled(unquoted) if operator == "~" else unquoted))
        rest = rest[match.end() :]
    match = _SORT.fullmatch(rest)
    if match is None:
        raise ValueError(f"unexpected token {rest[:20]!r}")

    def takes(line: Mapping[str, str]) -> bool:
        is_in_time = begin <= nanoseconds_of(line["_time"]) < end
        return is_in_time and all(_fits(line.get(name, ""), operator, value) for name, operator, value in filters)

    return takes, int(match[1])


def _fits(value: str, operator: str, wanted: Any) -> bool:
    if operator == "~":
        return wanted.search(value) is not None
    return value in wanted if operator == "in" else value == wanted


def _compiled(pattern: str) -> Any:
    try:
        return re2.compile(pattern)
    except re2.error as error:
        raise ValueError(f"invalid regexp: {error}") from error
