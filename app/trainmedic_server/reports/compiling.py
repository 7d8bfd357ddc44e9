"""Compiles reports: asks the run store, Prometheus and whoever has verdicts, and hands it all to the pure modules.

A Prometheus that is not there, or does not answer in time, costs the report what only it knows; the reason is said.
Who calls it: the API (``server.reports``).
"""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

from trainmedic_server import telemetry
from trainmedic_server.domain.run import Run
from trainmedic_server.errors import MetricsUnavailable, NotFound
from trainmedic_server.ports.metric_history import MetricHistory
from trainmedic_server.ports.store import History, HistoryFilter
from trainmedic_server.ports.verdicts import NoVerdicts, VerdictSource
from trainmedic_server.reports.failures import JOB_EVENTS
from trainmedic_server.reports.fleet import FleetReport, fleet_report
from trainmedic_server.reports.job_figures import JobFigures
from trainmedic_server.reports.job_questions import JobQuestions
from trainmedic_server.reports.job_report import JobRecords, JobReport, job_report

MOST_RUNS = 20_000
"""Runs that are read for one report; the newest."""
MOST_EVENTS = 100_000
LONGEST = timedelta(days=366)
_PATIENCE = timedelta(seconds=25)
"""How long Prometheus may take for all questions of a report: whoever asks waits for 30 s."""
NO_PROMETHEUS = "no Prometheus is set (--prometheus-url)"

log = telemetry.logger(__name__)


class ReportCompiler:
    """``metrics`` is None where no Prometheus is set."""

    def __init__(
        self, history: History, metrics: MetricHistory | None = None, verdicts: VerdictSource | None = None
    ) -> None:
        self._history = history
        self._metrics = metrics
        self._verdicts = verdicts or NoVerdicts()

    async def job(self, job: str, since: datetime, until: datetime) -> JobReport:
        """The report on one job. Raises NotFound where nobody has heard of it in that time, StoreUnavailable."""
        events = await self._history.events_of_jobs(JOB_EVENTS, since, until, MOST_EVENTS, job)
        runs, left_out = await self._runs(HistoryFilter(job=job, since=since, until=until))
        verdicts = await self._verdicts.verdicts(since, until, job)
        figures, no_metrics = await self._figures(job, since, until)
        if not events and not runs and not verdicts and figures.progress is None:
            raise NotFound(
                f"Nothing has been heard of a job {job} in that time{f' ({no_metrics})' if no_metrics else ''}."
            )
        return job_report(job, since, until, figures, JobRecords(events, runs, verdicts, left_out), no_metrics)

    async def fleet(self, since: datetime, until: datetime) -> FleetReport:
        """The report on all jobs. Raises StoreUnavailable."""
        events = await self._history.events_of_jobs(JOB_EVENTS, since, until, MOST_EVENTS)
        runs, left_out = await self._runs(HistoryFilter(since=since, until=until))
        verdicts = await self._verdicts.verdicts(since, until)
        too_many = f"only the newest {MOST_RUNS} runs were read" if left_out else None
        return fleet_report(since, until, events, runs, verdicts, too_many)

    async def _runs(self, matching: HistoryFilter) -> tuple[list[Run], int]:
        """The runs, oldest first, and how many there were beyond `MOST_RUNS`, as far as they were counted."""
        runs: list[Run] = []
        async for run in self._history.stream(matching):
            if len(runs) == MOST_RUNS:
                return runs[::-1], 1
            runs.append(run)
        return runs[::-1], 0

    async def _figures(self, job: str, since: datetime, until: datetime) -> tuple[JobFigures, str | None]:
        """What Prometheus has, or why it has nothing to say."""
        if self._metrics is None:
            return JobFigures(), NO_PROMETHEUS
        try:
            async with asyncio.timeout(_PATIENCE.total_seconds()):
                return await JobQuestions(self._metrics, job, since, until).figures(), None
        except TimeoutError:
            reason = f"Prometheus did not answer within {_PATIENCE.total_seconds():g} s"
        except MetricsUnavailable as error:
            reason = str(error)
        log.warning("a report lacks what Prometheus knows", reason=reason)
        return JobFigures(), reason
