"""Alerts as Alertmanager reports them, and their records. Times are aware UTC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

from msgspec import Struct, field

from trainmedic.wire.envelope import write_time
from trainmedic_core.once import once
from trainmedic_server.domain.reaction import Reaction

MOST_REASONS = 5  # problems that a rejected alert's reason states

SHIPPED_RULE_LABEL = "trainmedic_rule"
"""Label of all shipped alert rules, which playbooks that can do harm may require (`domain.proof`).

Alert maps cannot set it, and remove it from renamed alerts.
"""
SHIPPED_RULE = "1"

BY_HAND = "by-hand-"  # a person started the run
SCHEDULE = "schedule-"
ENDED_RUN = "ended-run-"
EVENT = "event-"  # a webhook event without an alert
SENT_AS_EVENT = "trainmedic_event"  # annotation of an alert that an event contained, with the event's name
BEGINNINGS = (SCHEDULE, ENDED_RUN, EVENT)
STAND_INS = (BY_HAND, *BEGINNINGS)  # Prefixes of stand-in alerts' fingerprints. Alertmanager's are hexadecimal.


class AlertStatus(StrEnum):
    FIRING = "firing"
    RESOLVED = "resolved"


class Identity(NamedTuple):
    """Digest of the labels, and start: equal in all reports of an alert."""

    fingerprint: str
    starts_at: datetime


class Alert(Struct, frozen=True, dict=True):
    """One entry of ``alerts[]`` in a delivery."""

    fingerprint: str
    status: AlertStatus
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    starts_at: datetime
    ends_at: datetime | None = None  # None while it fires (Alertmanager sends the year 0001)
    generator_url: str = ""
    original: Mapping[str, str] | None = None
    """Labels as sent, which identify the alert. None if unchanged."""

    @property
    def sent_labels(self) -> Mapping[str, str]:
        return self.labels if self.original is None else self.original

    @property
    def every_label(self) -> Mapping[str, str]:
        return self.labels if self.original is None else {**self.original, **self.labels}

    @property
    def original_name(self) -> str | None:
        """``alertname`` as sent; None if no label was changed."""
        return None if self.original is None else self.original.get("alertname", "")

    @once
    def identity(self) -> Identity:
        return Identity(self.fingerprint, self.starts_at)

    @property
    def is_stand_in(self) -> bool:
        return self.fingerprint.startswith(STAND_INS)

    @property
    def is_in_alertmanager(self) -> bool:
        """False for stand-ins and events."""
        return not self.is_stand_in and SENT_AS_EVENT not in self.annotations

    @property
    def name(self) -> str:
        return self.labels.get("alertname", "")

    def as_data(self) -> dict[str, Any]:
        """Return ``alert`` as expressions see it."""
        return {
            "name": self.name,
            "status": str(self.status),
            "labels": dict(self.labels),
            "annotations": dict(self.annotations),
            "startsAt": write_time(self.starts_at),
            "endsAt": write_time(self.ends_at) if self.ends_at else None,
            "generatorURL": self.generator_url,
            "fingerprint": self.fingerprint,
        }


class AlertRecord(Struct, frozen=True):
    alert: Alert
    first_heard_at: datetime
    last_heard_at: datetime  # last report or confirmation by Alertmanager
    count: int = 1
    resolved_at: datetime | None = None  # When the end became known; None while it fires
    resolved_because: str | None = None
    """None while it fires, otherwise:

    - ``alertmanager``: delivered as resolved
    - ``superseded``: the end of a later start was delivered
    - ``asked``: Alertmanager, when asked, no longer had it
    - ``assumed``: no report for too long
    """
    reactions: tuple[Reaction, ...] = ()

    @property
    def identity(self) -> Identity:
        return self.alert.identity

    @property
    def is_resolved(self) -> bool:
        return self.resolved_at is not None

    @property
    def is_stand_in(self) -> bool:
        return self.alert.is_stand_in

    @property
    def has_reaction(self) -> bool:
        return any(reaction.is_effective for reaction in self.reactions)


def decisive(records: Sequence[AlertRecord]) -> Sequence[AlertRecord]:
    """Return the alerts whose end ends the cause. Stand-ins count only without others: nobody reports their end."""
    return [record for record in records if not record.is_stand_in] or records


class RejectedAlert(Struct, frozen=True):
    """Malformed entry of ``alerts[]``."""

    index: int  # in ``alerts[]``
    name: str  # empty if unreadable
    problems: tuple[tuple[str, str], ...]  # as (path, message), without values of the entry
    identity: Identity | None = None  # None, as the status, if unreadable
    status: AlertStatus | None = None

    @property
    def reason(self) -> str:
        listed = [f"{path}: {message}" for path, message in self.problems[:MOST_REASONS]]
        more = len(self.problems) - len(listed)
        return "; ".join(listed) + (f"; and {more} more" if more > 0 else "")

    @property
    def is_end(self) -> bool:
        """True if it reports an end, which needs only the identity."""
        return self.identity is not None and self.status is AlertStatus.RESOLVED


class Delivery(Struct, frozen=True):
    id: str
    received_at: datetime
    receiver: str
    group_key: str
    external_url: str
    alerts: tuple[Alert, ...] = field(default=())
    truncated: int = 0  # alerts that Alertmanager dropped by ``max_alerts``
    rejected: tuple[RejectedAlert, ...] = ()
    ignored: tuple[tuple[str, str], ...] = ()  # malformed members that count as absent, as (path, message)
