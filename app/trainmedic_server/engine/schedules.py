"""Runs at the times of schedules.

Each time is a stand-in alert, so it starts at most one run. Of the times without a server, the last counts unless older
than ``max_age``; others are recorded as missed.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta

from msgspec import Struct

from trainmedic_server.domain import beginnings, cron
from trainmedic_server.domain.alert import Alert, Delivery
from trainmedic_server.domain.upcoming import clock as clock_text
from trainmedic_server.engine import loops
from trainmedic_server.engine.engine_services import EngineServices
from trainmedic_server.ports.playbooks import CompiledPlaybook
from trainmedic_server.ports.store import Transaction

# Time within which a new or changed playbook is noticed. Times of known schedules are met exactly.
LOOK_EVERY = timedelta(seconds=10)
_POSITION = "schedules"  # name of the stored position, in seconds since 1970
_MOST_PATIENCE = timedelta(days=1)  # limits how many late times are computed
_SAVE_EVERY = timedelta(minutes=1)  # how often the time is stored up to which all times are decided

_Key = tuple[str, str, str]  # playbook, schedule, timezone


class DueTimes(Struct, frozen=True):
    start: datetime | None = None  # the time that starts a run, if any
    missed: datetime | None = None  # start of the stand-in that records missed times, if any
    why: str = ""


def due(
    schedule: str,
    timezone: str,
    since: datetime,
    now: datetime,
    patience: timedelta,
    skipped: Callable[[datetime], bool] = lambda moment: False,
) -> DueTimes:
    """Decide on the times after `since`, up to `now`: the last one starts a run, others are missed.

    Times older than `patience`, or `skipped` by the clock, start nothing.
    """
    following = functools.partial(cron.next_after, schedule, timezone)
    first = following(since)
    if first > now:
        return DueTimes()
    late = list(_times_up_to(now, following, max(since, now - patience - timedelta(microseconds=1))))
    start = late[-1] if late and not skipped(late[-1]) else None
    if first == start:
        return DueTimes(start)
    cause = "the clock jumped past it" if skipped(first) else "no server ran"
    more = "; later times were missed too" if following(first) < (start or now) else ""
    return DueTimes(start, now if skipped(first) else first, f"{clock_text(first)} was missed: {cause}{more}")


def _times_up_to(now: datetime, following: Callable[[datetime], datetime], moment: datetime) -> Iterator[datetime]:
    while (moment := following(moment)) <= now:
        yield moment


class Schedules:
    def __init__(self, services: EngineServices, admit: Callable[[Delivery], Awaitable[object]]) -> None:
        self._services = services
        self._admit = admit
        self._done: dict[_Key, datetime] = {}  # the time up to which a schedule's times are decided
        self._looked_at: datetime | None = None
        self._saved_at: datetime | None = None
        self._next: datetime | None = None  # the next time of any schedule

    async def run(self) -> None:
        await loops.repeat(self.check, LOOK_EVERY, "schedules", self._services.metrics, sleep=self._sleep)

    async def _sleep(self, seconds: float) -> None:
        now = self._services.clock.now()
        until = now + timedelta(seconds=seconds)
        if self._next is not None:
            until = min(until, max(self._next, now + timedelta(seconds=1)))
        await self._services.clock.sleep_until(until)

    async def check(self) -> None:
        """Start what is due. Raises TrainmedicError; the next check decides the rest."""
        now = self._services.clock.now()
        # A time after now stems from a wrong clock.
        since = min(self._looked_at or await self._load_position() or now, now)
        scheduled = {_key(each): each for each in self._services.catalog.all() if each.definition.on.schedule}
        # A schedule that was not there at the last look counts from it.
        done = {key: min(self._done.get(key, since), now) for key in scheduled}
        self._next = None
        patience = min(self._services.limits.max_age, _MOST_PATIENCE)
        for key, playbook in scheduled.items():
            _, schedule, timezone = key
            times = due(schedule, timezone, done[key], now, patience, self._services.timeline.was_skipped)
            stand_ins = tuple(_stand_ins(playbook.definition.name, times))
            for alert in stand_ins:
                await self._admit(Delivery(self._services.new_id(), now, "schedule", "", "", (alert,)))
            if stand_ins:
                self._saved_at = None  # save the position below
            self._done[key] = now
            following = cron.next_after(schedule, timezone, now)
            self._next = min(self._next or following, following)
        self._done = {key: self._done[key] for key in scheduled}
        self._looked_at = now
        # Also without schedules: the times of one that is added during a downtime count from the last saved position.
        if self._saved_at is None or not timedelta(0) <= now - self._saved_at < _SAVE_EVERY:
            await self._save_position(now)

    async def _load_position(self) -> datetime | None:
        seconds = await self._services.store.transact(lambda tx: tx.event_positions.position(_POSITION))
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC)

    async def _save_position(self, now: datetime) -> None:
        def work(tx: Transaction) -> None:
            tx.event_positions.save_position(_POSITION, int(now.timestamp()))

        await self._services.store.transact(work)
        self._saved_at = now


def _key(playbook: CompiledPlaybook) -> _Key:
    definition = playbook.definition
    return definition.name, definition.on.schedule or "", definition.on.zone


def _stand_ins(playbook: str, times: DueTimes) -> Iterator[Alert]:
    if times.missed is not None:
        yield beginnings.of_schedule(playbook, times.missed, times.why)
    if times.start is not None:
        yield beginnings.of_schedule(playbook, times.start)
