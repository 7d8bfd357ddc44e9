"""Links from the server's own alerts to the on-call page, ``docs/on-call.md``."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.own_source import LOG, SOURCE
from trainmedic_server.ports.findings import AlertSender

_OF_LOGS = "alerts-from-logs"  # Section of all finding alerts, whose names users choose


class Runbooks(Struct, frozen=True):
    page: str = ""  # URL of the page; without one, alerts stay unchanged

    def linked(self, alert: Alert) -> Alert:
        """Return an own alert with the annotation ``runbook_url``, which proves nothing (`domain.proof`)."""
        if not self.page:
            return alert
        section = _OF_LOGS if alert.labels.get(SOURCE) == LOG else alert.name.lower()
        return replace(alert, annotations={**alert.annotations, "runbook_url": f"{self.page}#{section}"})


class LinkingAlertSender:
    def __init__(self, sender: AlertSender, runbooks: Runbooks) -> None:
        self._sender = sender
        self._runbooks = runbooks

    async def tell(self, alerts: Sequence[Alert]) -> None:
        await self._sender.tell([self._runbooks.linked(alert) for alert in alerts])
