"""Fast parser of the usual webhook body: small and without a fault. `payload` reads all others and names faults."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, field

from trainmedic_core.fingerprint import fingerprint
from trainmedic_server.api import payload
from trainmedic_server.api.cut_texts import MOST_TEXTS, TEXT_LENGTH
from trainmedic_server.domain.alert import Alert, AlertStatus, Delivery

_LARGEST_BYTES = TEXT_LENGTH  # a smaller body cannot exceed any limit on characters
_NUL = b"\\u0000"  # the only way to write it; no database stores it
_NO_END = ("", "0001-01-01T00:00:00Z")  # Alertmanager's end of a firing alert is the year 1


class _Alert(Struct):
    status: AlertStatus
    labels: Annotated[dict[str, str], Meta(max_length=payload.LABELS_PER_ALERT)]
    starts_at: str = field(name="startsAt")
    annotations: Annotated[dict[str, str], Meta(max_length=MOST_TEXTS)] | None = None
    ends_at: str | None = field(default=None, name="endsAt")
    generator_url: str | None = field(default=None, name="generatorURL")
    fingerprint: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")] | None = None  # so never a stand-in's


class _Payload(Struct):
    version: Literal["4"]
    alerts: list[_Alert]
    status: AlertStatus | None = None
    receiver: str | None = None
    group_key: str | None = field(default=None, name="groupKey")
    external_url: str | None = field(default=None, name="externalURL")
    truncated: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = field(default=None, name="truncatedAlerts")


_DECODER = msgspec.json.Decoder(_Payload)


def read(body: bytes | bytearray, delivery_id: str, received_at: datetime) -> Delivery | None:
    """Return the result of `payload.delivery` for the body, or None if it is unusual.

    Members that nothing reads must only be JSON in UTF-8, of any depth and length of numbers.
    """
    if len(body) > _LARGEST_BYTES or _NUL in body:
        return None
    try:
        body.decode()  # skipped members too must be UTF-8
        sent = _DECODER.decode(body)
        alerts = tuple([_alert(each) for each in sent.alerts])
    except (ValueError, OverflowError, RecursionError):
        return None
    return Delivery(
        delivery_id,
        received_at,
        sent.receiver or "",
        sent.group_key or "",
        sent.external_url or "",
        alerts,
        sent.truncated or 0,
    )


def _alert(sent: _Alert) -> Alert:
    """Raises ValueError or OverflowError for a time that is none."""
    starts_at = payload.time_of(sent.starts_at)
    ends_at = None
    if sent.ends_at is not None and sent.ends_at not in _NO_END:
        ends_at = payload.time_of(sent.ends_at)
        if sent.status is AlertStatus.FIRING or ends_at.year == 1:
            ends_at = None
    return Alert(
        sent.fingerprint or fingerprint(sent.labels),
        sent.status,
        sent.labels,
        sent.annotations or {},
        starts_at,
        ends_at,
        sent.generator_url or "",
    )
