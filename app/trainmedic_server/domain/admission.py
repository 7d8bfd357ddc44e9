"""What became of a delivery: the reply to Alertmanager, as a value.

Who calls it: the engine makes it once the delivery is durable, the webhook writes it as JSON.
"""

from __future__ import annotations

from msgspec import Struct

from trainmedic_server.domain.alert import RejectedAlert
from trainmedic_server.domain.run import Decision


class PlaybookDecision(Struct, frozen=True):
    """One playbook's decision on one alert."""

    run_id: str
    """The run that was started or joined, or the item of the history that says why not."""
    playbook: str
    """The playbook's name."""
    target: str
    """The target's key; empty where the labels name none."""
    decision: Decision
    why: str = ""
    """For a person; empty where the decision says it all."""


class Admission(Struct, frozen=True):
    """The outcome of one delivery: everything in it is durable."""

    delivery_id: str
    """The id that the webhook gave the delivery."""
    alerts: int
    """Number of its alerts, malformed ones included."""
    runs: tuple[PlaybookDecision, ...] = ()
    """The decisions, in the order of the alerts."""
    duplicates: int = 0
    """How many alerts were known in the same status already."""
    unmatched: int = 0
    """How many alerts no playbook reacts to."""
    truncated: int = 0
    """How many alerts Alertmanager left out."""
    rejected: tuple[RejectedAlert, ...] = ()
    """Malformed alerts. Nothing was decided on them."""
    ignored: tuple[tuple[str, str], ...] = ()
    """Malformed members that nothing depends on, each as (path, message)."""
