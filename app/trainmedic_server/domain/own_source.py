"""Labels that identify the server's own alerts."""

from __future__ import annotations

from collections.abc import Mapping

from trainmedic_logs.rules import alert_decisions

SOURCE = alert_decisions.SOURCE  # name of the label
LOG = alert_decisions.LOG  # its value for alerts of log findings
DIAGNOSIS = "diagnosis"  # its value for alerts of verdicts on jobs
NODE_SUSPECT = "NodeSuspect"  # alertname: verdicts on several jobs name the node


def is_own(labels: Mapping[str, str]) -> bool:
    """Return whether the labels are those of own alerts. Anyone can write them."""
    return labels.get(SOURCE) in (LOG, DIAGNOSIS)
