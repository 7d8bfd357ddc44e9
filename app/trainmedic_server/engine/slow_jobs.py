"""Verdicts on slow jobs, created while an alert reports slowness.

Prometheus has the ranks' median step parts and the slowest ranks' times; other ranks count as median. Without it, the
log's figures on data waits count. Without any figures, a throughput drop gives a hint, which raises no alert and
reaches no playbook; NCCL timeouts support it.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta

from trainmedic.wire import envelope
from trainmedic_logs.diagnosis import slow
from trainmedic_logs.diagnosis.attribution import evidence_of
from trainmedic_logs.diagnosis.slow import RankStep, ThroughputDrop
from trainmedic_logs.diagnosis.verdict import Confidence, Verdict
from trainmedic_logs.domain.finding import CauseClass, Role
from trainmedic_logs.domain.known_verdict import KnownVerdict
from trainmedic_server import telemetry
from trainmedic_server.domain import promql
from trainmedic_server.domain.alert import AlertRecord
from trainmedic_server.domain.job_verdict import SLOW_ALERTS, THROUGHPUT_DROP, JobVerdict
from trainmedic_server.engine import loops, verdict_alert
from trainmedic_server.engine.job_verdicts import JobVerdicts
from trainmedic_server.ports.metric_history import MetricHistory, MetricSeries
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.store import RunStore

AGAIN_AFTER = timedelta(minutes=15)  # Age of a verdict at which the next one is made, while the alert fires
_LOOK_EVERY = timedelta(seconds=10)
_AVERAGED_OVER = timedelta(minutes=5)  # as ``5m`` in queries
_LOG_AGE = timedelta(minutes=30)  # of findings that count
_MOST_FIRING, _MOST_JOBS = 10_000, 20  # alerts; jobs of one look
_PARTS = ("data", "compute", "wait")  # of a step, as in the names of metrics

log = telemetry.logger(__name__)


class SlowJobs:
    """`history` is None without Prometheus. `verdicts` receives the verdicts for playbooks."""

    def __init__(
        self,
        store: RunStore,
        history: MetricHistory | None,
        verdicts: JobVerdicts,
        clock: Clock,
        metrics: telemetry.Metrics,
        ids: Callable[[], str] = envelope.new_id,
    ) -> None:
        self._store = store
        self._history = history
        self._verdicts = verdicts
        self._clock = clock
        self._metrics = metrics
        self._ids = ids
        self._last_job = ""  # the last one looked at

    async def watch(self) -> None:
        await loops.repeat(self.look, _LOOK_EVERY, "slow jobs", self._metrics)

    async def look(self) -> None:
        """Make the due verdicts. Raises TrainmedicError."""
        firing = await self._store.transact(lambda tx: tx.firing(_MOST_FIRING, SLOW_ALERTS))
        dropped = _named_by(firing, {THROUGHPUT_DROP})
        jobs = sorted(_named_by(firing, SLOW_ALERTS))
        begin = bisect(jobs, self._last_job)  # in turn, so that no job waits permanently
        for job in [*jobs[begin:], *jobs[:begin]][:_MOST_JOBS]:
            self._last_job, now = job, self._clock.now()
            if await self._is_due(job, now):
                await self._update_verdict(job, now, has_dropped=job in dropped)

    async def _is_due(self, job: str, now: datetime) -> bool:
        last = await self._store.transact(lambda tx: tx.verdicts.of_job(job, 1, is_slow=True))
        return not last or now - last[0].made_at >= AGAIN_AFTER

    async def _update_verdict(self, job: str, now: datetime, *, has_dropped: bool) -> None:
        parts = await self._step_parts(job, now)
        if parts:
            verdict = slow.diagnose(parts)
        elif (by_log := await self._verdict_of_log(job, now, has_dropped=has_dropped)) is not None:
            verdict = by_log
        else:
            return
        plain = verdict.plain()
        is_hint = not parts and verdict.confidence is Confidence.LOW
        is_named = verdict.cause is not CauseClass.UNKNOWN and not is_hint  # raises an alert
        made = KnownVerdict(
            id=self._ids(),
            job=job,
            attempt=None,
            began_at=now,
            made_at=now,
            cause=verdict.cause.value,
            confidence=verdict.confidence.value,
            node=verdict.node,
            fingerprint=verdict.fingerprint,
            plain=plain,
            labels=verdict_alert.labels_of(job, plain) if is_named else None,
            tell_at=now if is_named else None,
        )
        await self._store.transact(lambda tx: tx.verdicts.save([made]))
        if not is_hint:
            self._verdicts.take(job, now, JobVerdict.of(plain), is_slow=True)
        log.info("job is slow", job=job, cause=made.cause, confidence=made.confidence, verdict=verdict.summary)

    async def _verdict_of_log(self, job: str, now: datetime, *, has_dropped: bool) -> Verdict | None:
        # Without figures, only a throughput drop gives a verdict, which is a hint.
        open_findings = await self._store.transact(lambda tx: tx.findings.all_open())
        findings = [
            each.as_finding
            for each in open_findings
            if job in (each.origin.job, each.target.job) and now - each.last_at <= _LOG_AGE
        ]
        waits = [each for each in findings if each.rule == slow.WAITS_FOR_DATA]
        if waits:
            return slow.by_own_figures([evidence_of(each, slow.WHY_WAITS) for each in waits])
        timeouts = [each for each in findings if each.role is Role.CASCADE and each.cause is CauseClass.HANG]
        if not has_dropped:
            return None
        return slow.by_throughput(ThroughputDrop(), [evidence_of(each, slow.WHY_TIMEOUT) for each in timeouts])

    async def _step_parts(self, job: str, now: datetime) -> dict[int, RankStep]:
        """Return each rank's step; empty if medians are missing."""
        medians: dict[str, float] = {}
        own: dict[int, tuple[float, str]] = {}  # seconds and node, of the slowest ranks
        data: dict[int, tuple[float, str]] = {}  # the part of them spent on data
        for part in _PARTS:
            for series in await self._query(f"max(avg_over_time(training_{part}_seconds{{$job}}[$over]))", job, now):
                medians[part] = _newest(series)
        for values, part in ((own, "own"), (data, "data")):
            for series in await self._query(f"avg_over_time(training_rank_{part}_seconds{{$job}}[$over])", job, now):
                rank = series.labels.get("rank", "")
                if rank.isdecimal() and len(rank) <= 7:  # others are no ranks
                    values[int(rank)] = (_newest(series), series.labels.get("rank_node", ""))
        size = await self._query("max(training_ranks{$job})", job, now)
        count = int(_newest(size[0])) if size else max(own, default=0) + 1
        if medians.keys() != set(_PARTS):
            return {}
        return _all_ranks(medians, own, data, min(count, 100_000))  # more would be a wrong metric

    async def _query(self, query: str, job: str, now: datetime) -> Sequence[MetricSeries]:
        if self._history is None:
            return []
        text = query.replace("$job", f"job_name={promql.quoted(job)}").replace("$over", "5m")
        read = await self._history.read(text, now, now, _AVERAGED_OVER)
        # A job can report NaN, which must not stop the verdicts on others.
        return [series for series in read if series.points and math.isfinite(_newest(series))]


def _named_by(firing: Sequence[AlertRecord], names: Collection[str]) -> set[str]:
    named = {record.alert.labels.get("job_name", "") for record in firing if record.alert.name in names}
    return named - {""}


def _all_ranks(
    medians: Mapping[str, float],
    own: Mapping[int, tuple[float, str]],
    data: Mapping[int, tuple[float, str]],
    count: int,
) -> dict[int, RankStep]:
    """Return the steps of all ranks. One with known own time waits for the rest."""
    usual = RankStep(medians["data"], medians["compute"], medians["wait"])
    parts = dict.fromkeys(range(max(count, 1)), usual)
    for rank, (seconds, node) in own.items():
        loading = min(data.get(rank, (usual.data, ""))[0], seconds)
        parts[rank] = RankStep(loading, seconds - loading, max(usual.step - seconds, 0.0), node=node)
    return parts


def _newest(series: MetricSeries) -> float:
    return series.points[-1][1]
