"""Routes of findings and of kept jobs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from datetime import datetime
from typing import Annotated

from fastapi import Depends, Header, Path, Query, Request, Response
from msgspec import Struct
from msgspec.structs import replace
from pydantic import ConfigDict, Field

from trainmedic_logs.domain.finding import Role
from trainmedic_logs.domain.known_finding import KeptJob, KnownFinding
from trainmedic_server.api import diagnoses, finding_views, operations
from trainmedic_server.api.diagnoses import JobName
from trainmedic_server.api.engine import KeptJobsPort
from trainmedic_server.api.exports import AS_STREAM, CSV, NDJSON, Exports
from trainmedic_server.api.query_types import Name, PageCursor, PageLimit, wrong_cursor
from trainmedic_server.api.times import TimeText, time_of
from trainmedic_server.api.view import ApiModel, View
from trainmedic_server.auth.auth import Authenticator, Principal, requires
from trainmedic_server.auth.tokens import TokenRole
from trainmedic_server.errors import NotFound
from trainmedic_server.http.api_routes import ApiRoutes
from trainmedic_server.http.ascii_json import AsciiJson
from trainmedic_server.http.bodies import body_schema, read_body
from trainmedic_server.http.body import BodyReader
from trainmedic_server.http.limits import ServerLimits
from trainmedic_server.http.negotiation import preferred
from trainmedic_server.http.problems import responses
from trainmedic_server.http.read_turns import ReadTurns
from trainmedic_server.live.job_location import JobLocations
from trainmedic_server.ports.findings import FindingFilter, FindingHistory
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.verdicts import VerdictHistory

_STREAMED = 200  # findings read at once for a stream
FindingId = Annotated[str, Path(pattern=r"^[0-9A-Za-z_-]{1,64}$", description="The finding's id.")]


class KeepBody(ApiModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"attempt": 3, "note": "for the vendor"}]})

    attempt: int | None = Field(None, ge=1, le=1_000_000, strict=True, description="null for all of them.")
    note: str = Field("", max_length=500, pattern=r"^[^\x00]*$")


class ReleaseBody(ApiModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"attempt": 3}]})

    attempt: int | None = Field(
        None, ge=1, le=1_000_000, strict=True, description="null for the lock of the whole job."
    )


class KeptJobView(View):
    job: str
    attempt: int | None  # None for all
    by: str
    at: datetime
    note: str


class KeptJobList(ApiModel):
    items: list[KeptJobView]


class FindingsApi(Struct, frozen=True):
    history: FindingHistory
    kept_jobs: KeptJobsPort
    verdicts: VerdictHistory
    job_locations: JobLocations

    def routers(
        self, auth: Authenticator, clock: Clock, bodies: BodyReader, reads: ReadTurns, limits: ServerLimits
    ) -> list[ApiRoutes]:
        return [
            _read_routes(self.history, auth, clock, reads, limits),
            _keep_routes(self.kept_jobs, auth, bodies),
            diagnoses.router(self.verdicts, self.job_locations, auth, reads),
        ]


def _read_routes(
    history: FindingHistory, auth: Authenticator, clock: Clock, reads: ReadTurns, limits: ServerLimits
) -> ApiRoutes:
    routes = ApiRoutes("findings", [Depends(requires(auth, TokenRole.VIEWER))])
    exports: Exports[KnownFinding] = Exports(limits, finding_views.FindingView, finding_views.finding)

    @routes.get(
        "/findings",
        summary="Findings of log rules, newest first",
        response_model=finding_views.FindingPage,
        responses={**AS_STREAM, **responses(401, 403, 422, 503)},
    )
    async def page(
        conditions: FindingFilter = Depends(_filter(clock)),
        limit: PageLimit = 100,
        cursor: PageCursor = None,
        accept: Annotated[str | None, Header(include_in_schema=False)] = None,
    ) -> Response:
        """A rule makes one finding per target, however many ranks print the line.

        With `Accept: application/x-ndjson` or `text/csv`, stream the whole filtered result; `limit` and `cursor` are
        ignored.
        """
        kind = preferred(accept, ("application/json", NDJSON, CSV))
        if kind != "application/json":
            return await exports.response(_all_pages(history, conditions), kind)
        async with reads.take():
            try:
                newest_first, next_cursor = await history.findings_page(conditions, limit, cursor)
            except ValueError:
                raise wrong_cursor() from None
            return AsciiJson.of(finding_views.page(newest_first, next_cursor))

    @routes.get(
        "/findings/{finding_id}",
        summary="One finding with context",
        response_model=finding_views.FindingDetail,
        responses=responses(401, 403, 404, 422, 503),
    )
    async def one(finding_id: FindingId) -> Response:
        async with reads.take():
            record = await history.finding(finding_id)
            if record is None:
                raise NotFound(f"There is no finding {finding_id}.")
            return AsciiJson.of(finding_views.detail(record))

    _add_job_routes(routes, history, clock, reads)
    return routes


def _add_job_routes(routes: ApiRoutes, history: FindingHistory, clock: Clock, reads: ReadTurns) -> None:
    @routes.get(
        "/jobs/{job:path}/findings",
        summary="Findings in one job, newest first",
        response_model=finding_views.FindingPage,
        responses=responses(401, 403, 404, 422, 503),
    )
    async def page(
        job: JobName,
        conditions: FindingFilter = Depends(_filter_of_job(clock)),
        limit: PageLimit = 100,
        cursor: PageCursor = None,
    ) -> Response:
        """Findings that only a log file attributes to the job are excluded. A token with `jobs` may read the page."""
        async with reads.take():
            try:
                newest_first, next_cursor = await history.findings_page(replace(conditions, job=job), limit, cursor)
            except ValueError:
                raise wrong_cursor() from None
            return AsciiJson.of(finding_views.page(newest_first, next_cursor))

    @routes.get(
        "/jobs/{job:path}/findings/{finding_id}",
        summary="One finding of one job with context",
        response_model=finding_views.FindingDetail,
        responses=responses(401, 403, 404, 422, 503),
    )
    async def one(job: JobName, finding_id: FindingId) -> Response:
        """As `GET /findings/{finding_id}`, for a finding that is known to be the job's."""
        async with reads.take():
            record = await history.finding(finding_id)
            if record is None or job != (record.finding.target.job or record.finding.origin.job):
                # Answer the same for another job's finding, to hide its existence.
                raise NotFound(f"There is no finding {finding_id} of {job}.")
            return AsciiJson.of(finding_views.detail(record))


async def _all_pages(history: FindingHistory, conditions: FindingFilter) -> AsyncGenerator[KnownFinding, None]:
    cursor: str | None = None
    while True:
        newest_first, cursor = await history.findings_page(conditions, _STREAMED, cursor)
        for known in newest_first:
            yield known
        if cursor is None:
            return


def _keep_routes(kept_jobs: KeptJobsPort, auth: Authenticator, bodies: BodyReader) -> ApiRoutes:
    routes = ApiRoutes("findings")
    operator = requires(auth, TokenRole.OPERATOR)

    @routes.get(
        "/kept",
        summary="Jobs whose data is kept",
        response_model=KeptJobList,
        responses=responses(401, 403, 503),
        dependencies=[Depends(requires(auth, TokenRole.VIEWER))],
    )
    async def kept() -> KeptJobList:
        return KeptJobList(items=[_view(each) for each in await kept_jobs.all()])

    @routes.post(
        "/jobs/{job:path}/keep",
        summary="Keep a job's data past retention",
        response_model=KeptJobView,
        responses=responses(400, 401, 403, 404, 408, 409, 413, 415, 422, 503),
        openapi_extra=body_schema(KeepBody),
    )
    async def keep(request: Request, job: str, actor: Principal = Depends(operator)) -> KeptJobView:
        """Its findings, excerpts and verdicts, or those of one attempt, are excluded from retention."""
        body = await read_body(bodies, request, KeepBody)
        return _view(await kept_jobs.keep(operations.checked_job(job), body.attempt, actor.name, body.note.strip()))

    @routes.post(
        "/jobs/{job:path}/release",
        summary="Release a job's data to retention",
        response_model=KeptJobList,
        responses=responses(400, 401, 403, 404, 408, 413, 415, 422, 503),
        openapi_extra=body_schema(ReleaseBody),
    )
    async def release(request: Request, job: str, actor: Principal = Depends(operator)) -> KeptJobList:
        """The answer has the job's remaining locks."""
        body = await read_body(bodies, request, ReleaseBody)
        await kept_jobs.release(operations.checked_job(job), body.attempt, actor.name)
        return KeptJobList(items=[_view(each) for each in await kept_jobs.all() if each.job == job])

    return routes


def _view(kept: KeptJob) -> KeptJobView:
    return KeptJobView.model_validate(kept)


def _filter(clock: Clock) -> Callable[..., FindingFilter]:
    async def conditions(
        job: Annotated[Name | None, Query(description="The job that is known to have printed it.")] = None,
        claimed_job: Annotated[
            Name | None, Query(description="The job named only by the log file, without proof.")
        ] = None,
        node: Annotated[Name | None, Query(description="The target's node, or one where a line was read.")] = None,
        rule: Name | None = None,
        role: Role | None = None,
        since: TimeText | None = None,
        suspected: Annotated[bool | None, Query(description="Whether it lacks a confirmation.")] = None,
        open: Annotated[bool | None, Query(description="Whether it has not ended.")] = None,
    ) -> FindingFilter:
        begin = time_of(since, clock.now()) if since else None
        return FindingFilter(job, node, rule, role, begin, suspected, open, claimed_job)

    return conditions  # type: ignore[return-value]


def _filter_of_job(clock: Clock) -> Callable[..., FindingFilter]:
    async def conditions(
        node: Annotated[Name | None, Query(description="A node where a line was read.")] = None,
        rule: Name | None = None,
        role: Role | None = None,
        since: TimeText | None = None,
        suspected: Annotated[bool | None, Query(description="Whether it lacks a confirmation.")] = None,
        open: Annotated[bool | None, Query(description="Whether it has not ended.")] = None,
    ) -> FindingFilter:
        begin = time_of(since, clock.now()) if since else None
        return FindingFilter(None, node, rule, role, begin, suspected, open)

    return conditions  # type: ignore[return-value]
