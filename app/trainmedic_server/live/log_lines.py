"""``GET /jobs/{job}/logs``: lines of a job, as NDJSON or, followed, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Depends, Query, Request, Response
from msgspec import Struct
from msgspec.structs import replace

from trainmedic_core.expressions.regexes import SearchPattern
from trainmedic_core.plain_text import json_bytes
from trainmedic_logs.domain.log_search import LONGEST_GREP, LogLevel, LogQuery
from trainmedic_server.api.exports import NDJSON
from trainmedic_server.api.times import TimeText, time_of
from trainmedic_server.auth.auth import Principal
from trainmedic_server.auth.tokens import TokenRole
from trainmedic_server.errors import BusUnavailable, NotFound
from trainmedic_server.http.api_routes import ApiRoutes, RouteParts
from trainmedic_server.http.problems import HttpProblem, responses
from trainmedic_server.http.read_turns import ReadTurns
from trainmedic_server.http.streaming import StreamedResponse, while_allowed
from trainmedic_server.live.events import EVENT_STREAM
from trainmedic_server.live.job_location import JobLocations
from trainmedic_server.ports.logs import LogBatch, LogSource
from trainmedic_server.ports.outside import Clock

USUAL_SINCE = timedelta(minutes=10)  # before now
LONGEST_SINCE = timedelta(days=30)  # Period searched for the lines of an attempt without `since`
MOST_LINES = 100_000
USUAL_LINES = 10_000  # without `limit`

_EXAMPLE = (
    '{"at": "2026-01-31T12:00:00.000000Z", "node": "gpu-07", "source": "training", "level": "error", "job": "llm-1",'
    ' "attempt": 3, "rank": 7, "line": "torch.OutOfMemoryError: CUDA out of memory. …"}\n'
)
_ANSWER: dict[str, Any] = {
    "description": 'Lines, and notes as `{"note": …}`; with `follow`, events `line` and `note`.',
    "content": {
        NDJSON: {"schema": {"type": "string"}, "example": _EXAMPLE},
        EVENT_STREAM: {"schema": {"type": "string"}},
    },
}
Number = Annotated[int | None, Query(ge=0, lt=1_000_000_000)]


class LogLinesApi(Struct, frozen=True):
    source: LogSource
    job_locations: JobLocations

    def router(self, parts: RouteParts) -> ApiRoutes:
        return _router(self.source, self.job_locations, parts)


def _router(source: LogSource, job_locations: JobLocations, parts: RouteParts) -> ApiRoutes:
    auth, limits = parts.auth, parts.limits
    routes = ApiRoutes("logs", auth)
    turns = ReadTurns(limits.log_searches, 0, "searches of logs")

    @routes.get(
        "/jobs/{job:path}/logs",
        summary="The lines of a job's logs, oldest first",
        response_class=Response,
        # 404: an impossible name, or a job without known nodes.
        responses={200: _ANSWER, **responses(404, 429)},
    )
    async def lines(
        request: Request,
        principal: Principal = Depends(routes.viewer),
        asked: LogQuery = Depends(_query(parts.clock)),
        limit: Annotated[
            int, Query(ge=1, le=MOST_LINES, description="Most lines; ignored with `follow`.")
        ] = USUAL_LINES,
        follow: Annotated[bool, Query(description="Continue with new lines, as server-sent events.")] = False,
    ) -> Response:
        """Without `since`, lines of the last ten minutes; of an `attempt`, all that are retained."""
        if asked.kernel and principal.jobs is not None:
            raise HttpProblem(
                HTTPStatus.FORBIDDEN, "This token is limited to certain jobs, and kernel lines concern all."
            )
        _check(asked)
        places = await job_locations.of(asked.job)
        # If no SDK reports the job, only its files show its nodes.
        is_search = asked.node is None and not places.nodes and bool(places.readers)
        query = replace(asked, pods=places.pods, is_search=is_search)
        nodes = places.readers if is_search else places.nodes
        async with AsyncExitStack() as until_closed:
            await until_closed.enter_async_context(turns.take())
            batches = source.follow(query, nodes) if follow else source.search(query, nodes, limit)
            if isinstance(batches, AsyncGenerator):
                until_closed.push_async_callback(batches.aclose)
            try:
                first = await anext(batches, None)  # before the response starts, so that a failure becomes a 503
            except NotFound as error:
                if places.is_whole:
                    raise
                # Without the job's own report, its absence is not certain.
                raise BusUnavailable("cannot ask the job where it runs") from error
            write, media_type = (_event, EVENT_STREAM) if follow else (_line, NDJSON)
            written = while_allowed(_formatted(first, batches, write), lambda: auth.allows(request, TokenRole.VIEWER))
            return StreamedResponse(written, media_type, limits.stall_seconds, until_closed.pop_all().aclose)

    return routes


def _query(clock: Clock) -> Callable[..., LogQuery]:
    def query(
        job: str,
        rank: Number = None,
        node_rank: Number = None,
        local_rank: Number = None,
        node: Annotated[str | None, Query(min_length=1, max_length=253)] = None,
        attempt: Annotated[int | None, Query(ge=1, lt=1_000_000_000)] = None,
        since: TimeText | None = None,
        until: TimeText | None = None,
        grep: Annotated[str, Query(max_length=LONGEST_GREP, description="RE2 regular expression.")] = "",
        level: Annotated[LogLevel | None, Query(description="Lines of at least this level.")] = None,
        kernel: Annotated[bool, Query(description="Also kernel lines of the job's nodes.")] = False,
    ) -> LogQuery:
        now = clock.now()
        begin = time_of(since, now) if since else now - (LONGEST_SINCE if attempt is not None else USUAL_SINCE)
        end = time_of(until, now) if until else None
        return LogQuery(job, begin, end, attempt, rank, node_rank, node, grep, level, kernel, local_rank=local_rank)

    return query


def _check(query: LogQuery) -> None:
    try:
        if query.grep:
            SearchPattern(query.grep)
    except ValueError as error:
        raise HttpProblem(HTTPStatus.UNPROCESSABLE_ENTITY, f"grep: {error}", problems=[("grep", str(error))]) from error
    if query.until is not None and query.until <= query.since:
        message = "is not after since"
        raise HttpProblem(HTTPStatus.UNPROCESSABLE_ENTITY, f"until: {message}", problems=[("until", message)])


def _line(kind: str, data: bytes) -> bytes:
    return data + b"\n"


def _event(kind: str, data: bytes) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


async def _formatted(
    first: LogBatch | None, others: AsyncIterator[LogBatch], write: Callable[[str, bytes], bytes]
) -> AsyncGenerator[bytes, None]:
    batch = first
    while batch is not None:
        pieces = [write("line", json_bytes(line.to_json())) for line in batch.lines]
        pieces += [write("note", json_bytes({"note": note})) for note in batch.notes]
        if pieces:
            yield b"".join(pieces)
        elif write is _event:
            yield b": still here\n\n"
        batch = await anext(others, None)
