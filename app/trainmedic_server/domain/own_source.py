"""Labels that identify the server's own alerts."""

from __future__ import annotations

from collections.abc import Mapping

from trainmedic_logs.rules import finding_alerts

SOURCE = finding_alerts.SOURCE
LOG = finding_alerts.LOG
DIAGNOSIS = "diagnosis"
NODE_SUSPECT = "NodeSuspect"


def is_own(labels: Mapping[str, str]) -> bool:
    """Return whether the labels are those of own alerts. Anyone can write them."""
    return labels.get(SOURCE) in (LOG, DIAGNOSIS)
