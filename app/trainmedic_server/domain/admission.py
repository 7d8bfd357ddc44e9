"""Outcome of a delivery."""

from __future__ import annotations

from msgspec import Struct

from trainmedic_server.domain.alert import RejectedAlert
from trainmedic_server.domain.run import Decision


class PlaybookDecision(Struct, frozen=True):
    """One playbook's decision on one alert."""

    run_id: str
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
    runs: tuple[PlaybookDecision, ...] = ()
    duplicates: int = 0
    unmatched: int = 0
    truncated: int = 0
    rejected: tuple[RejectedAlert, ...] = ()
    ignored: tuple[tuple[str, str], ...] = ()
    """Malformed members without consequences, as (path, message)."""
