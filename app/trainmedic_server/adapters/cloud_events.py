"""Posts the events of the history as CloudEvents 1.0 (structured JSON); implements ``engine.event_teller``'s listener.

Each event is posted until the receiver has answered with 2xx, one after the other, so that it gets all of them in
order, and some of them twice after a kill or a lost answer: ``source`` and ``id`` together tell which. One that the
receiver takes for wrong (400, 413, 422) is left out, since it would hold up all others; it is logged and counted.
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
"""What the types of our events begin with; their kind follows."""

log = telemetry.logger(__name__)


class CloudEvents:
    """One receiver. ``kinds`` are those that it is sent, all where there are none."""

    name = "events_to"
    at_once = 20

    def __init__(
        self, endpoint: JsonEndpoint, source: str, kinds: Collection[str], on_left_out: Callable[[], None]
    ) -> None:
        self._endpoint = endpoint
        self._source = source
        self.kinds = frozenset(kinds)
        self._on_left_out = on_left_out
        self._taken = 0
        """The newest event that is done with: those before one that is held up are handed here again with it."""

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
            log.warning("an event is left out", seq=event.seq, kind=event.kind, error=str(error))


def cloud_event(event: Event, source: str) -> dict[str, Any]:
    """The event as a CloudEvent; its data is as in ``GET /events``."""
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
