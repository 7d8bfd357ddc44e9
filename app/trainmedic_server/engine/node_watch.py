"""Locations and progress of jobs, and boot times of nodes, from presences.

Locations last an hour: a job's output may arrive after its presence is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainmedic.wire import envelope
from trainmedic_core.target import LONGEST_NAME
from trainmedic_logs.domain.known_finding import JobPlace
from trainmedic_server import telemetry
from trainmedic_server.domain.topology import ranks_in
from trainmedic_server.engine import loops
from trainmedic_server.engine.read_parts import PartReader
from trainmedic_server.ports.jobs import PresenceSource
from trainmedic_server.ports.outside import Clock, Presence
from trainmedic_server.ports.store import RunStore

LOOK_EVERY = timedelta(seconds=5)
REMEMBERED = timedelta(hours=1)  # after the last presence
MOST_PLACES = 200_000  # locations; further ones are skipped
_STORE_AGAIN = timedelta(minutes=10)  # Age of a location's stored time at which it is renewed
_STORE_EVERY = timedelta(minutes=1)
_UUID7_DIGITS = 12  # hexadecimal digits of the time in milliseconds

log = telemetry.logger(__name__)


class JobProgress(Struct, frozen=True):
    instance: str
    began_at: datetime | None  # start of the process; None if its ID has no time
    step: int  # 0 if not reported
    progressed_at: datetime | None = None  # last increase of the step; None if never


class NodeWatch:
    def __init__(self, source: PresenceSource, store: RunStore, clock: Clock, metrics: telemetry.Metrics) -> None:
        self._source = source
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._places: dict[JobPlace, datetime] = {}  # with the time of the last presence
        self._stored: dict[JobPlace, datetime] = {}  # with the stored time
        self._store_from: datetime | None = None  # None after a failure: at the next look
        self.progress: dict[str, JobProgress] = {}  # connected jobs
        self._read_places = PartReader("placement", _places_of)
        self._of_jobs: frozenset[JobPlace] = frozenset()  # as the jobs last reported
        self._reported_boots: dict[str, Any] = {}  # unparsed, to notice changes
        self.booted_at: dict[str, datetime] = {}  # latest boot by node
        self.agents: frozenset[str] = frozenset()  # connected nodes

    async def start(self) -> None:
        """Load the last hour's locations. Raises StoreUnavailable."""
        kept, oldest = await self._store.transact(lambda tx: tx.findings.job_places()), self._clock.now() - REMEMBERED
        self._places = {place: seen_at for place, seen_at in kept.items() if seen_at >= oldest}
        self._stored = dict(self._places)

    def was_there(self, job: str, node: str) -> bool:
        seen_at = self._places.get(JobPlace(job, node))
        return seen_at is not None and self._clock.now() - seen_at <= REMEMBERED

    def note_boot(self, node: str, booted_at: datetime | None) -> None:
        """Note the latest boot. Times over an hour ahead are wrong clocks."""
        before = self.booted_at.get(node)
        if booted_at is not None and booted_at <= self._clock.now() + REMEMBERED:
            self.booted_at[node] = booted_at if before is None else max(before, booted_at)

    async def watch(self) -> None:
        await loops.repeat(self.look, LOOK_EVERY, "places", self._metrics)

    async def look(self) -> None:
        """Raises BusUnavailable, StoreUnavailable."""
        source = self._source
        jobs, launchers, agents = await asyncio.gather(source.jobs(), source.launchers(), source.agents())
        now = self._clock.now()
        places = await self._places_in(jobs, launchers)
        room = max(MOST_PLACES - len(self._places), 0)
        new = list(islice((place for place in places if place not in self._places), room))
        self._places |= dict.fromkeys(self._places.keys() & places, now) | dict.fromkeys(new, now)
        self.progress = {job.name: self._progress_of(job, now) for job in jobs if job.doubt is None}
        self.agents = frozenset(agent.name for agent in agents)
        reported = {agent.name: agent.details.get("booted_at") for agent in agents}
        for name, booted_at in reported.items():
            if booted_at != self._reported_boots.get(name):
                self.note_boot(name, _parsed_time(booted_at))
        self._reported_boots = reported
        if new or self._store_from is None or now >= self._store_from:
            self._store_from = None
            await self._store_places(now)
            self._store_from = now + _STORE_EVERY

    async def _places_in(self, jobs: Sequence[Presence], launchers: Sequence[Presence]) -> Collection[JobPlace]:
        """Include launchers, which wait while their node is excluded."""
        reported = await self._read_places.changed(jobs)
        if reported is not None:
            self._of_jobs = frozenset().union(*reported.values())
        of_launchers = (
            JobPlace(launcher.name, node)
            for launcher in launchers
            if isinstance(node := launcher.details.get("node"), str) and node
        )
        return self._of_jobs.union(place for place in of_launchers if _is_storable(place))

    async def _store_places(self, now: datetime) -> None:
        oldest = now - REMEMBERED
        self._places = {place: seen_at for place, seen_at in self._places.items() if seen_at >= oldest}
        self._stored = {place: at for place, at in self._stored.items() if place in self._places}
        due = {
            place: seen_at
            for place, seen_at in self._places.items()
            if place not in self._stored or seen_at - self._stored[place] >= _STORE_AGAIN
        }
        if due:
            await self._store.transact(lambda tx: tx.findings.save_job_places(due))
            self._stored |= due

    def _progress_of(self, job: Presence, now: datetime) -> JobProgress:
        instance, step = str(job.details.get("instance"))[:64], job.details.get("step")
        number = step if isinstance(step, int) and not isinstance(step, bool) else 0
        before = self.progress.get(job.name)
        if before is None or before.instance != instance:
            return JobProgress(instance, began_at(instance), number)
        has_moved = number > before.step
        return replace(before, step=number, progressed_at=now if has_moved else before.progressed_at)


def began_at(instance: str) -> datetime | None:
    """Return the time in an instance ID (UUIDv7); None for other IDs."""
    digits = instance.replace("-", "")
    if len(digits) != 32 or digits[_UUID7_DIGITS] != "7":
        return None
    try:
        return datetime.fromtimestamp(int(digits[:_UUID7_DIGITS], 16) / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _places_of(job: Presence) -> frozenset[JobPlace]:
    places = (JobPlace(job.name, node) for node in {rank.node for rank in ranks_in(job.name, job.details)})
    return frozenset(place for place in places if _is_storable(place))


def _is_storable(place: JobPlace) -> bool:
    return all(0 < len(name.encode("utf-8", "replace")) <= LONGEST_NAME for name in place)


def _parsed_time(value: Any) -> datetime | None:
    try:
        return envelope.read_time(value) if isinstance(value, str) else None
    except envelope.EnvelopeError:
        return None
