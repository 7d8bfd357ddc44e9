"""Watch of a service that the server calls only when it is needed: an error in its URL is seen before that."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

from msgspec import Struct

from trainmedic_server import telemetry
from trainmedic_server.engine import loops
from trainmedic_server.errors import TrainmedicError
from trainmedic_server.ports.outside import Clock

ASK_EVERY = timedelta(seconds=30)


class ServiceState(Struct, frozen=True):
    problem: str | None
    """None: the service answers. Empty: it was not asked yet."""
    since: datetime  # start of this state


class ServiceWatch:
    def __init__(self, name: str, check: Callable[[], Awaitable[None]], clock: Clock, metrics: telemetry.Metrics):
        """`check` raises TrainmedicError if the service cannot be used."""
        self._name = name
        self._check = check
        self._clock = clock
        self._metrics = metrics
        self._state = ServiceState("", clock.now())

    def state(self) -> ServiceState:
        return self._state

    async def watch(self) -> None:
        await loops.repeat(self.refresh, ASK_EVERY, self._name, self._metrics)

    async def refresh(self) -> None:
        try:
            await self._check()
        except TrainmedicError as error:
            self._note(str(error))
            raise
        self._note(None)

    def _note(self, problem: str | None) -> None:
        has_changed = (problem is None) != (self._state.problem is None) or self._state.problem == ""
        self._state = ServiceState(problem, self._clock.now() if has_changed else self._state.since)
