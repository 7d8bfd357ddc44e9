"""Alert map: renames the cluster's alerts for the playbooks, and may refuse them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from msgspec import Struct

from trainmedic_server.domain.alert import Alert


class MappedAlert(Struct, frozen=True):
    alert: Alert
    refused: str = ""  # Why the alert is refused; empty if accepted.


class MappedEvent(Struct, frozen=True):
    """Event as an alert's labels, or as a list of alerts in Alertmanager's form."""

    labels: Mapping[str, str] = {}
    key: str | None = None  # Identifies the event, to detect repeats. None: its content does.
    alerts: list[Any] | None = None  # None if `labels` describe it.


class AlertMap(Protocol):
    def apply(self, alert: Alert) -> MappedAlert: ...


class NoAlertMap:
    def apply(self, alert: Alert) -> MappedAlert:
        return MappedAlert(alert)


NO_ALERT_MAP = NoAlertMap()
