"""Current state (``GET /now``) for all pages, cached for a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from msgspec import Struct

from trainmedic_server.console.gpu_indexes import GpuIndexes
from trainmedic_server.console.inner_api import InnerApi
from trainmedic_server.errors import TrainmedicError

KEPT_SECONDS = 1.0
_READY_SECONDS = 10.0  # interval of requests for readiness, which asks Redis and the store


class StandingView(Struct, frozen=True):
    """``document`` is None if the store does not respond."""

    seq: int
    """Newest event included; pages request later ones. 0 if the store does not respond."""
    document: Mapping[str, Any] | None
    ready: bool

    @property
    def changes(self) -> int:
        """Number of active changes, as listed on the page Now."""
        listed = self.document["changed"] if self.document else ()
        return sum(change["is_reversible"] for change in listed)

    @property
    def approvals(self) -> int:
        return len(self.document["approvals"]) if self.document else 0


class ServerStanding:
    def __init__(self, api: InnerApi, last_seq: Callable[[], Awaitable[int]], gpus: GpuIndexes) -> None:
        self._api = api
        self._gpus = gpus
        self._last_seq = last_seq
        self._kept: StandingView | None = None
        self._kept_at = 0.0
        self._ready_at = float("-inf")
        self._ready = True
        self._asking = asyncio.Lock()

    async def now(self, *, since: int = 0) -> StandingView:
        """Return the state including all events up to `since`; at most `KEPT_SECONDS` old, readiness 10 s."""
        time = asyncio.get_running_loop().time
        oldest = time() - KEPT_SECONDS
        async with self._asking:
            if self._kept is None or self._kept_at < oldest or self._kept.seq < since:
                asked_at = time()
                self._kept = await self._ask(asked_at)
                self._kept_at = asked_at  # not earlier: a cancelled request must leave the old state old
            return self._kept

    async def _ask(self, time: float) -> StandingView:
        if time - self._ready_at > _READY_SECONDS:
            self._ready = bool((await self._api.get("/ready"))["ready"])
            self._ready_at = time
            await self._gpus.refresh()
        try:
            seq = await self._last_seq()
            return StandingView(seq, await self._api.get("/now"), self._ready)
        except TrainmedicError:  # of the store itself, or as an answer of the API
            return StandingView(0, None, False)
