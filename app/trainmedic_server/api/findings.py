"""Routes of findings and of kept jobs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Annotated

from fastapi import Depends, Path, Query, Request, Response
from msgspec import Struct
from msgspec.structs import replace
from pydantic import ConfigDict, Field

from trainmedic_logs.domain.finding import Role
from trainmedic_logs.domain.known_finding import KeptJob, KnownFinding
from trainmedic_server.api import diagnoses, finding_views, operations
from trainmedic_server.api.diagnoses import JobName
from trainmedic_server.api.exports import AS_STREAM, Accept, Exports, stream_type
from trainmedic_server.api.query_types import Name, PageCursor, PageLimit, all_items, cursor_checked
from trainmedic_server.api.times import TimeText, time_of
from trainmedic_server.api.view import ApiModel, View
from trainmedic_server.auth.auth import Principal
from trainmedic_server.engine.kept_jobs import KeptJobs
from trainmedic_server.errors import NotFound
from trainmedic_server.http.api_routes import ApiRoutes, RouteParts
from trainmedic_server.http.ascii_json import AsciiJson
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
    kept_jobs: KeptJobs
    verdicts: VerdictHistory
    job_locations: JobLocations

    def routers(self, parts: RouteParts) -> list[ApiRoutes]:
        return [
            _read_routes(self.history, parts),
            _keep_routes(self.kept_jobs, parts),
            diagnoses.router(self.verdicts, self.job_locations, parts),
        ]


def _read_routes(history: FindingHistory, parts: RouteParts) -> ApiRoutes:
    routes = ApiRoutes("findings", parts.auth)
    exports: Exports[KnownFinding] = Exports(parts.limits, finding_views.FindingView, finding_views.finding)

    @routes.read(
        "/findings",
        summary="Findings of log rules, newest first",
        response_model=finding_views.FindingPage,
        responses=AS_STREAM,
    )
    async def page(
        conditions: FindingFilter = Depends(_filter(parts.clock)),
        limit: PageLimit = 100,
        cursor: PageCursor = None,
        accept: Accept = None,
    ) -> Response:
        """A rule makes one finding per target, however many ranks print the line.

        With `Accept: application/x-ndjson` or `text/csv`, stream the whole filtered result; `limit` and `cursor` are
        ignored.
        """
        if kind := stream_type(accept):
            found = all_items(lambda after: history.findings_page(conditions, _STREAMED, after))
            return await exports.response(found, kind)
        return await _page(conditions, limit, cursor)

    @routes.read(
        "/findings/{finding_id}",
        404,
        summary="One finding with context",
        response_model=finding_views.FindingDetail,
    )
    async def one(finding_id: FindingId) -> Response:
        async with parts.reads.take():
            record = await history.finding(finding_id)
            if record is None:
                raise NotFound(f"There is no finding {finding_id}.")
            return AsciiJson.of(finding_views.detail(record))

    @routes.read(
        "/jobs/{job:path}/findings",
        404,
        name="page",
        summary="Findings in one job, newest first",
        response_model=finding_views.FindingPage,
    )
    async def page_of_job(
        job: JobName,
        conditions: FindingFilter = Depends(_filter_of_job(parts.clock)),
        limit: PageLimit = 100,
        cursor: PageCursor = None,
    ) -> Response:
        """Findings that only a log file attributes to the job are excluded. A token with `jobs` may read the page."""
        return await _page(replace(conditions, job=job), limit, cursor)

    @routes.read(
        "/jobs/{job:path}/findings/{finding_id}",
        404,
        name="one",
        summary="One finding of one job with context",
        response_model=finding_views.FindingDetail,
    )
    async def one_of_job(job: JobName, finding_id: FindingId) -> Response:
        """As `GET /findings/{finding_id}`, for a finding that is known to be the job's."""
        async with parts.reads.take():
            record = await history.finding(finding_id)
            if record is None or job != (record.finding.target.job or record.finding.origin.job):
                # Answer the same for another job's finding, to hide its existence.
                raise NotFound(f"There is no finding {finding_id} of {job}.")
            return AsciiJson.of(finding_views.detail(record))

    async def _page(conditions: FindingFilter, limit: int, cursor: str | None) -> Response:
        async with parts.reads.take():
            with cursor_checked():
                newest_first, following = await history.findings_page(conditions, limit, cursor)
            return AsciiJson.of(finding_views.page(newest_first, following))

    return routes


def _keep_routes(kept_jobs: KeptJobs, parts: RouteParts) -> ApiRoutes:
    routes = ApiRoutes("findings", parts.auth)

    @routes.read("/kept", summary="Jobs whose data is kept")
    async def kept() -> KeptJobList:
        return KeptJobList(items=[_view(each) for each in await kept_jobs.all()])

    @routes.act("/jobs/{job:path}/keep", KeepBody, 404, 409, summary="Keep a job's data past retention")
    async def keep(request: Request, job: str, actor: Principal = Depends(routes.operator)) -> KeptJobView:
        """Its findings, excerpts and verdicts, or those of one attempt, are excluded from retention."""
        body = await parts.bodies.read_model(request, KeepBody)
        return _view(await kept_jobs.keep(operations.checked_job(job), body.attempt, actor.name, body.note.strip()))

    @routes.act("/jobs/{job:path}/release", ReleaseBody, 404, summary="Release a job's data to retention")
    async def release(request: Request, job: str, actor: Principal = Depends(routes.operator)) -> KeptJobList:
        """The answer has the job's remaining locks."""
        body = await parts.bodies.read_model(request, ReleaseBody)
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
