"""What the head of every page says: whether the server may act, and what waits.

It is the same for everybody, so it is asked for once and kept for a moment, however many pages are open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainmedic_server.server.auth import ANONYMOUS
from trainmedic_server.server.console.inner_api import InnerApi
from trainmedic_server.server.problems import HttpProblem

KEPT_SECONDS = 1.0
_COUNTED = 100


@dataclass(frozen=True, slots=True)
class StandingView:
    """None where it is not known."""

    mode: str | None
    paused: bool
    paused_by: str | None
    paused_note: str | None
    paused_until: str | None
    breaker_open: bool
    breaker_reason: str | None
    ready: bool
    owed: int
    approvals: int
    seq: int
    """The newest event that this is from; pages ask for what came after."""


class ServerStanding:
    """Asks the API; `last_seq` says the newest event's number."""

    def __init__(self, api: InnerApi, last_seq: Callable[[], Any]) -> None:
        self._api = api
        self._last_seq = last_seq
        self._kept: StandingView | None = None
        self._kept_at = 0.0
        self._asking = asyncio.Lock()

    async def now(self, *, fresh: bool = False) -> StandingView:
        """The latest; at most `KEPT_SECONDS` old unless it has to be `fresh`."""
        time = asyncio.get_running_loop().time
        async with self._asking:
            if self._kept is None or fresh or time() - self._kept_at > KEPT_SECONDS:
                self._kept = await self._ask()
                self._kept_at = time()
            return self._kept

    async def _ask(self) -> StandingView:
        try:
            seq = await self._last_seq()
            ready = await self._api.get(ANONYMOUS, "/ready")
            asking = await self._count({"status": "awaiting_approval"})
            owed = await self._count({"owes_undo": "true"})
        except HttpProblem:
            return StandingView(None, False, None, None, None, False, None, False, 0, 0, 0)
        return StandingView(
            mode=ready.get("mode"),
            paused=ready["paused"],
            paused_by=ready.get("paused_by"),
            paused_note=ready.get("paused_note"),
            paused_until=ready.get("paused_until"),
            breaker_open=ready["breaker_open"],
            breaker_reason=ready.get("breaker_reason"),
            ready=ready["ready"],
            owed=owed,
            approvals=asking,
            seq=seq,
        )

    async def _count(self, query: dict[str, str]) -> int:
        answer = await self._api.get(ANONYMOUS, "/history", {**query, "limit": _COUNTED})
        return len(answer["items"])
