"""What became of a delivery: the reply to Alertmanager, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from trainmedic_server.domain.run import Decision


@dataclass(frozen=True, slots=True)
class PlaybookDecision:
    """One playbook's decision on one alert. ``target`` is the target's key, empty where there is none."""

    run_id: str
    playbook: str
    target: str
    decision: Decision


@dataclass(frozen=True, slots=True)
class Admission:
    """The outcome of one delivery: everything in it is durable.

    ``duplicates`` counts alerts that were known in the same status already, ``unmatched`` those
    that no playbook reacts to, ``truncated`` those that Alertmanager left out.
    """

    delivery_id: str
    alerts: int
    runs: tuple[PlaybookDecision, ...] = ()
    duplicates: int = 0
    unmatched: int = 0
    truncated: int = 0
