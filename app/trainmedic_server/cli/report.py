"""``trainmedic report``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    unit = f" {words.plain(report.get('throughput_unit'))}"

    def part(name: str, key: str, lines: Callable[[Any], Iterator[str]]) -> Iterator[str]:
        """Yield a figure, or why it is unknown, and its details."""
        # `lines` yields the figure first, then the details.
        value = report.get(key)
        shown = iter(()) if value in (None, {}, []) else lines(value)
        yield _figure(name, next(shown, None), unknown.get(key))
        yield from shown

    yield from part("GPUs", "gpus", _plain)
    yield from part("GPU utilisation", "gpu_utilization", functools.partial(_spread, unit=" %"))
    yield from part("GPU memory", "gpu_memory", functools.partial(_spread, unit=" %"))
    yield from part("throughput", "throughput", functools.partial(_spread, unit=unit))
    yield from part("baseline", "baseline", functools.partial(_baseline, unit=unit))
    yield from part("efficiency", "efficiency", _efficiency)
    yield from part("goodput", "goodput", _goodput)
    yield from part("a step is", "step_shares", _shares)
    yield from part("bottleneck", "bottleneck", _bottleneck)
    yield from part("CPU of a rank", "cpu", _cpu)
    yield from part("evaluations", "evaluations", _evaluations)
    yield from _anomaly_lines(report, unknown.get("anomalies"))
    if unknown.get("gpu_anomalies"):
        yield f"  of GPUs: -{_because(unknown['gpu_anomalies'])}"
    yield from part("out of memory", "oom_events", _errors)
    yield from part("network errors", "network_errors", _errors)
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


def _plain(value: object) -> Iterator[str]:
    yield words.plain(value)


def _spread(spread: Mapping[str, float], unit: str) -> Iterator[str]:
    yield f"{spread['average']:.4g}{unit} on average, {spread['min']:.4g} to {spread['max']:.4g}"


def _baseline(baseline: Mapping[str, Any], unit: str) -> Iterator[str]:
    if baseline["of"] == "target":
        yield f"{baseline['value']:.4g}{unit}, the target that the job declares"
        return
    of = "its first stable hour" if baseline["of"] == "first_stable_hour" else f"its first {baseline['points']} points"
    yield f"{baseline['value']:.4g}{unit}, the median of {of}, from {times.stamp(baseline['since'])}"


def _efficiency(score: Mapping[str, Any]) -> Iterator[str]:
    share = score.get("throughput_share")
    limit = f", because the throughput is {share:.0%} of the baseline" if score.get("limited_by") else ""
    yield f"{score['score']:g} ({words.plain(score['rating'])}{limit})"


def _down(seconds: float | None, not_back: int) -> str:
    parts = ([] if seconds is None else [times.span(seconds)]) + ([f"{not_back} not back"] if not_back else [])
    return ", ".join(parts)


def _goodput(goodput: Mapping[str, Any]) -> Iterator[str]:
    yield f"{goodput['ratio']:.1%} of {times.span(goodput['wall_seconds'])} went into training"
    lost = {name: goodput["lost"].get(name, 0.0) for name in _LOST_PARTS}
    parts = [f"{name} {times.span(seconds)}" for name, seconds in lost.items() if seconds]
    if parts:
        yield f"{'':17}lost: {', '.join(parts)}"
    if goodput["unmeasured_seconds"]:
        yield f"{'':17}not measured: {times.span(goodput['unmeasured_seconds'])}"


def _shares(shares: Mapping[str, float | None]) -> Iterator[str]:
    names = {"data": "waiting for data", "compute": "computing", "wait": "waiting for other ranks"}
    parts = []
    for name, text in names.items():
        share = shares.get(name)
        parts.append(f"? {text}" if share is None else f"{share:.0%} {text}")
    yield ", ".join(parts)


def _bottleneck(bottleneck: Mapping[str, Any]) -> Iterator[str]:
    yield f"{words.plain(bottleneck['kind'])} ({words.plain(bottleneck['severity'])})"
    for text in (*bottleneck["reasons"], *bottleneck["advice"]):
        yield f"{'':17}{words.plain(text)}"


def _cpu(cpu: Mapping[str, Any]) -> Iterator[str]:
    known = [*cpu["highest"], *cpu["lowest"]]
    cores = [each["cores"] for each in known]
    extremes = f", {min(cores):.3g} to {max(cores):.3g}" if cores else ""
    yield f"{cpu['median_cores']:.3g} cores busy (median){extremes}"
    for each in known:
        if each["is_outlier"]:
            yield f"{'':17}rank {words.plain(each['rank'])} on {words.plain(each['node'])}: {each['cores']:.3g} cores"


def _evaluations(evaluations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"{len(evaluations)} metric(s)"
    for each in evaluations:
        value = words.plain(each["problem"]) if each["value"] is None else f"{each['value']:.6g}"
        step = "" if each["step"] is None else f" at step {each['step']}"
        spread = (
            "" if each["reports"] < 2 or each["lowest"] is None else f", {each['lowest']:.6g} to {each['highest']:.6g}"
        )
        yield f"  {times.stamp(each['at'])}  {words.plain(each['metric'])}: {value}{step}{spread}"


def _errors(errors: Mapping[str, Any]) -> Iterator[str]:
    yield f"{errors['count']}, of which {errors['fatal']} ended the job"
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
