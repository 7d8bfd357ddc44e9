"""How things stand, for the head of every page and for the first page: what ``GET /now`` says.

It is the same for everybody, so it is asked for once and kept for a moment, however many pages are open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from msgspec import Struct

from trainmedic_server.auth.auth import ANONYMOUS
from trainmedic_server.console.inner_api import InnerApi
from trainmedic_server.http.problems import HttpProblem

KEPT_SECONDS = 1.0
_READY_SECONDS = 10.0


class StandingView(Struct, frozen=True):
    """What a page needs of it; ``document`` is None where the store does not answer."""

    seq: int
    """The newest event that this is from; pages ask for what came after."""
    document: Mapping[str, Any] | None
    ready: bool

    @property
    def owed(self) -> int:
        """How many runs have changed something that is not given back yet."""
        return len({change["run_id"] for change in self.document["changed"]}) if self.document else 0

    @property
    def approvals(self) -> int:
        return len(self.document["approvals"]) if self.document else 0


class ServerStanding:
    """Asks the API; `last_seq` says the newest event's number."""

    def __init__(self, api: InnerApi, last_seq: Callable[[], Awaitable[int]]) -> None:
        self._api = api
        self._last_seq = last_seq
        self._kept: StandingView | None = None
        self._kept_at = 0.0
        self._ready_at = float("-inf")
        self._ready = True
        self._asking = asyncio.Lock()

    async def now(self, *, since: int = 0) -> StandingView:
        """The latest: at most `KEPT_SECONDS` old, and with all events up to `since` in it."""
        time = asyncio.get_running_loop().time
        oldest = time() - KEPT_SECONDS
        async with self._asking:
            if self._kept is None or self._kept_at < oldest or self._kept.seq < since:
                self._kept_at = time()
                self._kept = await self._ask(self._kept_at)
            return self._kept

    async def _ask(self, time: float) -> StandingView:
        if time - self._ready_at > _READY_SECONDS:
            self._ready_at = time
            self._ready = bool((await self._api.get(ANONYMOUS, "/ready"))["ready"])
        try:
            seq = await self._last_seq()
            return StandingView(seq, await self._api.get(ANONYMOUS, "/now"), self._ready)
        except HttpProblem:
            return StandingView(0, None, False)
