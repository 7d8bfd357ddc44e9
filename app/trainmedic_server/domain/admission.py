"""Outcome of a delivery."""

from __future__ import annotations

from msgspec import Struct

from trainmedic_server.domain.alert import RejectedAlert
from trainmedic_server.domain.run import Decision


class PlaybookDecision(Struct, frozen=True):
    """One playbook's decision on one alert."""

    run_id: str
    """The run started or joined, or the history item that explains why none was."""
    playbook: str
    target: str
    """Target key; empty if the labels name none."""
    decision: Decision
    why: str = ""
    """For a person; empty if the decision needs no explanation."""


class Admission(Struct, frozen=True):
    """Outcome of one delivery. All of it is durable."""

    delivery_id: str
    alerts: int
    """Number of alerts, malformed ones included."""
    runs: tuple[PlaybookDecision, ...] = ()
    """In the order of the alerts."""
    duplicates: int = 0
    """Number of alerts already known in the same status."""
    unmatched: int = 0
    """Number of alerts without a reacting playbook."""
    truncated: int = 0
    """Number of alerts that Alertmanager omitted."""
    rejected: tuple[RejectedAlert, ...] = ()
    """Malformed alerts, on which nothing was decided."""
    ignored: tuple[tuple[str, str], ...] = ()
    """Malformed members without consequences, as (path, message)."""
