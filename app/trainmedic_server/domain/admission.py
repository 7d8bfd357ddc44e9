from __future__ import annotations

from msgspec import Struct

from trainmedic_server.domain.alert import RejectedAlert
from trainmedic_server.domain.run import Decision


class PlaybookDecision(Struct, frozen=True):
    run_id: str
    """ID of the run, or of the history item that says why none started."""
    playbook: str
    target: str  # Target key; empty if the labels name none
    decision: Decision
    why: str = ""


class Admission(Struct, frozen=True):
    """Durable outcome of one delivery; see `api.schemas.WebhookReply`."""

    delivery_id: str
    alerts: int
    runs: tuple[PlaybookDecision, ...] = ()
    duplicates: int = 0  # reports of alerts that were known to fire, or to have ended
    unmatched: int = 0  # alerts for which no playbook's conditions hold
    truncated: int = 0  # alerts that Alertmanager dropped
    rejected: tuple[RejectedAlert, ...] = ()
    ignored: tuple[tuple[str, str], ...] = ()  # as (path, message)
