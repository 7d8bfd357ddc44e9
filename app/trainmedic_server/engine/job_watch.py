"""Whether jobs live: a job that dies without a word is told from one that has ended as it should.

Every few seconds the presences are read. What was there and is not heard of for a while, though Redis answers, is gone;
what Redis did not answer meanwhile counts for nothing, for then all jobs vanish at once and none has died. The records
are kept in the run store, so that a restart of the server forgets no job, and a downtime makes none seem gone.

Only jobs whose SDK says how it ends (``says_end`` in their presence) are watched. Who calls it: ``wiring`` runs `watch`
beside the engine, and the API `end` for a person. Not here: the rules (`domain.job_life`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from msgspec.structs import replace

from trainmedic.wire.notice import NAME
from trainmedic_core.gpu_names import is_of_one_node
from trainmedic_server import telemetry
from trainmedic_server.domain import job_life
from trainmedic_server.domain.event_codec import recorded
from trainmedic_server.domain.event_kinds import JobForgotten
from trainmedic_server.domain.job_life import JobLife, LifeChange, LifeState
from trainmedic_server.domain.topology import ranks_in
from trainmedic_server.engine import loops
from trainmedic_server.engine.absence_detection import AbsenceDetection
from trainmedic_server.engine.job_evaluations import JobEvaluations
from trainmedic_server.engine.read_parts import PartReader
from trainmedic_server.errors import BusUnavailable, Conflict, NotFound
from trainmedic_server.ports.jobs import ArrivedNotice, JobSource
from trainmedic_server.ports.outside import Clock, Presence
from trainmedic_server.ports.store import RunStore, Transaction

LOOK_EVERY = timedelta(seconds=5)
"""As often as a job writes its presence."""
MOST_JOBS = 10_000
_LATEST_LOOK = timedelta(seconds=20)
"""Where a look comes later than this after the last one, the server was held up, and hears of jobs only now."""
_INSTANCE = re.compile(r"^[!-~]{1,64}\Z")

log = telemetry.logger(__name__)


class _Ranks(NamedTuple):
    """What a job says of its ranks."""

    gpus: frozenset[tuple[str, str, str]]
    """Each as job, node and UUID."""
    number: int


class JobWatch:
    """``ago`` returns the moment since which so much time has passed in which a server was at work; ``elapsed`` counts
    seconds and cannot be set."""

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
        self._lives: dict[str, JobLife] | None = None
        self._signs: dict[tuple[str, str], datetime] = {}
        """By kind and name, when the presence that was last heard was written: what does not change is no sign."""
        self._ranks: dict[str, int] = {}
        """How many ranks each job had when it was last there."""
        self._read_ranks = PartReader("placement", _ranks_of)
        self._evaluations = JobEvaluations()
        self._looking = asyncio.Lock()
        """Held by whoever changes the records."""

    async def watch(self) -> None:
        """Look until cancelled."""
        await loops.repeat(self.look, LOOK_EVERY, "jobs", self._metrics)

    async def look(self) -> None:
        """Look once. Raises BusUnavailable, StoreUnavailable."""
        async with self._looking:
            await self._look()

    async def end(self, job: str, actor: str, note: str) -> JobLife:
        """A person says that a job which is gone was meant to end; what is known of it then.

        Raises NotFound, Conflict, StoreUnavailable.
        """
        async with self._looking:
            lives = dict(await self._known_lives())
            life = lives.get(job)
            if life is None:
                raise NotFound("No job of that name is remembered.")
            change = job_life.ended_on_purpose(life, note, self._clock.now())
            if change is None:
                raise Conflict(f"The job is not gone: it is {life.state}.")
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
        await self._note_ranks(jobs, known)
        lives_now = dict(known)
        changes = list(self._changes(lives_now, arrived, jobs, launchers))
        dropped = self._dropped(lives_now)
        if changes or dropped:
            await self._keep(lives_now, changes, dropped)
        self._lives = lives_now
        self._source.discard_notices([notice.entry for notice in arrived])
        self._metrics.jobs.show(list(lives_now.values()))
        await self._record_evaluations(jobs)

    async def _record_evaluations(self, jobs: Sequence[Presence]) -> None:
        """Record new evaluation results in the history."""
        events = self._evaluations.due(jobs, self._clock.now())
        if events:
            await self._store.transact(lambda tx: tx.append(events))
        self._evaluations.recorded(events, jobs)

    async def _note_ranks(self, jobs: Sequence[Presence], known: Collection[str]) -> None:
        """Note which GPUs are in use, and how many ranks each job has, as far as it is believed."""
        kept = {*known, *(job.name for job in jobs)}
        self._ranks = {name: number for name, number in self._ranks.items() if name in kept}
        told = await self._read_ranks.changed([job for job in jobs if job.doubt is None])
        if told is not None:
            await asyncio.to_thread(
                self._metrics.jobs.show_gpus, frozenset().union(*(job.gpus for job in told.values()))
            )
            self._ranks |= {name: job.number for name, job in told.items() if job.number}

    def _changes(
        self,
        lives: dict[str, JobLife],
        arrived: Sequence[ArrivedNotice],
        jobs: Sequence[Presence],
        launchers: Sequence[Presence],
    ) -> Iterator[LifeChange]:
        """What has changed, in order; `lives` takes it up."""
        now = self._clock.now()
        # Where the records are full of jobs that have not ended, a new name is passed over: were an older one dropped
        # for it, whoever makes names up could have a death unnoticed.
        room = MOST_JOBS - sum(life.state is not LifeState.ENDED for life in lives.values())
        heard = self._heard("job", [job for job in jobs if job.details.get("says_end") is True])
        # One whose node is left out waits, whatever becomes of the job.
        launched = self._heard("launcher", [each for each in launchers if each.details.get("state") != "left_out"])
        signs = [(name, "") for name in launched]
        signs += [(name, _instance_of(presence)) for name, presence in heard.items()]
        # Before the notices, which are about processes that these have made known.
        for name, instance in signs:
            if name in lives or room > 0:
                room -= name not in lives
                yield from _taken(lives, job_life.heard(lives.get(name), name, instance, now))
        for item in arrived:
            notice = item.notice
            if notice.job in lives or room > 0:
                room -= notice.job not in lives
                change = job_life.noticed(lives.get(notice.job), notice, notice.attempt is not None, now)
                yield from _taken(lives, change)
        for name in self._absences.note(lives.keys() - heard.keys() - launched.keys()):
            yield from _taken(lives, job_life.missed(lives[name], now))

    def _heard(self, kind: str, presences: Sequence[Presence]) -> dict[str, Presence]:
        """Those of which something new was heard, by name. One that is written again as it was, by whomever, is not."""
        heard = {}
        for presence in presences:
            key = (kind, presence.name)
            is_named = NAME.match(presence.name) is not None
            if is_named and presence.doubt is None and self._signs.get(key) != presence.last_seen:
                self._signs[key] = presence.last_seen
                heard[presence.name] = presence
        if len(self._signs) > 4 * MOST_JOBS:
            self._signs.clear()
        return heard

    def _dropped(self, lives: dict[str, JobLife]) -> list[JobLife]:
        """The records that are not kept any more; `lives` has them no longer."""
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
            log.info("a job's life has changed", change=event.kind, **event.data)


def _ranks_of(job: Presence) -> _Ranks:
    ranks = ranks_in(job.name, job.details)
    gpus = ((job.name, rank.node, rank.gpu) for rank in ranks if rank.gpu and not is_of_one_node(rank.gpu))
    return _Ranks(frozenset(gpus), len({str(rank.rank) for rank in ranks}))


def _instance_of(presence: Presence) -> str:
    instance = str(presence.details.get("instance"))
    return instance if _INSTANCE.match(instance) else ""


def _taken(lives: dict[str, JobLife], change: LifeChange | None) -> Iterator[LifeChange]:
    if change is not None:
        lives[change.life.name] = change.life
        yield change
