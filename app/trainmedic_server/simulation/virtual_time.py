"""An asyncio event loop whose clock jumps to the next timer when nothing is ready, and a clock that reads it.

Sleeping costs no real time on it, so that a simulation of hours takes milliseconds, and its order of
events is the same each time. Playbook tests run on it, and so do unit tests of the engine::

    virtual_time.run(scenario())                      # anywhere

    def pytest_asyncio_loop_factories(config, item):  # conftest.py: every async test beside it
        return {"virtual": virtual_time.VirtualLoop}

It is not for sockets: the clock does not wait for the network. It does wait for work that was given to a
thread through the loop (``asyncio.to_thread``).
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

T = TypeVar("T")

BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)
"""The time of day at which virtual time starts, unless a caller says otherwise."""


class Stalled(RuntimeError):
    """Every task waits, and neither a timer nor a thread is left that could wake one."""


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that moves the clock instead of waiting, except for ``threads`` that are at work."""

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
            raise Stalled("every task waits for something that nothing is left to do")
        self.now += max(timeout, 0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which starts at 0 seconds. Raises Stalled instead of hanging."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        # asyncio runs a timer once it lies within this of the time. The real clock's 1 ns would be
        # lost in a float that counts months of seconds, and the timer never reached.
        self._clock_resolution = 1e-7

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        self._jumping.threads += 1
        done: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        done.add_done_callback(self._thread_ended)
        return done

    async def shutdown_default_executor(self, *timeout: float | None) -> None:  # which Python 3.11 has not
        # The loop joins its threads in another thread, for which the clock must wait too.
        self._jumping.threads += 1
        try:
            await super().shutdown_default_executor(*timeout)
        finally:
            self._jumping.threads -= 1

    def _thread_ended(self, _: object) -> None:
        self._jumping.threads -= 1


class VirtualClock:
    """The port Clock by a loop's time (by default the running loop's), whose 0 seconds are `beginning`."""

    def __init__(self, beginning: datetime = BEGINNING, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._beginning = beginning
        self._loop = loop or asyncio.get_running_loop()

    def now(self) -> datetime:
        return self._beginning + timedelta(seconds=self._loop.time())

    async def sleep_until(self, when: datetime) -> None:
        """Return at `when`, never before; yields once even where that is past."""
        await asyncio.sleep(0)
        until = self._loop.time() + (when - self.now()).total_seconds()
        while (left := self._left(when, until)) > 0:  # noqa: ASYNC110 - waits for time, not for an event
            await asyncio.sleep(left)

    def _left(self, when: datetime, until: float) -> float:
        """Seconds until `when`; where the clock was set back meanwhile, until the loop's time is `until`."""
        by_time, by_loop = (when - self.now()).total_seconds(), until - self._loop.time()
        return by_time if by_time < by_loop + 1.0 else by_loop


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time, on a loop of its own, as ``asyncio.run`` does in real time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
