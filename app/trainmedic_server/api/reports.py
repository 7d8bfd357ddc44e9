"""Routes of reports, curves and readings, which the package ``reports`` compiles."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import Path, Query, Response
from pydantic import TypeAdapter

from trainmedic_core import duration
from trainmedic_server.api.diagnoses import JobName
from trainmedic_server.api.times import TimeText, time_of
from trainmedic_server.errors import PayloadError
from trainmedic_server.http.api_routes import ApiRoutes, RouteParts
from trainmedic_server.http.ascii_json import AsciiJson
from trainmedic_server.http.read_turns import ReadTurns
from trainmedic_server.ports.outside import Clock
from trainmedic_server.reports.compiling import LONGEST_PERIOD, ReportCompiler
from trainmedic_server.reports.curves import JobCurves, NodeReadings
from trainmedic_server.reports.fleet import FleetReport
from trainmedic_server.reports.job_report import JobReport

_SHORTEST = timedelta(minutes=1)
_AT_ONCE = 2  # reports being compiled
_WAITING = 16  # requests for further reports

NodeName = Annotated[str, Path(min_length=1, max_length=253, pattern=r"^[^\x00-\x1f\x7f]+$")]

PersonAfter = Annotated[
    str, Query(max_length=20, description="Delay after which a person would have made the repairs, such as 30m.")
]


def router(compiler: ReportCompiler, parts: RouteParts) -> ApiRoutes:
    clock = parts.clock
    # Separate turns: reports wait for Prometheus and must not delay pages of the history.
    turns = ReadTurns(_AT_ONCE, _WAITING, "reports")
    routes = ApiRoutes("reports", parts.auth)

    @routes.read("/jobs/{job:path}/report", 404, summary="Use of a job's time", response_model=JobReport)
    async def job_report(job: JobName, since: TimeText = "24h", until: TimeText = "0s") -> Response:
        """Utilisation, memory, throughput, efficiency, goodput, anomalies, bottleneck, failures and repairs.

        Unknown figures are null; `unknown` has the reason by name.
        """
        begin, end = _range(since, until, clock)
        async with turns.take():
            return _answer(await compiler.job(job, begin, end))

    @routes.read(
        "/jobs/{job:path}/curves",
        404,
        summary="Loss, throughput and learning rate of a job over time",
        response_model=JobCurves,
    )
    async def job_curves(job: JobName, since: TimeText = "6h", until: TimeText = "0s") -> Response:
        """At most 120 points each, averaged over the ranks that report them. `unknown` says why there is none."""
        begin, end = _range(since, until, clock)
        async with turns.take():
            return _answer(await compiler.curves(job, begin, end))

    @routes.read(
        "/agents/{node:path}/readings",
        404,
        summary="Newest readings of a node's GPUs",
        response_model=NodeReadings,
    )
    async def node_readings(node: NodeName) -> Response:
        """Temperature, power and utilization from Prometheus, else from the agent. `unknown` says why there is none."""
        async with turns.take():
            return _answer(await compiler.readings(node, clock.now()))

    @routes.read("/report", summary="Cost of failures of all jobs", response_model=FleetReport)
    async def fleet_report(
        since: TimeText = "7d", until: TimeText = "0s", person_after: PersonAfter = "30m"
    ) -> Response:
        """Causes of failures with their cost in GPU-hours, nodes that fail repeatedly, and the benefit of repairs."""
        begin, end = _range(since, until, clock)
        person = _duration(person_after)
        async with turns.take():
            return _answer(await compiler.fleet(begin, end, person))

    return routes


def _answer(report: Any) -> Response:
    return AsciiJson(_adapters()[type(report)].dump_python(report, mode="json"))


@functools.cache
def _adapters() -> Mapping[type[Any], TypeAdapter[Any]]:  # slow to build, so not at the start
    return {kind: TypeAdapter(kind) for kind in (JobReport, FleetReport, JobCurves, NodeReadings)}


def _duration(text: str) -> timedelta:
    try:
        return duration.parse(text)
    except ValueError as error:
        raise PayloadError.at([("person_after", str(error))]) from None


def _range(since: str, until: str, clock: Clock) -> tuple[datetime, datetime]:
    now = clock.now()
    begin, end = time_of(since, now), min(time_of(until, now), now)
    if not _SHORTEST <= end - begin <= LONGEST_PERIOD:
        raise PayloadError.at([("since", f"must be from 1m to {LONGEST_PERIOD.days}d before the end")])
    return begin, end
