"""What ``trainmedic report`` prints of nodes and repairs, over all jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainmedic_server.cli import table
from trainmedic_server.presentation import times, words

_PLAYBOOK = ("PLAYBOOK", "STARTED", "HELPED", "FAILED", "TIMED OUT", "UNDONE", "REJECTED", "HELD BACK", "AGAIN")
_COUNTS = ("started", "helped", "failed", "timed_out", "undone_by_hand", "rejected", "held_back", "repeated")


def worth_lines(report: Mapping[str, Any]) -> Iterator[str]:
    unknown = report.get("unknown") or {}
    yield from _nodes(report)
    yield ""
    repairs = report.get("repairs") or []
    yield "repairs:" + ("" if repairs else " none")
    if repairs:
        rows = [(repair["playbook"], *(repair[name] for name in _COUNTS), *_times(repair)) for repair in repairs]
        yield from table.rows((*_PLAYBOOK, "TOOK", "PERSON"), rows, 120)
    yield ""
    causes = report.get("repaired") or []
    reason = unknown.get("repaired")
    yield "runs, by cause:" + ("" if causes else " none") + (f" ({words.plain(reason)})" if reason else "")
    if causes:
        of_causes = [
            tuple(cause[name] for name in ("cause", "runs", "succeeded", "failed", "helped")) for cause in causes
        ]
        yield from table.rows(("CAUSE", "RUNS", "SUCCEEDED", "FAILED", "HELPED"), of_causes, 100)
    yield ""
    kept = report.get("gpu_hours_kept")
    if kept:
        yield f"GPU-hours kept: {kept['gpu_hours']:g}, by {kept['runs']} runs; not counted: {kept['uncounted']}"
        yield f"  formula: {words.plain(kept['formula'])}"
        for assumption in kept["assumptions"]:
            yield f"  assumed: {words.plain(assumption)}"
        if kept["median_person_seconds"] is not None:
            yield f"  people who were asked answered after {times.span(kept['median_person_seconds'])} (median)"


def _nodes(report: Mapping[str, Any]) -> Iterator[str]:
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


def _times(repair: Mapping[str, Any]) -> tuple[str, str]:
    return times.span(repair["median_seconds"]), times.span(repair["median_person_seconds"])
