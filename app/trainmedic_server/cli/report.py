"""``trainmedic report``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import click

from trainmedic_core import words
from trainmedic_core.cli import exits, table
from trainmedic_core.cli.output import output_option, print_document
from trainmedic_server.cli.client import Client, server_options
from trainmedic_server.cli.params import TimeParam
from trainmedic_server.presentation import times

_SHOWN = 10
_PLAYBOOK_HEADER = ("PLAYBOOK", "STARTED", "HELPED", "FAILED", "TIMED OUT", "UNDONE", "REJECTED", "BLOCKED", "AGAIN")
_PLAYBOOK_COUNTS = ("started", "helped", "failed", "timed_out", "undone_by_hand", "rejected", "held_back", "repeated")
_LOST_PARTS = ("failures", "restarts", "redone", "checkpoints", "evaluations", "repairs", "stalls", "other")


@click.command()
@click.argument("job", metavar="[JOB]", required=False)
@click.option("--fleet", is_flag=True, help="For all jobs. Default without JOB.")
@click.option("--since", type=TimeParam(), metavar="TIME", help="Start. [default: 24h for a job, 7d for all]")
@click.option("--until", type=TimeParam(), metavar="TIME", help="End. [default: now]")
@click.option("--person-after", metavar="DURATION", help="Assumed delay of a repair by a person. [default: 30m]")
@output_option()
@server_options
def report(
    client: Client,
    job: str | None,
    fleet: bool,
    since: str | None,
    until: str | None,
    person_after: str | None,
    output: str,
) -> None:
    """Show the use of a job's time: GPU utilisation, share of training, delays and failures. Without JOB, for all jobs:
    causes and cost of failures, nodes that fail repeatedly, and the benefit of repairs.

    A time is a time (2026-01-31T12:00:00Z) or a duration before now (90m, 7d). Unknown figures are '-', with the
    reason.
    """
    if job is not None and (fleet or person_after):
        raise exits.InvalidInput("--fleet and --person-after need the report for all jobs; omit JOB.")
    given = (("since", since), ("until", until), ("person_after", person_after))
    query = {name: time for name, time in given if time is not None}
    document = client.get("report" if job is None else f"jobs/{quote(job)}/report", query)
    print_document(document, output, _fleet_lines if job is None else _job_lines)


def _job_lines(report: Mapping[str, Any]) -> Iterator[str]:
    unknown = report.get("unknown") or {}
    yield f"{words.plain(report.get('job'))}  {_range(report)}"
    yield ""
    yield _figure("GPUs", _plain(report.get("gpus")), unknown.get("gpus"))
    yield _figure("GPU utilisation", _spread(report.get("gpu_utilization"), " %"), unknown.get("gpu_utilization"))
    yield _figure("GPU memory", _spread(report.get("gpu_memory"), " %"), unknown.get("gpu_memory"))
    unit = f" {words.plain(report.get('throughput_unit'))}"
    yield _figure("throughput", _spread(report.get("throughput"), unit), unknown.get("throughput"))
    yield _figure("baseline", _baseline(report.get("baseline"), unit), unknown.get("baseline"))
    yield _figure("efficiency", _efficiency(report.get("efficiency")), unknown.get("efficiency"))
    yield from _goodput_lines(report.get("goodput"), unknown.get("goodput"))
    shares = report.get("step_shares")
    yield _figure("a step is", shares and _shares(shares), unknown.get("step_shares"))
    yield from _bottleneck_lines(report.get("bottleneck"), unknown.get("bottleneck"))
    yield from _cpu_lines(report.get("cpu"), unknown.get("cpu"))
    yield from _evaluation_lines(report.get("evaluations"), unknown.get("evaluations"))
    yield from _anomaly_lines(report, unknown.get("anomalies"))
    if unknown.get("gpu_anomalies"):
        yield f"  of GPUs: -{_because(unknown['gpu_anomalies'])}"
    yield from _error_lines("out of memory", report.get("oom_events"), unknown.get("oom_events"))
    yield from _error_lines("network errors", report.get("network_errors"), unknown.get("network_errors"))
    yield from _failure_lines(report)
    yield from _slow_lines(report)
    yield from _repair_lines(report)


def _fleet_lines(report: Mapping[str, Any]) -> Iterator[str]:
    unknown = report.get("unknown") or {}
    yield f"all jobs  {_range(report)}"
    yield ""
    yield f"failures: {report.get('failures', 0)}" + _because(unknown.get("causes"))
    causes = [
        (
            cause["cause"],
            cause["failures"],
            cause["jobs"],
            _down(cause["down_seconds"], cause.get("not_back", 0)),
            "-" if cause["lost_gpu_hours"] is None else f"{cause['lost_gpu_hours']:g}",
            cause["uncounted"] or "",
        )
        for cause in report.get("causes", ())
    ]
    if causes:
        yield from table.rows(("CAUSE", "FAILURES", "JOBS", "DOWN", "GPU-HOURS", "NOT COUNTED"), causes, 100)
    yield ""
    yield from _repair_lines_of_fleet(report)


def _range(report: Mapping[str, Any]) -> str:
    covered = report.get("time_range") or {}
    return f"{times.stamp(covered.get('since'))} to {times.stamp(covered.get('until'))}"


def _figure(name: str, value: str | None, reason: str | None) -> str:
    return f"{name + ':':17}{value or '-' + _because(reason)}"


def _because(reason: str | None) -> str:
    return f" ({words.plain(reason)})" if reason else ""


def _plain(value: object) -> str | None:
    return None if value is None else words.plain(value)


def _spread(spread: Mapping[str, float] | None, unit: str) -> str | None:
    if spread is None:
        return None
    return f"{spread['average']:.4g}{unit} on average, {spread['min']:.4g} to {spread['max']:.4g}"


def _baseline(baseline: Mapping[str, Any] | None, unit: str) -> str | None:
    if baseline is None:
        return None
    if baseline["of"] == "target":
        return f"{baseline['value']:.4g}{unit}, the target that the job declares"
    of = "its first stable hour" if baseline["of"] == "first_stable_hour" else f"its first {baseline['points']} points"
    return f"{baseline['value']:.4g}{unit}, the median of {of}, from {times.stamp(baseline['since'])}"


def _efficiency(score: Mapping[str, Any] | None) -> str | None:
    if score is None:
        return None
    share = score.get("throughput_share")
    limit = f", because the throughput is {share:.0%} of the baseline" if score.get("limited_by") else ""
    return f"{score['score']:g} ({words.plain(score['rating'])}{limit})"


def _down(seconds: float | None, not_back: int) -> str:
    parts = ([] if seconds is None else [times.span(seconds)]) + ([f"{not_back} not back"] if not_back else [])
    return ", ".join(parts)


def _goodput_lines(goodput: Mapping[str, Any] | None, reason: str | None) -> Iterator[str]:
    if goodput is None:
        yield _figure("goodput", None, reason)
        return
    wall = goodput["wall_seconds"]
    yield _figure("goodput", f"{goodput['ratio']:.1%} of {times.span(wall)} went into training", None)
    lost = {name: goodput["lost"].get(name, 0.0) for name in _LOST_PARTS}
    parts = [f"{name} {times.span(seconds)}" for name, seconds in lost.items() if seconds]
    if parts:
        yield f"{'':17}lost: {', '.join(parts)}"
    if goodput["unmeasured_seconds"]:
        yield f"{'':17}not measured: {times.span(goodput['unmeasured_seconds'])}"


def _shares(shares: Mapping[str, float | None]) -> str:
    names = {"data": "waiting for data", "compute": "computing", "wait": "waiting for other ranks"}
    parts = []
    for name, text in names.items():
        share = shares.get(name)
        parts.append(f"? {text}" if share is None else f"{share:.0%} {text}")
    return ", ".join(parts)


def _bottleneck_lines(bottleneck: Mapping[str, Any] | None, reason: str | None) -> Iterator[str]:
    if bottleneck is None:
        yield _figure("bottleneck", None, reason)
        return
    yield _figure("bottleneck", f"{words.plain(bottleneck['kind'])} ({words.plain(bottleneck['severity'])})", None)
    for text in (*bottleneck["reasons"], *bottleneck["advice"]):
        yield f"{'':17}{words.plain(text)}"


def _cpu_lines(cpu: Mapping[str, Any] | None, reason: str | None) -> Iterator[str]:
    if cpu is None:
        yield _figure("CPU of a rank", None, reason)
        return
    known = [*cpu["highest"], *cpu["lowest"]]
    cores = [each["cores"] for each in known]
    extremes = f", {min(cores):.3g} to {max(cores):.3g}" if cores else ""
    yield _figure("CPU of a rank", f"{cpu['median_cores']:.3g} cores busy (median){extremes}", None)
    for each in known:
        if each["is_outlier"]:
            yield f"{'':17}rank {words.plain(each['rank'])} on {words.plain(each['node'])}: {each['cores']:.3g} cores"


def _evaluation_lines(evaluations: Sequence[Mapping[str, Any]] | None, reason: str | None) -> Iterator[str]:
    if not evaluations:
        yield _figure("evaluations", None, reason)
        return
    yield _figure("evaluations", f"{len(evaluations)} metric(s)", None)
    for each in evaluations:
        value = words.plain(each["problem"]) if each["value"] is None else f"{each['value']:.6g}"
        step = "" if each["step"] is None else f" at step {each['step']}"
        spread = (
            "" if each["reports"] < 2 or each["lowest"] is None else f", {each['lowest']:.6g} to {each['highest']:.6g}"
        )
        yield f"  {times.stamp(each['at'])}  {words.plain(each['metric'])}: {value}{step}{spread}"


def _error_lines(name: str, errors: Mapping[str, Any] | None, reason: str | None) -> Iterator[str]:
    if errors is None:
        yield _figure(name, None, reason)
        return
    yield _figure(name, f"{errors['count']}, of which {errors['fatal']} ended the job", None)
    yield from _dated([(each["at"], "+".join(each["causes"]), _error(each)) for each in errors["events"][-_SHOWN:]])


def _error(event: Mapping[str, Any]) -> str:
    ranks = [str(rank) for rank in event["ranks"][:8]]
    more = event["rank_count"] - len(ranks)
    who = f"rank(s) {', '.join(ranks)}{f' and {more} more' if more > 0 else ''}" if ranks else "ranks unknown"
    ends = {
        True: "the job failed",
        False: "the job reported no failure from it",
        None: "unknown whether it ended the job",
    }
    lines = f"{event['lines']} line(s)" if event["lines"] else "only in the verdict"
    return f"{who}, {lines}; {ends[event['ended_job']]}"


def _anomaly_lines(report: Mapping[str, Any], reason: str | None) -> Iterator[str]:
    listed = report.get("anomalies", ())
    count = report.get("anomaly_count")
    yield ""
    yield _figure("anomalies", None if count is None else str(count), reason)
    yield from _dated([(each["since"], each["kind"], each["summary"]) for each in listed[:_SHOWN]])


def _failure_lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield _figure("failures", f"{report.get('failure_count', 0)}, restarts {report.get('restart_count', 0)}", None)
    lines = []
    for failure in report.get("failures", ())[-_SHOWN:]:
        verdict = failure.get("verdict")
        why = f"{verdict['cause']} ({verdict['confidence']}): {verdict['summary']}" if verdict else failure["reason"]
        down = "" if failure["down_seconds"] is None else f", down for {times.span(failure['down_seconds'])}"
        lines.append((failure["at"], failure["kind"], why + down))
    yield from _dated(lines)


def _slow_lines(report: Mapping[str, Any]) -> Iterator[str]:
    verdicts = report.get("slow", ())
    if verdicts:
        yield _figure("slow", f"{len(verdicts)} verdicts", None)
        yield from _dated([(each["at"], each["cause"], each["summary"]) for each in verdicts[-_SHOWN:]])


def _repair_lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield _figure("repairs", str(report.get("repair_count", 0)), None)
    yield from _dated(
        [
            (repair["at"], repair["playbook"], f"{repair['status']}: {repair['action_taken'] or 'nothing done'}")
            for repair in report.get("repairs", ())[-_SHOWN:]
        ]
    )


def _dated(lines: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    for at, kind, text in lines:
        yield f"  {times.stamp(at)}  {words.plain(kind)}: {words.plain(text)}"


def _repair_lines_of_fleet(report: Mapping[str, Any]) -> Iterator[str]:
    unknown = report.get("unknown") or {}
    yield from _node_lines(report)
    yield ""
    repairs = report.get("repairs") or []
    yield "repairs:" + ("" if repairs else " none")
    if repairs:
        rows = [
            (repair["playbook"], *(repair[name] for name in _PLAYBOOK_COUNTS), *_repair_times(repair))
            for repair in repairs
        ]
        yield from table.rows((*_PLAYBOOK_HEADER, "TOOK", "PERSON"), rows, 120)
    yield ""
    causes = report.get("repaired") or []
    reason = unknown.get("repaired")
    yield "runs, by cause:" + ("" if causes else " none") + (f" ({words.plain(reason)})" if reason else "")
    if causes:
        of_causes = [
            (
                *(cause[name] for name in ("cause", "runs", "succeeded", "failed")),
                f"{cause['helped']} of {cause.get('measured', '?')}",  # earlier servers do not send `measured`
            )
            for cause in causes
        ]
        yield from table.rows(("CAUSE", "RUNS", "SUCCEEDED", "FAILED", "HELPED OF MEASURED"), of_causes, 100)
    yield ""
    kept = report.get("gpu_hours_kept")
    if kept:
        yield f"GPU-hours kept: {kept['gpu_hours']:g}, by {kept['runs']} runs; not counted: {kept['uncounted']}"
        yield f"  formula: {words.plain(kept['formula'])}"
        for assumption in kept["assumptions"]:
            yield f"  assumed: {words.plain(assumption)}"
        if kept["median_person_seconds"] is not None:
            yield f"  people who were asked answered after {times.span(kept['median_person_seconds'])} (median)"


def _node_lines(report: Mapping[str, Any]) -> Iterator[str]:
    nodes = [
        (
            node["node"],
            node["alerts"],
            node["verdicts"],
            node["touched"],
            node["came_back"],
            times.span(node["mtbi_seconds"]),
            ", ".join(node["alert_names"]),
        )
        for node in report.get("nodes", ())
    ]
    yield "nodes that keep failing:" + ("" if nodes else " none")
    if nodes:
        yield from table.rows(("NODE", "ALERTS", "VERDICTS", "TOUCHED", "CAME BACK", "MTBI", "WHICH"), nodes, 120)


def _repair_times(repair: Mapping[str, Any]) -> tuple[str, str]:
    return times.span(repair["median_seconds"]), times.span(repair["median_person_seconds"])
