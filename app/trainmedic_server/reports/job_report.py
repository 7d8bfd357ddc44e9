from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from trainmedic_logs.domain.known_finding import KnownFinding
from trainmedic_server.domain.run import Event, Run
from trainmedic_server.ports.verdicts import VerdictRecord
from trainmedic_server.reports import anomalies, bottleneck, efficiency, goodput
from trainmedic_server.reports.anomalies import AnomalyRecord
from trainmedic_server.reports.bottleneck import Bottleneck, StepShares
from trainmedic_server.reports.cpu_use import CpuUse
from trainmedic_server.reports.efficiency import Efficiency, UsualThroughput
from trainmedic_server.reports.error_events import NETWORK, NOTHING_READ, OUT_OF_MEMORY, ErrorCount, error_count
from trainmedic_server.reports.evaluations import NONE_REPORTED, EvaluationRecord, evaluation_records
from trainmedic_server.reports.failures import RESTARTED, FailureRecord, failures_of, moments
from trainmedic_server.reports.goodput import Goodput
from trainmedic_server.reports.job_figures import JobFigures
from trainmedic_server.reports.points import Spread

MOST_LISTED = 200  # Newest failures, slow periods and repairs.


@dataclass(frozen=True, slots=True)
class TimeRange:
    since: datetime
    until: datetime


@dataclass(frozen=True, slots=True)
class RepairRecord:
    """A run of a playbook on the job."""

    run_id: str
    playbook: str
    alert: str
    at: datetime
    ended_at: datetime | None
    status: str
    mode: str
    action_taken: str | None  # Names of the applied actions; None if none was.


@dataclass(frozen=True, slots=True)
class JobReport:
    """Report on one job. Shares and ratios are from 0 to 1, use of GPUs in percent, durations in seconds, times in
    UTC.
    """

    job: str
    time_range: TimeRange
    gpus: int | None
    gpu_utilization: Spread | None
    gpu_memory: Spread | None
    throughput: Spread | None
    throughput_unit: str | None
    baseline: UsualThroughput | None
    efficiency: Efficiency | None
    goodput: Goodput | None
    step_shares: StepShares | None
    bottleneck: Bottleneck | None
    anomalies: tuple[AnomalyRecord, ...]
    anomaly_count: int | None
    failures: tuple[FailureRecord, ...]
    failure_count: int
    restart_count: int
    slow: tuple[VerdictRecord, ...]
    repairs: tuple[RepairRecord, ...]
    repair_count: int
    oom_events: ErrorCount | None
    network_errors: ErrorCount | None
    cpu: CpuUse | None
    evaluations: tuple[EvaluationRecord, ...] | None
    unknown: Mapping[str, str]  # Reasons, by field that is None or incomplete.


@dataclass(frozen=True, slots=True)
class JobRecords:
    """Records of a job in the run store, oldest first; findings newest first."""

    events: Sequence[Event] = ()
    repairs: Sequence[RepairRecord] = ()
    repair_count: int = 0
    verdicts: Sequence[VerdictRecord] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Reasons by incomplete part of the report."""
    findings: Sequence[KnownFinding] = ()
    evaluated: Sequence[Event] = ()  # Events ``job_evaluated``.


def job_report(
    job: str, since: datetime, until: datetime, figures: JobFigures, records: JobRecords, no_metrics: str | None
) -> JobReport:
    """`no_metrics` is why Prometheus was not queried or did not answer."""
    usual = figures.baseline
    share = figures.throughput.average / usual.value if figures.throughput and usual else None
    score = None
    if figures.utilisation and figures.throughput and usual:
        score = efficiency.efficiency(figures.utilisation.average, figures.throughput.average, usual.value)
    hints = bottleneck.log_hints(records.findings)
    failures = failures_of(records.events, [verdict for verdict in records.verdicts if not verdict.is_slow])
    # Without a finding it is unknown whether its log is read at all.
    oom = network = None
    if records.findings:
        is_known = bool(records.events) or figures.progress is not None
        oom = error_count(OUT_OF_MEMORY, records.findings, failures, are_failures_known=is_known)
        network = error_count(NETWORK, records.findings, failures, are_failures_known=is_known)
    report: dict[str, object] = {
        "gpus": figures.gpus,
        "gpu_utilization": figures.utilisation,
        "gpu_memory": figures.memory,
        "throughput": figures.throughput,
        "baseline": usual,
        "efficiency": score,
        "goodput": _goodput(figures, records, since, until),
        "step_shares": figures.shares,
        "bottleneck": bottleneck.bottleneck(figures.shares, figures.straggler, figures.memory_use, share, hints),
        "oom_events": oom,
        "network_errors": network,
        "cpu": figures.cpu,
    }
    every_anomaly = [*figures.anomalies, *(figures.gpu_anomalies or ())]
    evaluations = evaluation_records(records.evaluated)
    return JobReport(
        job=job,
        time_range=TimeRange(since, until),
        **report,  # type: ignore[arg-type]
        throughput_unit=figures.unit,
        anomalies=tuple(anomalies.newest(every_anomaly)),
        anomaly_count=len(every_anomaly) if figures.progress else None,
        failures=tuple(failures[-MOST_LISTED:]),
        failure_count=len(failures),
        slow=tuple([verdict for verdict in records.verdicts if verdict.is_slow][-MOST_LISTED:]),
        restart_count=sum(event.kind == RESTARTED for event in records.events),
        repairs=tuple(records.repairs),
        repair_count=records.repair_count,
        evaluations=evaluations or None,
        unknown={
            **_reasons_for_none(report, figures, no_metrics),
            **({} if evaluations else {"evaluations": NONE_REPORTED}),
            **records.left_out,
        },
    )


def _goodput(figures: JobFigures, records: JobRecords, since: datetime, until: datetime) -> Goodput | None:
    if figures.progress is None:
        return None
    return goodput.goodput(
        figures.progress, moments(records.events), since.timestamp(), until.timestamp(), figures.every
    )


def _reasons_for_none(report: Mapping[str, object], figures: JobFigures, no_metrics: str | None) -> dict[str, str]:
    missing = {name for name, value in report.items() if value is None}
    without_logs = dict.fromkeys(sorted(missing & {"oom_events", "network_errors"}), NOTHING_READ)
    missing -= without_logs.keys()
    if no_metrics is None and figures.progress is None:
        no_metrics = "Prometheus has no metrics of this job in that time"
    if no_metrics is not None:
        return {**dict.fromkeys(sorted(missing | {"anomalies"}), no_metrics), **without_logs}
    no_gpus = (
        "Prometheus has no trainmedic_job_gpu of this job: the server's metrics are not scraped, or no rank has "
        "reported which GPU it uses"
    )
    no_gpu_metrics = figures.no_gpus or "Prometheus has no such metric of its GPUs"
    if figures.gpus is None:
        no_gpu_metrics = no_gpus
    no_throughput = no_baseline = "the job reports neither samples nor tokens"
    if figures.throughput:
        no_baseline = f"it has reported its throughput for less than {efficiency.FEWEST_POINTS} intervals"
    inputs = [name for name in ("gpu_utilization", "throughput", "baseline") if name in missing]
    no_efficiency = f"it is computed from {', '.join(inputs)}, also unknown"
    if inputs == ["baseline"]:
        no_efficiency = "there is no baseline to rate it against"
    no_shares = no_bottleneck = "the job does not report what its steps wait for"
    if figures.shares is not None:
        unmeasured = "other ranks" if figures.shares.wait is None else "batches"
        no_bottleneck = f"waiting for {unmeasured} is not measured, so it cannot be distinguished from computing"
    reasons = {
        "gpus": no_gpus,
        "gpu_utilization": no_gpu_metrics,
        "gpu_memory": no_gpu_metrics,
        "throughput": no_throughput,
        "baseline": no_baseline,
        "efficiency": no_efficiency,
        "goodput": "the job reports no steps",
        "step_shares": no_shares,
        "bottleneck": no_bottleneck,
        "cpu": "the job does not report the CPU use of its ranks: its SDK is too old, or it does not run on Linux",
        "gpu_anomalies": f"utilisation and memory use of its GPUs are unknown: {no_gpu_metrics}",
    }
    if figures.gpu_anomalies is None:
        missing.add("gpu_anomalies")
    return {**{name: reasons[name] for name in sorted(missing)}, **without_logs}


def repair_record(run: Run) -> RepairRecord:
    return RepairRecord(
        run.id,
        run.playbook,
        run.alert_name,
        run.created_at,
        run.ended_at,
        run.status.value,
        run.mode.value,
        run.action_taken,
    )
