"""Asyncio event loop in virtual time, and its clock.

The clock jumps to the next timer when nothing is ready, so hours take milliseconds in a reproducible order. Sockets are
unsupported. Threads started through the loop (``asyncio.to_thread``) are awaited.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

T = TypeVar("T")

BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)


class Stalled(RuntimeError):
    """All tasks wait, and no timer or thread can wake one."""


class _JumpingSelector(selectors.DefaultSelector):
    """Selector that advances the clock instead of waiting, unless ``threads`` run."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.threads = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.threads:
            return super().select(None if timeout is None or timeout > 0 else 0)
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise Stalled("every task waits, and no timer or thread is left to wake one")
        self.now += max(timeout, 0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop in virtual time from 0 s. Raises Stalled instead of hanging."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        # asyncio runs a timer up to this many seconds early. Python's 1 ns is too little: after months, a float of
        # seconds cannot hold it, so that a timer would never be due.
        self._clock_resolution = 1e-7

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        self._jumping.threads += 1
        done: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        done.add_done_callback(self._thread_ended)
        return done

    async def shutdown_default_executor(self, *timeout: float | None) -> None:  # not in Python 3.11
        # The loop joins its threads in another thread, which the clock must await too.
        self._jumping.threads += 1
        try:
            await super().shutdown_default_executor(*timeout)
        finally:
            self._jumping.threads -= 1

    def _thread_ended(self, _: object) -> None:
        self._jumping.threads -= 1


class VirtualClock:
    """Port Clock on a loop's time (default: the running loop); 0 s is `beginning`."""

    def __init__(self, beginning: datetime = BEGINNING, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._beginning = beginning
        self._loop = loop or asyncio.get_running_loop()

    def now(self) -> datetime:
        return self._beginning + timedelta(seconds=self._loop.time())

    async def sleep_until(self, when: datetime) -> None:
        """Return at `when`, or after its distance if the clock is set back; after at least one yield."""
        await asyncio.sleep(0)
        until = self._loop.time() + (when - self.now()).total_seconds()
        while (left := self._left(when, until)) > 0:  # noqa: ASYNC110 - waits for time, not for an event
            await asyncio.sleep(left)

    def _left(self, when: datetime, until: float) -> float:
        """Return seconds, by the loop's time if the clock was set back."""
        by_time, by_loop = (when - self.now()).total_seconds(), until - self._loop.time()
        return by_time if by_time < by_loop + 1.0 else by_loop


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
