"""Interface of an alert map. Renames let a cluster's own rules start the playbooks; other alerts may be refused."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from trainmedic_server.domain.alert import Alert


class MappedAlert(Struct, frozen=True):
    """Alert after the map was applied."""

    alert: Alert
    """Alert with the mapped labels, and also with the original ones if they differ."""
    refused: str = ""
    """Why the map does not accept the alert, for a person. Empty if it does."""


class AlertMap(Protocol):
    """The active alert map. Immutable."""

    def apply(self, alert: Alert) -> MappedAlert:
        """Return the alert as playbooks see it. An alert that was mapped before is mapped again from its original
        labels."""
        ...


class NoAlertMap:
    """Map of a server without alert map files. Every alert is accepted as it is."""

    def apply(self, alert: Alert) -> MappedAlert:
        return MappedAlert(alert)


NO_ALERT_MAP = NoAlertMap()
