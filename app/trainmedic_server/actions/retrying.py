"""Retries of Kubernetes and Slurm actions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import ClassVar, TypeVar

from msgspec import Struct

from trainmedic.wire.backoff import Backoff
from trainmedic_server import errors
from trainmedic_server.actions.base import RESOLVED, STOPPED, BasicAction, clearance_of
from trainmedic_server.ports.actions import Call, Services

_FIRST_WAIT, _LONGEST_WAIT = 0.2, 10.0  # seconds, unless the server asks for another wait
REPORT_EVERY = timedelta(seconds=15)  # interval of `Call.report_wait`
LONGEST_ASKED_FOR = 60.0  # seconds of a pause that the server asks for
_LATE = timedelta(seconds=3)  # after the deadline for the last answer; the engine cancels the action 5 s after it
# Refusals of our account are retried for this time: a starting API server refuses everybody.
REFUSAL_GRACE = timedelta(seconds=10)

Result = TypeVar("Result")


class PermissionGrace(Struct):
    is_over: bool = False
    """True if a refusal cannot pass, or has lasted `REFUSAL_GRACE` without another answer."""
    _refused_since: datetime | None = None

    def record(self, error: errors.ActionFailure, now: datetime) -> None:
        if not isinstance(error, errors.ClusterRefused):
            self.is_over, self._refused_since = False, None
            return
        self._refused_since = self._refused_since or now
        self.is_over = not error.may_pass or now - self._refused_since >= REFUSAL_GRACE


class RetryingAction(BasicAction):
    """Retries conflicts and failures of the server until the call's deadline; refusals that may pass, for
    `REFUSAL_GRACE`.
    """

    default_timeout: ClassVar[timedelta] = timedelta(minutes=2)
    service: ClassVar[str]

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._clock = services.clock

    async def retry_until_deadline(
        self, call: Call, attempt: Callable[[], Awaitable[Result]], *, makes_change: bool = True
    ) -> Result:
        """Repeat `attempt` until it returns, the deadline passes, or the run is cancelled; one that `makes_change`
        also until the alert resolves.

        Raises NoLongerWanted in the last case, otherwise ClusterRefused or TemporaryFailure; OutcomeUnknown instead of
        these if an attempt may have changed something.
        """
        backoff, may_be_done = Backoff(_FIRST_WAIT, _LONGEST_WAIT, jitter=True), call.resumed
        permission_grace = PermissionGrace()
        report_at = self._clock.now() + REPORT_EVERY / 3  # the first report comes sooner
        while True:
            try:
                return await self._answered_in_time(call, attempt, makes_change)
            except (errors.ClusterUnavailable, errors.ObjectChanged, errors.ClusterRefused) as error:
                permission_grace.record(error, self._clock.now())
                if permission_grace.is_over:
                    if may_be_done:
                        raise errors.OutcomeUnknown(f"a change may have been made before this: {error}") from error
                    raise
                may_be_done = may_be_done or getattr(error, "may_be_done", False)
                failure = errors.OutcomeUnknown if may_be_done else errors.TemporaryFailure
                wait = backoff.next()
                wait = min(getattr(error, "retry_after", None) or 0.0, LONGEST_ASKED_FOR) or wait
                clearance = await clearance_of(call)
                if clearance == "stop":
                    raise failure(f"{STOPPED}; last: {error}") from error
                if clearance == "resolved" and makes_change:
                    raise _unwanted(error, may_be_done) from error
                if wait >= (call.deadline - self._clock.now()).total_seconds():
                    if isinstance(error, errors.ClusterRefused) and not may_be_done:
                        raise  # the cause: another attempt would be refused too
                    raise failure(f"not done in time: {error}", error.output) from error
                if call.report_wait is not None and self._clock.now() >= report_at:
                    report_at = self._clock.now() + REPORT_EVERY
                    await call.report_wait(f"{self.name} waits for {self.service}: {error}")
                await self._clock.sleep_until(self._clock.now() + timedelta(seconds=wait))

    async def _answered_in_time(
        self, call: Call, attempt: Callable[[], Awaitable[Result]], makes_change: bool
    ) -> Result:
        limit = max((call.deadline - self._clock.now() + _LATE).total_seconds(), 0.0)
        try:
            async with asyncio.timeout(limit) as time:
                return await attempt()
        except TimeoutError as error:
            if not time.expired():
                raise
            raise errors.ClusterUnavailable(f"{self.service} has not answered", may_be_done=makes_change) from error


def _unwanted(error: errors.ActionFailure, may_be_done: bool) -> errors.NoLongerWanted:
    failure = errors.NoLongerWanted(f"{RESOLVED}{', and it may have been made' if may_be_done else ''}; last: {error}")
    failure.is_begun = may_be_done
    return failure
