"""The machine's clock, made steady."""

from __future__ import annotations

import asyncio
from collections import deque
from datetime import datetime

from trainmedic.wire import steady_time
from trainmedic.wire.steady_time import ClockStep, SteadyTime

_LONGEST_SLEEP_SECONDS = 30.0
"""Longer sleeps are split, to end in time if the clock is set forward."""
_RUNNING_APART_SECONDS = 1.0
_KEPT_STEPS = 100


class SystemClock:
    def __init__(self, time: SteadyTime = steady_time.OF_PROCESS) -> None:
        self._time = time
        self.now = time.now
        self._steps: deque[ClockStep] = deque(maxlen=_KEPT_STEPS)
        time.tell = self._note_step

    @property
    def ahead(self) -> float:
        return self._time.ahead

    def take_steps(self) -> list[ClockStep]:
        taken = []
        while self._steps:
            taken.append(self._steps.popleft())
        return taken

    async def sleep_until(self, when: datetime) -> None:
        """Setting the clock back does not lengthen the sleep."""
        loop = asyncio.get_running_loop()
        until = loop.time() + (when - self.now()).total_seconds()
        while (left := self._left(when, until - loop.time())) > 0:  # noqa: ASYNC110 - there is no event; the time is what is waited for
            await asyncio.sleep(min(left, _LONGEST_SLEEP_SECONDS))

    def _left(self, when: datetime, left: float) -> float:
        by_time = (when - self.now()).total_seconds()
        return by_time if by_time < left + _RUNNING_APART_SECONDS else left

    def _note_step(self, step: ClockStep) -> None:
        self._steps.append(step)
