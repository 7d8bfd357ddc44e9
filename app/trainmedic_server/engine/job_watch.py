"""Detection of gone jobs, by the rules of ``domain.job_life``.

Only jobs with a launcher, or whose SDK reports their end (``says_end``), are watched.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from msgspec.structs import replace

from trainmedic.wire.notice import NAME
from trainmedic_core import duration
from trainmedic_core.gpu_names import is_of_one_node
from trainmedic_server import telemetry
from trainmedic_server.domain import job_life
from trainmedic_server.domain.event_codec import recorded
from trainmedic_server.domain.event_kinds import JobForgotten
from trainmedic_server.domain.job_life import JobLife, LifeChange, LifeState
from trainmedic_server.domain.topology import ranks_in, slurm_job_id
from trainmedic_server.engine import loops
from trainmedic_server.engine.absence_detection import AbsenceDetection
from trainmedic_server.engine.job_evaluations import JobEvaluations
from trainmedic_server.engine.read_parts import PartReader
from trainmedic_server.errors import BusUnavailable, Conflict, NotFound
from trainmedic_server.ports.jobs import ArrivedNotice, JobSource
from trainmedic_server.ports.outside import Clock, Presence
from trainmedic_server.ports.store import RunStore, Transaction

LOOK_EVERY = timedelta(seconds=5)
MOST_JOBS = 10_000  # records; further names are skipped
# Time between two looks above which the server itself stalled, so that silence does not count.
_LATEST_LOOK = timedelta(seconds=20)
_INSTANCE = re.compile(r"^[!-~]{1,64}\Z")  # IDs of processes; others count as unknown

log = telemetry.logger(__name__)


class _Ranks(NamedTuple):
    gpus: frozenset[tuple[str, str, str]]  # job, node and UUID
    number: int


class JobWatch:
    """``ago`` returns a past time excluding downtimes; ``elapsed`` is a monotonic clock in seconds."""

    def __init__(
        self,
        source: JobSource,
        store: RunStore,
        clock: Clock,
        metrics: telemetry.Metrics,
        ago: Callable[[timedelta], datetime],
        elapsed: Callable[[], float] | None = None,
    ) -> None:
        self._source = source
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._ago = ago
        self._absences = AbsenceDetection(job_life.GONE_AFTER, _LATEST_LOOK, elapsed)
        self._lives: dict[str, JobLife] | None = None  # None before loading
        # Last presence by kind and name. An unchanged one is no sign of life.
        self._last_presences: dict[tuple[str, str], datetime] = {}
        self._ranks: dict[str, int] = {}  # number of ranks by job, for events
        self._read_ranks = PartReader("placement", _ranks_of)
        self._evaluations = JobEvaluations()
        self._looking = asyncio.Lock()
        self._slurm_ids: dict[str, str] = {}

    async def watch(self) -> None:
        await loops.repeat(self.look, LOOK_EVERY, "jobs", self._metrics)

    async def look(self) -> None:
        """Raises BusUnavailable, StoreUnavailable."""
        async with self._looking:
            await self._look()

    def may_connect(self, job: str) -> bool:
        """Return whether the job was connected within `job_life.KEPT`, or may have been unnoticed."""
        lives = self._lives
        return lives is None or job in lives or len(lives) >= MOST_JOBS

    def slurm_ids(self) -> Mapping[str, str]:
        """Return the Slurm IDs last reported since the server's start, by job. Replaced as a whole."""
        return self._slurm_ids

    async def end(self, job: str, actor: str, note: str) -> JobLife:
        """Record that a gone job was meant to end. Raises NotFound, Conflict, StoreUnavailable."""
        async with self._looking:
            lives = dict(await self._known_lives())
            life = lives.get(job)
            if life is None:
                raise NotFound("No job of that name is known.")
            change = job_life.ended_on_purpose(life, note, self._clock.now())
            if change is None:
                silence = f"it counts as gone after {duration.write(job_life.GONE_AFTER)} of silence; try again then"
                why = silence if life.state is LifeState.PRESENT else f"it is {life.state}"
                raise Conflict(f"The job is not gone: {why}.")
            lives[job] = change.life
            await self._keep(lives, [change], [], actor)
            self._lives = lives
            self._metrics.jobs.show(list(lives.values()))
            return change.life

    async def _known_lives(self) -> dict[str, JobLife]:
        if self._lives is None:
            self._lives = {life.name: life for life in await self._store.transact(lambda tx: tx.job_lives())}
        return self._lives

    async def _look(self) -> None:
        known = await self._known_lives()
        arrived = self._source.notices()
        try:
            jobs, launchers = await asyncio.gather(self._source.jobs(), self._source.launchers())
        except BusUnavailable:
            self._absences.forget()
            raise
        self._note_slurm_ids(jobs, known)
        await self._note_ranks(jobs, known)
        lives_now = dict(known)
        changes = list(self._changes(lives_now, arrived, jobs, launchers))
        dropped = self._drop_old(lives_now)
        if changes or dropped:
            await self._keep(lives_now, changes, dropped)
        self._lives = lives_now
        self._source.discard_notices([notice.entry for notice in arrived])
        self._metrics.jobs.show(list(lives_now.values()))
        events = self._evaluations.due(jobs, self._clock.now())
        if events:
            await self._store.transact(lambda tx: tx.append(events))
        self._evaluations.note_recorded(events, jobs)

    def _note_slurm_ids(self, jobs: Sequence[Presence], known: Collection[str]) -> None:
        # An untrusted presence without earlier details says nothing.
        reported = {job.name: slurm_job_id(job.details) for job in jobs if job.doubt is None or job.details}
        kept = {job: slurm_id for job, slurm_id in self._slurm_ids.items() if job in known and job not in reported}
        self._slurm_ids = kept | {job: slurm_id for job, slurm_id in reported.items() if slurm_id is not None}

    async def _note_ranks(self, jobs: Sequence[Presence], known: Collection[str]) -> None:
        kept = {*known, *(job.name for job in jobs)}
        self._ranks = {name: number for name, number in self._ranks.items() if name in kept}
        read = await self._read_ranks.changed([job for job in jobs if job.doubt is None])
        if read is not None:
            await asyncio.to_thread(
                self._metrics.jobs.show_gpus, frozenset().union(*(job.gpus for job in read.values()))
            )
            self._ranks |= {name: job.number for name, job in read.items() if job.number}

    def _changes(
        self,
        lives: dict[str, JobLife],
        arrived: Sequence[ArrivedNotice],
        jobs: Sequence[Presence],
        launchers: Sequence[Presence],
    ) -> Iterator[LifeChange]:
        """Yield the changes, each after its application to `lives`."""
        now = self._clock.now()
        # If the records are full, skip new names. Dropping old ones would let invented names hide a job's death.
        room = MOST_JOBS - sum(life.state is not LifeState.ENDED for life in lives.values())
        present = self._new_presences("job", [job for job in jobs if job.details.get("says_end") is True])
        # A launcher whose node is excluded waits, whatever happens to the job.
        launched = self._new_presences(
            "launcher", [each for each in launchers if each.details.get("state") != "left_out"]
        )
        signs = [(name, "") for name in launched]
        signs += [(name, _instance_of(presence)) for name, presence in present.items()]
        # Presences first: notices are about processes that they introduce.
        for name, instance in signs:
            if name in lives or room > 0:
                room -= name not in lives
                yield from _applied(lives, job_life.after_report(lives.get(name), name, instance, now))
        for item in arrived:
            notice = item.notice
            if notice.job in lives or room > 0:
                room -= notice.job not in lives
                change = job_life.after_notice(lives.get(notice.job), notice, notice.attempt is not None, now)
                yield from _applied(lives, change)
        for name in self._absences.note(lives.keys() - present.keys() - launched.keys()):
            yield from _applied(lives, job_life.after_silence(lives[name], now))

    def _new_presences(self, kind: str, presences: Sequence[Presence]) -> dict[str, Presence]:
        present = {}
        for presence in presences:
            key = (kind, presence.name)
            is_named = NAME.match(presence.name) is not None
            if is_named and presence.doubt is None and self._last_presences.get(key) != presence.last_seen:
                self._last_presences[key] = presence.last_seen
                present[presence.name] = presence
        if len(self._last_presences) > 4 * MOST_JOBS:
            self._last_presences.clear()
        return present

    def _drop_old(self, lives: dict[str, JobLife]) -> list[JobLife]:
        kept_since = self._ago(job_life.KEPT)
        dropped = [life for life in lives.values() if job_life.is_forgotten(life, kept_since)]
        for life in dropped:
            del lives[life.name]
        return dropped + [lives.pop(life.name) for life in job_life.overcrowding(lives.values(), MOST_JOBS)]

    async def _keep(
        self,
        lives: dict[str, JobLife],
        changes: Sequence[LifeChange],
        dropped: Sequence[JobLife],
        actor: str = "trainmedic",
    ) -> None:
        now = self._clock.now()
        changed = {change.life.name for change in changes} & lives.keys()
        reports = (change.event for change in changes if change.event is not None)
        events = [recorded(replace(each, ranks=self._ranks.get(each.job)), now, actor=actor) for each in reports]
        events += [recorded(JobForgotten(life.name), now) for life in dropped if life.state is LifeState.GONE]

        def work(tx: Transaction) -> None:
            tx.save_job_lives([lives[name] for name in sorted(changed)])
            tx.forget_job_lives([life.name for life in dropped])
            tx.append(events)

        await self._store.transact(work)
        for event in events:
            log.info("job state changed", change=event.kind, **event.data)


def _ranks_of(job: Presence) -> _Ranks:
    ranks = ranks_in(job.name, job.details)
    gpus = ((job.name, rank.node, rank.gpu) for rank in ranks if rank.gpu and not is_of_one_node(rank.gpu))
    return _Ranks(frozenset(gpus), len({str(rank.rank) for rank in ranks}))


def _instance_of(presence: Presence) -> str:
    instance = presence.details.get("instance")
    return instance if isinstance(instance, str) and _INSTANCE.match(instance) else ""


def _applied(lives: dict[str, JobLife], change: LifeChange | None) -> Iterator[LifeChange]:
    if change is not None:
        lives[change.life.name] = change.life
        yield change
