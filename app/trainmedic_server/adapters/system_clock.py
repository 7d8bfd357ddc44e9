from __future__ import annotations

import asyncio
from collections import deque
from datetime import datetime

from trainmedic.wire import steady_time
from trainmedic.wire.steady_time import ClockStep, SteadyTime

_LONGEST_SLEEP_SECONDS = 30.0  # Longer sleeps are split, to end in time if the clock is set forward.
_TOLERANCE_SECONDS = 1.0  # Difference between the clock's and the event loop's time that is no step.
_KEPT_STEPS = 100


class SystemClock:
    """Implements `Clock` and `ClockWatch`."""

    def __init__(self, time: SteadyTime = steady_time.OF_PROCESS) -> None:
        self._time = time
        self.now = time.now
        self._steps: deque[ClockStep] = deque(maxlen=_KEPT_STEPS)
        time.tell = self._note_step  # Called at each step of the machine's clock.

    @property
    def ahead(self) -> float:
        return self._time.ahead

    def take_steps(self) -> list[ClockStep]:
        taken = []
        while self._steps:
            taken.append(self._steps.popleft())
        return taken

    async def sleep_until(self, when: datetime) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + (when - self.now()).total_seconds()
        while (left := self._seconds_left(when, until - loop.time())) > 0:  # noqa: ASYNC110 - there is no event; the time is what is waited for
            await asyncio.sleep(min(left, _LONGEST_SLEEP_SECONDS))

    def _seconds_left(self, when: datetime, by_loop: float) -> float:
        """After the clock was set back, the event loop's time decides."""
        by_clock = (when - self.now()).total_seconds()
        return by_clock if by_clock < by_loop + _TOLERANCE_SECONDS else by_loop

    def _note_step(self, step: ClockStep) -> None:
        self._steps.append(step)
