"""Order of runs that wait for their turn in ``max_concurrent`` (``guards.queue``). In memory."""

from __future__ import annotations

import asyncio

TURN = "turn"  # value of `Run.waiting_on`


class RunQueue:
    def __init__(self) -> None:
        self._working: dict[str, set[str]] = {}  # IDs of runs that have their turn, by playbook
        self._waiting: dict[str, dict[str, asyncio.Future[None]]] = {}  # of the others, in order of arrival
        self._most: dict[str, int] = {}  # ``max_concurrent`` by playbook

    def enter(self, playbook: str, run_id: str, most: int, *, at_once: bool) -> asyncio.Future[None]:
        """Join the queue; the future is done once fewer than `most` runs work, or `at_once`."""
        self._most[playbook] = most
        waiting = self._waiting.setdefault(playbook, {})
        turn = waiting[run_id] = asyncio.get_running_loop().create_future()
        if at_once:
            self._grant(playbook, run_id)
        self._grant_next(playbook)
        return turn

    def leave(self, playbook: str, run_id: str) -> None:
        self._waiting.get(playbook, {}).pop(run_id, None)
        working = self._working.get(playbook)
        if working is None:
            return
        working.discard(run_id)
        self._grant_next(playbook)
        if not working:
            del self._working[playbook]

    def _grant_next(self, playbook: str) -> None:
        waiting = self._waiting.get(playbook, {})
        while waiting and len(self._working.get(playbook, ())) < self._most[playbook]:
            self._grant(playbook, next(iter(waiting)))
        if not waiting:
            self._waiting.pop(playbook, None)

    def _grant(self, playbook: str, run_id: str) -> None:
        turn = self._waiting[playbook].pop(run_id)
        self._working.setdefault(playbook, set()).add(run_id)
        if not turn.done():
            turn.set_result(None)
