"""Listener that posts history events as CloudEvents 1.0 (structured JSON), in order and at least once.

An event rejected as invalid (400, 413, 422) is skipped, logged and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from trainmedic.wire.envelope import write_time
from trainmedic_server import telemetry
from trainmedic_server.adapters.json_endpoint import JsonEndpoint
from trainmedic_server.domain.run import Event
from trainmedic_server.errors import PermanentFailure

MEDIA_TYPE = "application/cloudevents+json; charset=utf-8"
TYPE = "trainmedic."

log = telemetry.logger(__name__)


class CloudEvents:  # an `engine.event_dispatch.EventListener`
    name = "events_to"
    at_once = 20

    def __init__(
        self, endpoint: JsonEndpoint, source: str, kinds: Collection[str], on_left_out: Callable[[], None]
    ) -> None:
        self._endpoint = endpoint
        self._source = source
        self.kinds = frozenset(kinds)  # Empty for all.
        self._on_left_out = on_left_out
        self._taken = 0
        """Newest completed event. After a failure, earlier ones are passed here again."""

    async def take(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.seq is not None and event.seq <= self._taken:
                continue
            await self._post(event)
            self._taken = event.seq or self._taken

    async def _post(self, event: Event) -> None:
        try:
            await self._endpoint.send("POST", "", cloud_event(event, self._source), MEDIA_TYPE)
        except PermanentFailure as error:
            self._on_left_out()
            log.warning("skipping event", seq=event.seq, kind=event.kind, error=str(error))


def cloud_event(event: Event, source: str) -> dict[str, Any]:
    at = write_time(event.at)
    data = {"seq": event.seq, "kind": event.kind, "at": at, "run_id": event.run_id, "actor": event.actor}
    subject = {"subject": event.run_id} if event.run_id is not None else {}
    return {
        "specversion": "1.0",
        "id": str(event.seq),
        "source": source,
        "type": f"{TYPE}{event.kind}",
        "time": at,
        **subject,
        "datacontenttype": "application/json",
        "data": {**data, "data": dict(event.data)},
    }
