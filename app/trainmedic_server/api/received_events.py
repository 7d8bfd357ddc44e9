"""``POST /events/{name}``: events of other programs, mapped by the alert map, and admitted like Alertmanager's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from msgspec.structs import replace
from starlette.requests import Request

from trainmedic.wire.envelope import new_id
from trainmedic_server import errors
from trainmedic_server.api import payload
from trainmedic_server.catalog.alert_map_library import AlertMapLibrary
from trainmedic_server.domain import beginnings
from trainmedic_server.domain.alert import Delivery
from trainmedic_server.http.body import parse_json
from trainmedic_server.ports.alert_map import MappedEvent

PATH = "/events/{name}"
SUMMARY = "Receive an event of another program"

Parser = Callable[[bytearray, datetime], Delivery]


def reader(alert_map: AlertMapLibrary) -> Callable[[Request], Parser]:
    """Return a function that selects a request's parser, and raises NotFound for an unknown event."""

    def parser_for(request: Request) -> Parser:
        name = request.path_params["name"]
        current = alert_map.current
        if name not in current.events:
            known = ", ".join(sorted(current.events)) or "none"
            raise errors.NotFound(f"The alert map has no event {name}. It has: {known}.")

        def read(body: bytearray, received_at: datetime) -> Delivery:
            return _delivery(name, current.map_event(name, parse_json(body)), bytes(body), received_at)

        return read

    return parser_for


def _delivery(name: str, mapped: MappedEvent | None, body: bytes, received_at: datetime) -> Delivery:
    if mapped is None:
        return Delivery(new_id(), received_at, f"event {name}", "", "")
    if mapped.alerts is not None:
        entries = {"version": payload.VERSION, "receiver": f"event {name}", "alerts": mapped.alerts}
        delivery = payload.with_genuine_fingerprints(payload.delivery(entries, new_id(), received_at))
        return replace(delivery, alerts=tuple(beginnings.sent_by_event(name, each) for each in delivery.alerts))
    labels = payload.checked_labels(mapped.labels)
    alert = beginnings.of_event(name, labels, mapped.key, body, received_at)
    return Delivery(new_id(), received_at, f"event {name}", "", "", (alert,))
