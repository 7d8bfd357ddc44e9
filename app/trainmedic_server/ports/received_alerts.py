"""Stored alerts, for lists."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Protocol

from msgspec import Struct, field

from trainmedic_server.domain.alert import AlertRecord, AlertStatus
from trainmedic_server.domain.run import Status


class ReceivedAlertFilter(Struct, frozen=True):
    """None matches any. `since`: the last report is then or later. `until`: the first one is earlier."""

    alertname: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    status: AlertStatus | None = None
    since: datetime | None = None
    until: datetime | None = None
    reacted: bool | None = None
    """True for alerts with a reacting playbook, regardless of guards (`AlertRecord.has_reaction`)."""


class ReceivedAlerts(Protocol):
    async def alerts_page(
        self, matching: ReceivedAlertFilter, limit: int, cursor: str | None
    ) -> tuple[list[AlertRecord], str | None]:
        """Return at most `limit` alerts, the latest first report first, and the next page's cursor, if any.

        New alerts do not shift pages. Raises ValueError on an invalid cursor.
        """
        ...

    async def statuses_of(self, run_ids: Collection[str]) -> dict[str, Status]: ...
