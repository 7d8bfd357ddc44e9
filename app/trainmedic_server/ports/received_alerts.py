"""Reading the alerts that were heard, with what playbooks made of them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Protocol

from msgspec import Struct, field

from trainmedic_server.domain.alert import AlertRecord, AlertStatus


class ReceivedAlertFilter(Struct, frozen=True):
    """Which alerts are meant; None means any. Heard of from `since` (inclusive) on and before `until`, where one
    report within is enough."""

    alertname: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that it has, each with exactly this value."""
    status: AlertStatus | None = None
    since: datetime | None = None
    until: datetime | None = None
    reacted: bool | None = None
    """Whether a playbook reacted to it, whatever the guards said then (`AlertRecord.has_reaction`)."""


class ReceivedAlerts(Protocol):
    """The alerts that were heard. Reading never waits for a writer."""

    async def alerts_page(
        self, matching: ReceivedAlertFilter, limit: int, cursor: str | None
    ) -> tuple[list[AlertRecord], str | None]:
        """Return at most `limit` alerts, the one that was heard of first last, and the cursor of the next page or None.

        Alerts that arrive in between never shift a page. Raises ValueError on a cursor that is not one.
        """
        ...
