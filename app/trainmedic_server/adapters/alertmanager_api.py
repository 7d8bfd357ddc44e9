"""Alertmanager's API (version 2)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainmedic.wire.envelope import write_time
from trainmedic_server import errors
from trainmedic_server.adapters.foreign_answers import UNREADABLE
from trainmedic_server.adapters.httpx_caller import Endpoint
from trainmedic_server.domain.alert import Alert, Identity
from trainmedic_server.ports.outside import Clock, HttpReply

TIMEOUT = timedelta(seconds=5)
ANSWER_SERVES_FOR = timedelta(seconds=1)  # Age up to which the list of firing alerts, or its failure, is reused.
SETTLES_AFTER = timedelta(minutes=5)
"""Minimum uptime before a missing alert counts as ended. Prometheus resends alerts within a minute plus its evaluation
interval and restart.
"""
BODY_LIMIT = 64 * 1024 * 1024  # Bytes: 60,000 alerts of 1 KB.

FIRES_FOR = timedelta(minutes=10)  # Life of a sent alert, unless it is sent again.

# A webhook states start times in nanoseconds, the API in milliseconds.
_PRECISION = timedelta(milliseconds=1)


class AlertmanagerApi:
    def __init__(
        self, url: str, clock: Clock, token_file: Path | None = None, settles_after: timedelta = SETTLES_AFTER
    ) -> None:
        """`settles_after`: see `SETTLES_AFTER`."""
        self._endpoint = Endpoint(url, token_file, "--alertmanager-token", BODY_LIMIT)
        self.close = self._endpoint.close
        self._clock = clock
        self._settles_after = settles_after
        self._query_lock = asyncio.Lock()
        self._firing: Mapping[str, list[datetime]] = {}
        self._is_settled = False
        self._no_list_because: str | None = None
        self._answered_at: float | None = None

    async def is_firing(self, identity: Identity) -> bool:
        beginnings = (await self._all_firing()).get(identity.fingerprint, ())
        # An earlier start is the same alert, merged from overlapping reports. A later start is another alert, so this
        # one has ended.
        if any(began <= identity.starts_at + _PRECISION for began in beginnings):
            return True
        if not beginnings and not self._is_settled:
            raise errors.TemporaryFailure(
                "the Alertmanager has just started, and may not have received the firing alerts again"
            )
        return False

    async def _all_firing(self) -> Mapping[str, list[datetime]]:
        async with self._query_lock:
            now = asyncio.get_running_loop().time()
            if self._answered_at is None or now - self._answered_at > ANSWER_SERVES_FOR.total_seconds():
                self._no_list_because = None
                try:
                    self._firing = await self._ask_for_firing()
                    self._is_settled = await self._ask_whether_settled()
                except errors.TemporaryFailure as error:
                    self._no_list_because = str(error)
                self._answered_at = asyncio.get_running_loop().time()
            if self._no_list_because is not None:
                raise errors.TemporaryFailure(self._no_list_because)
            return self._firing

    async def _ask_for_firing(self) -> Mapping[str, list[datetime]]:
        firing: dict[str, list[datetime]] = {}
        with _reading("list of alerts"):
            for alert in _listed(await self._call("GET", "/alerts?active=true&silenced=true&inhibited=true")):
                began = datetime.fromisoformat(alert["startsAt"]).astimezone(UTC)
                firing.setdefault(alert["fingerprint"], []).append(began)
        return firing

    async def _ask_whether_settled(self) -> bool:
        if not self._settles_after:
            return True
        with _reading("status"):
            reply = await self._call("GET", "/status")
            _require_success(reply, "the Alertmanager did not report its status")
            started_at = datetime.fromisoformat(json.loads(reply.body)["uptime"]).astimezone(UTC)
        return self._clock.now() - started_at >= self._settles_after

    async def check(self) -> None:
        """Raise ActionFailure if it does not answer with success."""
        _require_success(await self._call("GET", "/status"), "the Alertmanager did not report its status")

    async def tell(self, alerts: Sequence[Alert]) -> None:
        """Send alerts. One that has not ended ends by itself unless it is sent again within `FIRES_FOR`."""
        document = [_posted(alert, self._clock.now()) for alert in alerts]
        _require_success(await self._call("POST", "/alerts", document), "the Alertmanager did not accept alerts")

    async def silence(self, matchers: Mapping[str, str], ends_at: datetime, comment: str) -> str:
        present = await self.find_silence(comment)
        if present is not None:
            return present
        reply = await self._call(
            "POST",
            "/silences",
            {
                "matchers": [
                    {"name": name, "value": value, "isRegex": False, "isEqual": True}
                    for name, value in matchers.items()
                ],
                "startsAt": _api_time(self._clock.now()),
                "endsAt": _api_time(ends_at),
                "createdBy": "trainmedic",
                "comment": comment,
            },
        )
        _require_success(reply, "the silence was not created")
        try:
            return str(json.loads(reply.body)["silenceID"])
        except UNREADABLE as error:
            raise errors.OutcomeUnknown("the Alertmanager did not report the created silence") from error

    async def find_silence(self, comment: str) -> str | None:
        silences = _listed(await self._call("GET", "/silences"))
        try:
            for silence in silences:
                if silence["comment"] == comment and silence["status"]["state"] != "expired":
                    return str(silence["id"])
        except UNREADABLE as error:
            raise errors.TemporaryFailure("the Alertmanager's list of silences cannot be read") from error
        return None

    async def expire_silence(self, silence_id: str) -> None:
        path = f"/silence/{quote(silence_id, safe='')}"
        reply = await self._call("DELETE", path)
        if 200 <= reply.status < 300:
            return
        # Releases refuse to end an ended silence in different ways, so check whether it has ended.
        silence = await self._call("GET", path)
        if silence.status == 404 or '"state":"expired"' in silence.body.replace(" ", ""):
            return
        _require_success(reply, "the silence was not ended")

    async def _call(self, method: str, path: str, document: Any = None) -> HttpReply:
        headers, body = await self._endpoint.authorization(), None
        if document is not None:
            body = json.dumps(document).encode()
            headers["Content-Type"] = "application/json"
        return await self._endpoint.call(method, f"/api/v2{path}", headers, body, TIMEOUT)


def _posted(alert: Alert, now: datetime) -> dict[str, Any]:
    ends_at = now + FIRES_FOR if alert.ends_at is None else max(alert.ends_at, alert.starts_at)
    return {
        "labels": dict(alert.labels),
        "annotations": dict(alert.annotations),
        "startsAt": write_time(alert.starts_at),
        "endsAt": write_time(ends_at),
    }


def _listed(reply: HttpReply) -> list[dict[str, Any]]:
    _require_success(reply, "the Alertmanager did not answer the query")
    try:
        listed = json.loads(reply.body)
    except UNREADABLE as error:
        raise errors.TemporaryFailure("the Alertmanager's answer is not JSON") from error
    if not isinstance(listed, list):
        raise errors.TemporaryFailure("the Alertmanager's answer is not a list")
    return listed


@contextlib.contextmanager
def _reading(subject: str) -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        raise errors.TemporaryFailure(f"the Alertmanager's {subject} cannot be read") from error
    except errors.ActionFailure as error:
        raise errors.TemporaryFailure(str(error)) from error


def _require_success(reply: HttpReply, failure: str) -> None:
    if 200 <= reply.status < 300:
        return
    kind = errors.TemporaryFailure if reply.status >= 500 or reply.status == 429 else errors.PermanentFailure
    raise kind(f"{failure}: status {reply.status}: {reply.body.strip()[:200]}")


def _api_time(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
