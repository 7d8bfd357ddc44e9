"""What the tests need of Loki, in memory: pushing lines and ``query_range``, with what Loki refuses by default.

Its answers are those of Loki 3 (``pkg/loghttp``, ``pkg/validation``): of the order within a stream, of the age, the
size of lines, the number of labels, the rate, the tenant, and of queries that are none. Of LogQL it knows selectors,
line filters by regular expression, and filters by label; whatever else stands in a query is a parse error.
"""

from __future__ import annotations

import gzip
import json
import time
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import re2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

MOST_LABELS = 15
LONGEST_LINE = 256 * 1024
MOST_ENTRIES = 5000
OLDEST_SECONDS = 7 * 24 * 3600
NEWEST_SECONDS = 600
OUT_OF_ORDER_SECONDS = 3600
"""Half of a chunk's greatest age: within it lines of a stream may come in any order."""
MOST_METADATA = 128

Labels = tuple[tuple[str, str], ...]


@dataclass
class _Entry:
    at: int
    line: str
    metadata: Mapping[str, str]


@dataclass
class LokiStandIn:
    """One Loki, with many tenants where `has_tenants`."""

    has_tenants: bool = False
    bytes_per_push: int = 4 * 1024 * 1024
    streams: dict[str, dict[Labels, list[_Entry]]] = field(default_factory=dict)
    known: dict[tuple[str, Labels], set[tuple[int, str]]] = field(default_factory=dict)
    pushes: list[Mapping[str, str]] = field(default_factory=list)
    """The headers of those that came."""
    cannot_read: str | None = None
    """A push that has this in it cannot be read."""
    fail_with: list[int] = field(default_factory=list)
    """Statuses with which the next calls are answered."""

    def lines(self, **labels: str) -> list[str]:
        """The lines whose labels or metadata are these, by their time, of all tenants."""
        found = [
            (entry.at, entry.line)
            for streams in self.streams.values()
            for of_stream, entries in streams.items()
            for entry in entries
            if labels.items() <= {**dict(of_stream), **entry.metadata}.items()
        ]
        return [line for _, line in sorted(found)]

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/loki/api/v1/push", self.push, methods=["POST"]),
                Route("/loki/api/v1/query_range", self.query_range, methods=["GET", "POST"]),
            ]
        )

    async def push(self, request: Request) -> Response:
        self.pushes.append(dict(request.headers))
        if (refused := self._refused(request)) is not None:
            return refused
        raw = await request.body()
        if request.headers.get("content-encoding") == "gzip":
            raw = gzip.decompress(raw)
        if request.headers.get("content-type") != "application/json":
            return PlainTextResponse("error decoding: snappy: corrupt input", 400)
        if self.cannot_read is not None and self.cannot_read.encode() in raw:
            return PlainTextResponse("loghttp.PushRequest.Streams: unmarshalerDecoder", 400)
        document = json.loads(raw)
        if len(raw) > self.bytes_per_push:
            return PlainTextResponse("Ingestion rate limit exceeded for user (limit: 4194304 bytes/sec)", 429)
        errors = [error for stream in document["streams"] for error in self._take(self._tenant(request), stream)]
        return PlainTextResponse("\n".join(errors), 400) if errors else Response(status_code=204)

    def _take(self, tenant: str, stream: Mapping[str, Any]) -> list[str]:
        """Keep what is good of a stream; return why the rest is refused. The others of a batch are kept."""
        labels: Labels = tuple(sorted(stream["stream"].items()))
        if not labels:
            return ["error at least one label pair is required per stream"]
        if len(labels) > MOST_LABELS:
            return [f"entry for stream has {len(labels)} label names; limit {MOST_LABELS}"]
        entries = self.streams.setdefault(tenant, {}).setdefault(labels, [])
        known = self.known.setdefault((tenant, labels), set())
        errors: list[str] = []
        behind = 0
        now = time.time_ns()
        for at_text, line, *metadata in stream["values"]:
            at, members = int(at_text), dict(metadata[0]) if metadata else {}
            newest = entries[-1].at if entries else 0
            if not all(isinstance(value, str) for value in members.values()) or len(members) > MOST_METADATA:
                return ["couldn't parse push request: structured metadata"]
            if len(line.encode()) > LONGEST_LINE:
                errors.append(f"max entry size {LONGEST_LINE} bytes exceeded for stream")
            elif now - at > OLDEST_SECONDS * 10**9:
                errors.append("entry has timestamp too old")
            elif at - now > NEWEST_SECONDS * 10**9:
                errors.append("entry has timestamp too new")
            elif newest - at > OUT_OF_ORDER_SECONDS * 10**9:
                behind += 1
            elif (at, line) not in known:  # what says the same at the same time is kept once
                known.add((at, line))
                insort(entries, _Entry(at, line, members), key=lambda entry: entry.at)
        if behind:  # as the ingester says it: one of them, and how many there are
            reason = "entry too far behind, oldest acceptable timestamp is: a moment"
            ignored = f"total ignored: {behind} out of {len(stream['values'])} for stream: {dict(labels)}"
            errors.append(f"entry with timestamp {newest} ignored, reason: '{reason}',\nuser 'fake', {ignored}")
        return errors

    async def query_range(self, request: Request) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        form = dict(request.query_params) or dict(parse_qsl((await request.body()).decode(), strict_parsing=True))
        limit, start, end = int(form.get("limit", 100)), int(form["start"]), int(form["end"])
        if limit > MOST_ENTRIES:
            return PlainTextResponse(f"max entries limit per query exceeded, limit > max_entries_limit ({limit})", 400)
        if start > end:
            return PlainTextResponse("end timestamp must not be before or equal to start time", 400)
        if end - start > 721 * 3600 * 10**9:
            return PlainTextResponse("the query time range exceeds the limit (query length: 800h, limit: 30d1h)", 400)
        try:
            query = _Query(str(form["query"]))
        except ValueError as error:
            return PlainTextResponse(f"parse error : {error}", 400)
        found = [
            (entry.at, {**dict(labels), **entry.metadata}, entry.line)
            for labels, entries in self.streams.get(self._tenant(request), {}).items()
            for entry in entries
            if start <= entry.at < end and query.takes(dict(labels), entry)
        ]
        found.sort(key=lambda each: each[0], reverse=form.get("direction") != "forward")
        streams: dict[Labels, list[list[str]]] = {}
        for at, labels, line in found[:limit]:
            streams.setdefault(tuple(sorted(labels.items())), []).append([str(at), line])
        result = [{"stream": dict(labels), "values": values} for labels, values in streams.items()]
        return JSONResponse({"status": "success", "data": {"resultType": "streams", "result": result}})

    def _refused(self, request: Request) -> Response | None:
        if self.fail_with:
            return PlainTextResponse("something is wrong", self.fail_with.pop(0))
        if self.has_tenants and not request.headers.get("x-scope-orgid"):
            return PlainTextResponse("no org id", 401)
        return None

    def _tenant(self, request: Request) -> str:
        return str(request.headers.get("x-scope-orgid", "")) if self.has_tenants else ""


_STRING = r'"((?:[^"\\\n]|\\.)*)"'
_MATCHER = re2.compile(r"\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*" + _STRING + r"\s*")
_STAGE = re2.compile(r"\s*(?:(\|~)\s*" + _STRING + r"|\|\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|=)\s*" + _STRING + r")\s*")


class _Query:
    """A query of LogQL that was understood."""

    def __init__(self, text: str) -> None:
        """Raises ValueError where Loki would not understand it, or this does not."""
        self.matchers: list[tuple[str, str, str]] = []
        rest = text[1:]
        if not text.startswith("{"):
            raise ValueError(f"syntax error: unexpected {text[:20]!r}")
        while not rest.startswith("}"):
            match = _MATCHER.match(rest)
            if match is None:
                raise ValueError(f"syntax error in a selector: {rest[:20]!r}")
            self.matchers.append((match[1], match[2], _unquoted(match[3])))
            rest = rest[match.end() :].removeprefix(",")
        if not any(operator in ("=", "=~") and not _fits(operator, value, "") for _, operator, value in self.matchers):
            raise ValueError(
                "queries require at least one regexp or equality matcher that does not have an empty value"
            )
        self.lines: list[Any] = []
        self.fields: list[tuple[str, str, str]] = []
        rest = rest[1:]
        while rest.strip():
            match = _STAGE.match(rest)
            if match is None:
                raise ValueError(f"syntax error in a pipeline: {rest[:20]!r}")
            if match[1]:
                self.lines.append(_compiled(_unquoted(match[2])))
            else:
                self.fields.append((match[3], match[4], _unquoted(match[5])))
            rest = rest[match.end() :]

    def takes(self, labels: Mapping[str, str], entry: _Entry) -> bool:
        if not all(_fits(operator, value, labels.get(name, "")) for name, operator, value in self.matchers):
            return False
        fields = {**labels, **entry.metadata}
        if not all(pattern.search(entry.line) for pattern in self.lines):
            return False
        return all(_fits(operator, value, fields.get(name, "")) for name, operator, value in self.fields)


def _fits(operator: str, pattern: str, value: str) -> bool:
    is_equal = value == pattern if operator in ("=", "!=") else _compiled(pattern).fullmatch(value) is not None
    return is_equal != operator.startswith("!")


def _compiled(pattern: str) -> Any:
    try:
        return re2.compile(pattern)
    except re2.error as error:
        raise ValueError(f"error parsing regexp: {error}") from error


def _unquoted(text: str) -> str:
    return str(json.loads(f'"{text}"'))
