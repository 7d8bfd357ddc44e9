"""Interface of an alert map, which renames the cluster's alerts for the playbooks and may refuse them."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from trainmedic_server.domain.alert import Alert


class MappedAlert(Struct, frozen=True):
    alert: Alert
    refused: str = ""
    """For a person; empty if accepted."""


class AlertMap(Protocol):
    """Immutable."""

    def apply(self, alert: Alert) -> MappedAlert:
        """Return the alert as playbooks see it, mapped from its original labels."""
        ...


class NoAlertMap:
    def apply(self, alert: Alert) -> MappedAlert:
        return MappedAlert(alert)


NO_ALERT_MAP = NoAlertMap()
