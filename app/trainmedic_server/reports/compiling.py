# Reports on a job and the fleet, from the history, findings, verdicts and Prometheus, for the API.
from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from datetime import UTC, datetime, time, timedelta
from typing import Protocol

from trainmedic_logs.domain.known_finding import KnownFinding
from trainmedic_server import telemetry
from trainmedic_server.domain.run import Event, Run, Status
from trainmedic_server.errors import MetricsUnavailable, NotFound
from trainmedic_server.ports.findings import FindingFilter, FindingHistory
from trainmedic_server.ports.metric_history import MetricHistory
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.store import History, HistoryFilter
from trainmedic_server.ports.tallies import PlaybookTally, TallySource
from trainmedic_server.ports.verdicts import NoVerdicts, VerdictSource
from trainmedic_server.reports import curves
from trainmedic_server.reports.curves import GPU_CURVES_OVER, NO_PROMETHEUS, JobCurves, NodeReadings
from trainmedic_server.reports.evaluations import EVALUATED
from trainmedic_server.reports.failures import JOB_EVENTS
from trainmedic_server.reports.fleet import FleetReport, RunTally, fleet_report
from trainmedic_server.reports.job_figures import JobFigures
from trainmedic_server.reports.job_queries import JobQueries
from trainmedic_server.reports.job_report import (
    MOST_LISTED,
    JobRecords,
    JobReport,
    RepairRecord,
    job_report,
    repair_record,
)
from trainmedic_server.reports.repair_outcomes import PERSON_AFTER, RepairTally
from trainmedic_server.reports.reported_figures import ReportedFigures

MOST_RUNS = 20_000  # Newest runs. Counted, not retained in memory.
MOST_EVENTS = 20_000  # Newest events, about 10 MB.
MOST_FINDINGS = 2000
MOST_EVALUATIONS = 5000
LONGEST_PERIOD = timedelta(days=366)
COUNTED_PERIOD = timedelta(days=30)
_PROMETHEUS_TIMEOUT = timedelta(seconds=25)  # Less than the 30 s for which the command line waits.
log = telemetry.logger(__name__)


class ReportHistory(History, TallySource, Protocol):
    """Run history and counts of its runs."""


class ReportCompiler:
    """``metrics`` is None without a configured Prometheus."""

    def __init__(
        self,
        history: ReportHistory,
        metrics: MetricHistory | None = None,
        verdicts: VerdictSource | None = None,
        clock: Clock | None = None,
        findings: FindingHistory | None = None,
        reported: ReportedFigures | None = None,
    ) -> None:
        self.history = history
        self._findings = findings
        self._metrics = metrics
        self._verdicts = verdicts or NoVerdicts()
        self._clock = clock
        self._reported = reported

    @property
    def has_metrics(self) -> bool:
        return self._metrics is not None

    async def job(self, job: str, since: datetime, until: datetime) -> JobReport:
        """Raises NotFound if nothing is known of the job in that time, StoreUnavailable."""
        left_out: dict[str, str] = {}
        events = await self._events(since, until, left_out, job)
        repairs: deque[RepairRecord] = deque(maxlen=MOST_LISTED)
        count = 0
        async for run in self._runs(HistoryFilter(job=job, since=since, until=until), left_out):
            if run.status is not Status.NOT_STARTED:
                count += 1
                if len(repairs) < MOST_LISTED:
                    repairs.appendleft(repair_record(run))
        verdicts = await self._verdicts.verdicts(since, until, job)
        findings = await self._findings_of(job, since, until, left_out)
        evaluated = await self.history.events_of_jobs((EVALUATED,), since, until, MOST_EVALUATIONS, job)
        if len(evaluated) == MOST_EVALUATIONS:
            left_out["evaluations"] = f"only the newest {MOST_EVALUATIONS} evaluations were read"
        figures, no_metrics = await self._figures(job, since, until)
        if not (events or count or verdicts or findings or evaluated) and figures.progress is None:
            sources = "The history has" if no_metrics else "Prometheus and the history have"
            raise NotFound(f"{sources} nothing about job {job} in that time{f'; {no_metrics}' if no_metrics else ''}.")
        records = JobRecords(events, repairs, count, verdicts, left_out, findings, evaluated)
        return job_report(job, since, until, figures, records, no_metrics)

    async def curves(self, job: str, since: datetime, until: datetime) -> JobCurves:
        """Return curves from Prometheus, or from the job's reports if Prometheus has none."""
        found = await curves.of_job(self._metrics, job, since, until)
        if found.curves or self._reported is None:
            return found
        reported = self._reported.of_job(job, since, until, str(found.unknown))
        if reported is None:
            return found
        # Without curves in both, Prometheus may still have rank times or a checkpoint.
        return reported if reported.curves or found.source is None else found

    async def readings(self, node: str, now: datetime) -> NodeReadings:  # as `curves`
        found = await curves.of_node(self._metrics, node, now)
        if found.gpus or self._reported is None:
            return found
        return self._reported.of_node(node, now - GPU_CURVES_OVER, now, str(found.unknown)) or found

    async def fleet(self, since: datetime, until: datetime, person_after: timedelta = PERSON_AFTER) -> FleetReport:
        """`person_after` is the assumed time to a manual repair. Raises StoreUnavailable."""
        left_out: dict[str, str] = {}
        events = await self._events(since, until, left_out)
        runs = RunTally(RepairTally(await self.history.effects_between(since, until, MOST_RUNS), person_after))
        async for run in self._runs(HistoryFilter(since=since, until=until), left_out, "repaired"):
            runs.add(run)
        verdicts = [each for each in await self._verdicts.verdicts(since, until) if not each.is_slow]
        tallies = await self.history.tally(since, until)
        return fleet_report(since, until, events, runs, tallies, verdicts, left_out)

    async def recent_counts(self) -> dict[str, PlaybookTally]:
        """Count the last 30 days, from midnight UTC. Raises StoreUnavailable."""
        now = self._clock.now() if self._clock is not None else datetime.now(UTC)
        # Whole days are counted already.
        begin = datetime.combine((now.astimezone(UTC) - COUNTED_PERIOD).date(), time(), UTC)
        return dict(await self.history.tally(begin, now))

    async def _findings_of(
        self, job: str, since: datetime, until: datetime, left_out: dict[str, str]
    ) -> list[KnownFinding]:
        found: list[KnownFinding] = []
        cursor: str | None = None
        while self._findings is not None and len(found) < MOST_FINDINGS:
            page, cursor = await self._findings.findings_page(FindingFilter(job=job, since=since), 500, cursor)
            found += [each for each in page if each.first_at < until and each.last_at >= since]
            if cursor is None:
                return found
        if cursor is not None:
            for part in ("oom_events", "network_errors"):
                left_out[part] = f"only the newest {MOST_FINDINGS} findings were read"
        return found

    async def _events(
        self, since: datetime, until: datetime, left_out: dict[str, str], job: str | None = None
    ) -> list[Event]:
        events = await self.history.events_of_jobs(JOB_EVENTS, since, until, MOST_EVENTS, job)
        if len(events) == MOST_EVENTS:
            left_out["failures"] = f"only the newest {MOST_EVENTS} events of jobs were read"
        return events

    async def _runs(
        self, matching: HistoryFilter, left_out: dict[str, str], part: str = "repairs"
    ) -> AsyncIterator[Run]:
        count = 0
        async for run in self.history.stream(matching):
            if count == MOST_RUNS:
                left_out[part] = f"only the newest {MOST_RUNS} runs were read"
                return
            count += 1
            yield run

    async def _figures(self, job: str, since: datetime, until: datetime) -> tuple[JobFigures, str | None]:
        if self._metrics is None:
            return JobFigures(), NO_PROMETHEUS
        try:
            async with asyncio.timeout(_PROMETHEUS_TIMEOUT.total_seconds()):
                return await JobQueries(self._metrics, job, since, until).figures(), None
        except TimeoutError:
            reason = f"Prometheus did not answer within {_PROMETHEUS_TIMEOUT.total_seconds():g} s"
        except MetricsUnavailable as error:
            reason = str(error)
        log.warning("report lacks Prometheus figures", reason=reason)
        return JobFigures(), reason
