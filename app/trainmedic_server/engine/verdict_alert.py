"""Labels and annotations of verdict alerts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from trainmedic_logs.domain.known_verdict import SLOW
from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.job_verdict import JobVerdict
from trainmedic_server.domain.own_source import DIAGNOSIS, NODE_SUSPECT, SOURCE

ALERTNAME = "TrainingFailed"
OF_SLOW = "TrainingSlow"  # alertname for slow jobs
RESTARTED_BY = "restarted_by"  # label for playbooks, which then need not restart the job
SUSPECT_WITHIN, SUSPECT_JOBS = timedelta(days=30), 3  # A node is suspect if verdicts on so many jobs name it


def labels_of(job: str, verdict: Mapping[str, Any], *, restarts: bool = False) -> dict[str, str]:
    """Return the labels for a verdict (`Verdict.plain`). `restarts`: a launcher reported another attempt."""
    is_slow = str(verdict.get("fingerprint", "")).startswith(SLOW)
    name, severity = (OF_SLOW, "warning") if is_slow else (ALERTNAME, "critical")
    labels = {"alertname": name, "severity": severity, "component": "training", SOURCE: DIAGNOSIS}
    labels |= {"job_name": job, "cause": str(verdict["cause"]), "confidence": str(verdict["confidence"])}
    labels |= {RESTARTED_BY: "launcher"} if restarts else {}
    return labels | ({"node": str(verdict["node"])} if verdict["node"] else {})


def labels_of_suspect(node: str) -> dict[str, str]:
    labels = {"alertname": NODE_SUSPECT, "severity": "warning", "component": "node", SOURCE: DIAGNOSIS}
    return {**labels, "node": node, "needs": "people"}  # no playbook handles it


def annotations_of(verdict: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: str(verdict.get(name) or "") for name in ("summary", "advice", "confidence")}
    texts["ranks"] = ", ".join(str(rank) for rank in verdict.get("ranks", ())[:100])
    texts["same_before"] = str(verdict.get("same_before", 0))
    return {name: text for name, text in texts.items() if text}


def verdict_of(alert: Alert) -> JobVerdict | None:
    # The reverse of `labels_of` and `annotations_of`. None for other alerts.
    if alert.name not in (ALERTNAME, OF_SLOW) or alert.labels.get(SOURCE) != DIAGNOSIS:
        return None
    listed = alert.annotations.get("ranks", "").replace(" ", "").split(",")
    ranks = [rank for rank in listed if rank.isdecimal() and len(rank) <= 7]  # others are no ranks
    return JobVerdict.of({**alert.annotations, **alert.labels, "node": alert.labels.get("node"), "ranks": ranks})
