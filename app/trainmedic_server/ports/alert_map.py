"""Interface of an alert map: renames that let a cluster's own rules start the playbooks, and refusals."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from trainmedic_server.domain.alert import Alert


class MappedAlert(Struct, frozen=True):
    """An alert after the map."""

    alert: Alert
    """With the mapped labels, and with the original ones beside them where they differ."""
    refused: str = ""
    """For a person: why the map does not accept the alert; empty where it does."""


class AlertMap(Protocol):
    """The alert map in force. Immutable."""

    def apply(self, alert: Alert) -> MappedAlert:
        """Return the alert as playbooks see it. An alert that was mapped before is mapped again from its original
        labels."""
        ...


class NoAlertMap:
    """The map of a server without one: every alert is accepted as it is."""

    def apply(self, alert: Alert) -> MappedAlert:
        return MappedAlert(alert)


NO_ALERT_MAP = NoAlertMap()
