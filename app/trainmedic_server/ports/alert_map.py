"""Interface of an alert map, which renames the cluster's alerts for the playbooks and may refuse them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from msgspec import Struct

from trainmedic_server.domain.alert import Alert


class MappedAlert(Struct, frozen=True):
    alert: Alert
    refused: str = ""
    """For a person; empty if accepted."""


class MappedEvent(Struct, frozen=True):
    """An event's labels and key, or the alerts that it contains."""

    labels: Mapping[str, str] = {}
    key: str | None = None
    alerts: list[Any] | None = None


class AlertMap(Protocol):
    """Immutable."""

    def apply(self, alert: Alert) -> MappedAlert:
        """Return the alert as playbooks see it, mapped from its original labels."""
        ...


class NoAlertMap:
    def apply(self, alert: Alert) -> MappedAlert:
        return MappedAlert(alert)


NO_ALERT_MAP = NoAlertMap()
