"""An alert as Alertmanager reports it, and what Trainmedic knows of it.

Who calls it: the webhook builds `Alert` values, the engine decides on them, the store keeps an
`AlertRecord` for each identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

from msgspec import Struct, field

from trainmedic.wire.envelope import write_time
from trainmedic_core.once import once
from trainmedic_server.domain.reaction import Reaction

_FNV_OFFSET = 14695981039346656037
_FNV_PRIME = 1099511628211
_64_BITS = (1 << 64) - 1


MOST_REASONS = 5
"""Most problems that the reason of a rejected alert lists."""

SHIPPED_RULE_LABEL = "trainmedic_rule"
"""Label that every alert rule of Trainmedic carries, and that playbooks which can do harm require. It vouches for the
alert's own name. So an alert map never sets it, and removes it from an alert that it renames."""
SHIPPED_RULE = "1"
"""Its value."""

BY_HAND = "by-hand-"
"""How the fingerprint begins of what stands in place of an alert where a person started a run and none fires."""


class AlertStatus(StrEnum):
    """The status of one alert, in Alertmanager's words."""

    FIRING = "firing"
    RESOLVED = "resolved"


class Identity(NamedTuple):
    """What makes two reports speak of the same alert: the same labels and the same beginning."""

    fingerprint: str
    """Alertmanager's hash of the labels."""
    starts_at: datetime
    """When it began to fire, an aware UTC datetime."""


class Alert(Struct, frozen=True, dict=True):
    """One entry of ``alerts[]`` in a delivery. Times are aware UTC datetimes."""

    fingerprint: str
    """Alertmanager's hash of the labels."""
    status: AlertStatus
    """Whether it fires or has resolved."""
    labels: Mapping[str, str]
    """What the alert is and what it is about; by these playbooks match and targets are found."""
    annotations: Mapping[str, str]
    """What the rule's author says about it, for people."""
    starts_at: datetime
    """When it began to fire."""
    ends_at: datetime | None = None
    """When it resolved; None while it fires (Alertmanager sends the year 0001 then)."""
    generator_url: str = ""
    """The page of the rule in Prometheus."""
    original: Mapping[str, str] | None = None
    """Labels as Alertmanager sent them. None if no alert map changed them. They alone determine the identity."""

    @property
    def sent_labels(self) -> Mapping[str, str]:
        """Labels as Alertmanager knows them."""
        return self.labels if self.original is None else self.original

    @property
    def every_label(self) -> Mapping[str, str]:
        """Labels, with those that an alert map dropped."""
        return self.labels if self.original is None else {**self.original, **self.labels}

    @property
    def original_name(self) -> str | None:
        """The ``alertname`` as it was sent. None if no alert map changed the labels."""
        return None if self.original is None else self.original.get("alertname", "")

    @once
    def identity(self) -> Identity:
        return Identity(self.fingerprint, self.starts_at)

    @property
    def name(self) -> str:
        """The ``alertname`` label; empty where a receiver was sent an alert without one."""
        return self.labels.get("alertname", "")

    def as_data(self) -> dict[str, Any]:
        """The alert as expressions see it: plain data with Alertmanager's own member names."""
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
    """An alert with what was heard of it. Times are aware UTC datetimes."""

    alert: Alert
    """As it was last reported."""
    first_heard_at: datetime
    """When its first report arrived."""
    last_heard_at: datetime
    """When it was last heard of: by a report, or by the Alertmanager's answer that it fires."""
    count: int = 1
    """How many reports of it arrived."""
    resolved_at: datetime | None = None
    """When it was known to have resolved; None while it fires."""
    resolved_because: str | None = None
    """``alertmanager``: a resolved was delivered. ``superseded``: a later beginning of the same alert came.
    ``asked``: the Alertmanager said on request that it no longer fires. ``assumed``: nobody spoke of it for too
    long. None while it fires."""
    reactions: tuple[Reaction, ...] = ()
    """What each playbook that names its alertname made of it."""

    @property
    def identity(self) -> Identity:
        return self.alert.identity

    @property
    def is_resolved(self) -> bool:
        return self.resolved_at is not None

    @property
    def is_stand_in(self) -> bool:
        """Whether it stands in place of an alert, because a person started a run and none fired."""
        return self.alert.fingerprint.startswith(BY_HAND)

    @property
    def has_reaction(self) -> bool:
        """Whether a playbook reacted to it, whatever the guards said then."""
        return any(reaction.is_effective for reaction in self.reactions)


def decisive(records: Sequence[AlertRecord]) -> Sequence[AlertRecord]:
    """Those of a run's alerts whose end is the end of its cause.

    What stands in for an alert, where a person started the run, counts only as long as no alert has joined: it does not
    resolve, and would keep what was changed for long after the alert is over.
    """
    return [record for record in records if not record.is_stand_in] or records


class RejectedAlert(Struct, frozen=True):
    """Malformed entry of ``alerts[]``. No playbook sees it."""

    index: int
    """Position in the delivery, from 0."""
    name: str
    """The ``alertname`` label. Empty if it cannot be read."""
    problems: tuple[tuple[str, str], ...]
    """Problems, each as (path of the member, message). They never contain a value of the entry."""
    identity: Identity | None = None
    """Fingerprint and start of the alert. None if they cannot be read."""
    status: AlertStatus | None = None
    """Status of the alert. None if it cannot be read."""

    @property
    def reason(self) -> str:
        """Problems as one text. Of many, only the first ones."""
        listed = [f"{path}: {message}" for path, message in self.problems[:MOST_REASONS]]
        more = len(self.problems) - len(listed)
        return "; ".join(listed) + (f"; and {more} more" if more > 0 else "")

    @property
    def is_end(self) -> bool:
        """True if it reports the end of an alert. Only the identity is needed for that."""
        return self.identity is not None and self.status is AlertStatus.RESOLVED


class Delivery(Struct, frozen=True):
    """One webhook POST."""

    id: str
    """A UUIDv7 that the webhook gives it."""
    received_at: datetime
    """When it arrived, an aware UTC datetime."""
    receiver: str
    """The receiver's name in Alertmanager's configuration."""
    group_key: str
    """Alertmanager's key of the group of alerts."""
    external_url: str
    """Where that Alertmanager is."""
    alerts: tuple[Alert, ...] = field(default=())
    truncated: int = 0
    """How many alerts Alertmanager left out, by its ``max_alerts``."""
    rejected: tuple[RejectedAlert, ...] = ()
    """The malformed entries; they are not among `alerts`."""
    ignored: tuple[tuple[str, str], ...] = ()
    """Malformed members that nothing depends on and that count as absent, each as (path, message)."""


def fingerprint(labels: Mapping[str, str]) -> str:
    """The fingerprint that Alertmanager gives these labels.

    64-bit FNV-1a over each name and value in the order of the names, each followed by the byte 255
    (prometheus/common, model/signature.go, labelSetToFingerprint).
    """
    value = _FNV_OFFSET
    for name in sorted(labels):
        for byte in b"%b\xff%b\xff" % (name.encode(), labels[name].encode()):
            value = ((value ^ byte) * _FNV_PRIME) & _64_BITS
    return f"{value:016x}"
