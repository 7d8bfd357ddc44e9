"""Pause of a training loop at a step boundary."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import Any, Callable, Mapping

from trainmedic.client import Medic
from trainmedic.errors import Rejected
from trainmedic.job.progress import PAUSE

_POLL_INTERVAL = 0.05  # seconds between two polls for commands
# Seconds of delay that quicker polls make up for. After many quick polls the measured pace would put the next sync
# point thousands of calls away, and commands would wait for as many steps.
_MOST_MADE_UP = 1.0


class LoopPause:
    """Pause counted in polls instead of time, so that all ranks leave it at the same step."""

    def __init__(
        self, medic: Medic, sleep: Callable[[float], None] = time.sleep, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._medic = medic
        self._sleep = sleep
        self._now = now
        self._polled_at = 0.0  # time of the last poll, or when it was due
        self._polls_left = 0
        self._begun_by: set[str] = set()  # IDs of the commands that began or extended it

    @property
    def lasts(self) -> bool:
        return self._polls_left > 0

    def is_in_force(self, command_id: str) -> bool:
        """Return whether a pause by this command lasts. Thread-safe."""
        return self.lasts and command_id in self._begun_by

    def start(self, longest: timedelta, command_id: str, extends: str | None = None) -> Mapping[str, Any]:
        """Begin a pause of about ``longest``, or set a new end.

        With ``extends``, raise Rejected unless that command's pause lasts.
        """
        if extends is not None and not self.is_in_force(extends):
            raise Rejected(f"no pause of command {extends} lasts")
        self._begun_by = {*(self._begun_by if self.lasts else ()), command_id}
        self._polls_left = math.ceil(longest.total_seconds() / _POLL_INTERVAL)
        self._polled_at = self._now()
        return {"max_seconds": longest.total_seconds()}

    def end(self) -> Mapping[str, Any]:
        was_paused, self._polls_left = self.lasts, 0
        return {"was_paused": was_paused}

    def wait(self, step: int) -> None:
        if not self.lasts:
            return
        with self._medic.window(PAUSE):
            while self.lasts:
                # After a slow poll the next ones follow sooner, so that the pause is no longer.
                now = self._now()
                self._polled_at = max(self._polled_at + _POLL_INTERVAL, now - _MOST_MADE_UP)
                self._sleep(max(self._polled_at - now, 0.0))
                self._polls_left -= 1
                self._medic.commands(step)
