"""Watching whether jobs live: deaths, outages, restarts of the server, and who would have a death unnoticed."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pytest

from trainmedic.wire import envelope, notice
from trainmedic.wire.notice import Notice
from trainmedic_server import telemetry
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.domain.job_life import GONE_AFTER, KEPT, LifeState
from trainmedic_server.engine import job_watch
from trainmedic_server.engine.job_watch import LOOK_EVERY, JobWatch
from trainmedic_server.errors import BusUnavailable, Conflict, NotFound, StoreUnavailable
from trainmedic_server.ports.jobs import ArrivedNotice
from trainmedic_server.ports.outside import Presence
from trainmedic_server.simulation.virtual_time import VirtualClock

INSTANCE = envelope.new_id()
PATIENCE = GONE_AFTER + 2 * LOOK_EVERY


@dataclass
class JobsInRedis:
    """The jobs and launchers that write their presence, and the notices that wait."""

    clock: VirtualClock
    living: dict[str, str] = field(default_factory=dict)
    launching: set[str] = field(default_factory=set)
    waiting_launchers: set[str] = field(default_factory=set)
    silent: list[Presence] = field(default_factory=list)
    waiting: dict[bytes, Notice] = field(default_factory=dict)
    placed: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    in_slurm: dict[str, str] = field(default_factory=dict)
    is_away: bool = False
    discarded: list[bytes] = field(default_factory=list)

    async def jobs(self) -> list[Presence]:
        if self.is_away:
            raise BusUnavailable("away")
        present = [
            self._presence(
                name,
                {
                    "instance": instance,
                    "placement": self.placed.get(name),
                    "slurm": {"job_id": self.in_slurm.get(name)},
                },
            )
            for name, instance in self.living.items()
        ]
        return [*present, *self.silent]

    async def launchers(self) -> list[Presence]:
        waiting = [self._presence(name, {"state": "left_out"}) for name in self.waiting_launchers]
        return [self._presence(name, {}) for name in self.launching] + waiting

    def notices(self) -> Sequence[ArrivedNotice]:
        return [ArrivedNotice(entry, message) for entry, message in self.waiting.items()]

    def discard_notices(self, entries: Collection[bytes]) -> None:
        for entry in entries:
            del self.waiting[entry]

    def _presence(self, name: str, details: Mapping[str, Any]) -> Presence:
        return Presence(name, self.clock.now(), {"says_end": True, **details})


class Watching:
    """A watch over jobs in virtual time."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.redis = JobsInRedis(self.clock, {"llm-1": INSTANCE, "llm-2": envelope.new_id()})
        self.store = InMemoryStore()
        self.metrics = telemetry.Metrics()
        self._began = self.clock.now()
        self.begin()

    def begin(self) -> None:
        """Start a server on the same store."""
        self.metrics = telemetry.Metrics()
        self.watch = JobWatch(self.redis, self.store, self.clock, self.metrics, self._ago, self._elapsed)

    async def pass_by(self, span: timedelta) -> None:
        """Look as often as a server does, for so long."""
        until = self.clock.now() + span
        while self.clock.now() < until:
            await self._look()
            await self.clock.sleep_until(self.clock.now() + LOOK_EVERY)

    async def _look(self) -> None:
        with contextlib.suppress(BusUnavailable):
            await self.watch.look()

    def gone(self, job: str) -> float | None:
        return self.metrics.registry.get_sample_value("trainmedic_job_gone", {"job_name": job})

    async def events(self) -> list[tuple[str, str]]:
        events = await self.store.events_after(0, 1000)
        return [(event.kind, event.data["job"]) for event in events]

    def tell(self, kind: str, instance: str = INSTANCE, **members: Any) -> None:
        message = Notice("llm-1", kind, instance, members.pop("number", 1), self.clock.now(), **members)
        self.redis.waiting[envelope.new_id().encode()] = message

    def _ago(self, span: timedelta) -> datetime:
        return self.clock.now() - span

    def _elapsed(self) -> float:
        return (self.clock.now() - self._began).total_seconds()


@pytest.fixture
async def watching() -> Watching:
    made = Watching()
    await made.pass_by(LOOK_EVERY)
    return made


async def test_a_job_that_was_there_may_connect_again(watching: Watching) -> None:
    """Also after it is gone and the server has restarted; before the first look nobody knows."""
    watching.redis.living.clear()
    await watching.pass_by(timedelta(minutes=5))
    assert (watching.watch.may_connect("llm-1"), watching.watch.may_connect("llm-12")) == (True, False)
    watching.begin()
    assert watching.watch.may_connect("llm-12")
    await watching.pass_by(LOOK_EVERY)
    assert (watching.watch.may_connect("llm-1"), watching.watch.may_connect("llm-12")) == (True, False)


async def test_the_gpus_of_jobs_are_shown_while_the_jobs_are_there(watching: Watching) -> None:
    """By UUID, the node beside it; an index alone names no GPU. One that moves is shown where it is."""

    def shown() -> set[tuple[str, str, str]]:
        (family,) = [each for each in watching.metrics.jobs.collect() if each.name == "trainmedic_job_gpu"]
        return {
            (sample.labels["job_name"], sample.labels["gpu_node"], sample.labels["uuid"]) for sample in family.samples
        }

    watching.redis.placed["llm-1"] = [
        {"rank": 0, "node": "node-1", "gpu": "GPU-a"},
        {"rank": 1, "node": "node-1", "gpu": "1"},
    ]
    await watching.pass_by(LOOK_EVERY)
    assert shown() == {("llm-1", "node-1", "GPU-a")}
    watching.redis.placed["llm-1"] = [{"rank": 0, "node": "node-2", "gpu": "GPU-b"}]
    await watching.pass_by(LOOK_EVERY)
    assert shown() == {("llm-1", "node-2", "GPU-b")}
    del watching.redis.living["llm-1"]
    await watching.pass_by(LOOK_EVERY)
    assert shown() == set()


async def test_a_death_is_told_with_the_ranks_that_the_job_had(watching: Watching) -> None:
    """A rank on several GPUs is one; of a job that names no ranks, nothing is said."""
    on_two = [{"rank": 0, "node": "node-1", "gpu": gpu} for gpu in ("GPU-a", "GPU-b")]
    watching.redis.placed["llm-1"] = [*on_two, {"rank": 1, "node": "node-2", "gpu": "GPU-c"}]
    await watching.pass_by(2 * LOOK_EVERY)
    watching.redis.living.clear()
    await watching.pass_by(PATIENCE)
    data = {event.data["job"]: event.data.get("ranks") for event in await watching.store.events_after(0, 10)}
    assert data == {"llm-1": 2, "llm-2": None}


async def test_the_ranks_of_a_job_are_known_though_it_could_not_be_written_at_first(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a job says of its ranks is read once, and the store was away just then."""

    async def away(work: object) -> None:
        raise StoreUnavailable("away")

    watching.redis.living["llm-3"] = envelope.new_id()
    watching.redis.placed["llm-3"] = [{"rank": 0, "node": "node-1"}]
    with monkeypatch.context() as outage:
        outage.setattr(watching.store, "transact", away)
        with pytest.raises(StoreUnavailable):
            await watching.watch.look()
    await watching.pass_by(2 * LOOK_EVERY)
    del watching.redis.living["llm-3"]
    await watching.pass_by(PATIENCE)
    [death] = await watching.store.events_after(0, 10)
    assert death.data["ranks"] == 1


async def test_a_job_that_dies_without_a_word_is_gone(watching: Watching) -> None:
    """After a minute, not before; the others are not."""
    del watching.redis.living["llm-1"]
    await watching.pass_by(GONE_AFTER - LOOK_EVERY)
    assert watching.gone("llm-1") == 0
    await watching.pass_by(3 * LOOK_EVERY)
    assert (watching.gone("llm-1"), watching.gone("llm-2")) == (1, 0)
    assert await watching.events() == [("job_gone", "llm-1")]


async def test_a_job_that_ends_as_it_should_is_not(watching: Watching) -> None:
    """It says so before it goes."""
    watching.tell(notice.ENDED)
    del watching.redis.living["llm-1"]
    await watching.pass_by(PATIENCE)
    assert watching.gone("llm-1") == 0
    assert await watching.events() == [("job_ended", "llm-1")]
    assert not watching.redis.waiting


async def test_when_redis_is_away_nobody_is_gone(watching: Watching) -> None:
    """All presences vanish then, and expire; when it is back everybody has some time to write his own."""
    watching.redis.is_away = True
    await watching.pass_by(10 * GONE_AFTER)
    living, watching.redis.living = watching.redis.living, {}
    watching.redis.is_away = False
    await watching.pass_by(GONE_AFTER / 2)
    watching.redis.living = living
    await watching.pass_by(PATIENCE)
    assert await watching.events() == []


async def test_a_downtime_of_the_server_makes_nobody_gone(watching: Watching) -> None:
    """Whoever died meanwhile is noticed all the same, and whoever lives is not."""
    del watching.redis.living["llm-1"]
    await watching.clock.sleep_until(watching.clock.now() + timedelta(hours=3))
    watching.begin()
    await watching.pass_by(GONE_AFTER - LOOK_EVERY)
    assert await watching.events() == []
    await watching.pass_by(3 * LOOK_EVERY)
    assert (watching.gone("llm-1"), watching.gone("llm-2")) == (1, 0)


async def test_a_server_that_is_held_up_begins_to_wait_anew(watching: Watching) -> None:
    """Its machine slept, or its disk hung: what it has not looked at it cannot have missed."""
    del watching.redis.living["llm-1"]
    await watching.pass_by(2 * LOOK_EVERY)
    await watching.clock.sleep_until(watching.clock.now() + GONE_AFTER)
    await watching.pass_by(2 * LOOK_EVERY)
    assert await watching.events() == []


async def test_who_is_gone_stays_so_over_a_restart_until_it_is_back(watching: Watching) -> None:
    """The alert must not resolve because the server was restarted."""
    instance = watching.redis.living.pop("llm-1")
    await watching.pass_by(PATIENCE)
    watching.begin()
    await watching.pass_by(LOOK_EVERY)
    assert watching.gone("llm-1") == 1
    watching.redis.living["llm-1"] = instance
    await watching.pass_by(LOOK_EVERY)
    assert watching.gone("llm-1") == 0
    assert await watching.events() == [("job_gone", "llm-1"), ("job_returned", "llm-1")]


async def test_who_is_gone_is_forgotten_after_a_day(watching: Watching) -> None:
    """Nobody is going to start it again."""
    del watching.redis.living["llm-1"]
    await watching.pass_by(PATIENCE)
    await watching.clock.sleep_until(watching.clock.now() + KEPT)
    await watching.pass_by(LOOK_EVERY)
    assert watching.gone("llm-1") is None
    assert (await watching.events())[-1] == ("job_forgotten", "llm-1")
    assert [life.name for life in await watching.store.transact(lambda tx: tx.job_lives())] == ["llm-2"]


async def test_while_a_launcher_is_there_a_job_is_not_gone(watching: Watching) -> None:
    """It waits until it starts the job again. When the launcher dies too, the job is gone."""
    watching.redis.launching.add("llm-1")
    del watching.redis.living["llm-1"]
    watching.tell(notice.FAILED, envelope.new_id(), attempt=1, reason="rank 3 ended by SIGKILL")
    await watching.pass_by(10 * GONE_AFTER)
    assert await watching.events() == [("job_failed", "llm-1")]
    watching.redis.launching.clear()
    await watching.pass_by(PATIENCE)
    assert (await watching.events())[-1] == ("job_gone", "llm-1")


async def test_a_recorded_presence_keeps_nobody_alive(watching: Watching) -> None:
    """Somebody writes the last presence of a dead job again and again: it is genuine, and says nothing new."""
    recorded = Presence("llm-1", watching.clock.now(), {"says_end": True, "instance": INSTANCE})
    del watching.redis.living["llm-1"]
    watching.redis.silent.append(recorded)
    await watching.pass_by(PATIENCE)
    assert watching.gone("llm-1") == 1


async def test_a_presence_that_is_not_believed_keeps_nobody_alive(watching: Watching) -> None:
    """Nor does it make a job known."""
    del watching.redis.living["llm-1"]
    for name in ("llm-1", "made-up"):
        doubtful = Presence(name, watching.clock.now(), {"says_end": True}, doubt="it is not signed")
        watching.redis.silent.append(doubtful)
    await watching.pass_by(PATIENCE)
    assert (watching.gone("llm-1"), watching.gone("made-up")) == (1, None)


async def test_a_job_that_does_not_say_how_it_ends_is_not_watched(watching: Watching) -> None:
    """An SDK of an earlier release deletes its presence, and that is all."""
    watching.redis.silent.append(Presence("older", watching.clock.now(), {"instance": INSTANCE}))
    await watching.pass_by(LOOK_EVERY)
    assert watching.gone("older") is None


async def test_names_that_no_store_can_keep_are_passed_over(watching: Watching) -> None:
    """Whoever can write to Redis makes them; the death of others is noticed all the same."""
    watching.redis.living |= {"\x00": INSTANCE, "two words": INSTANCE, "\ud800": INSTANCE, "x" * 300: INSTANCE}
    watching.redis.living["llm-3"] = "\x00"
    del watching.redis.living["llm-1"]
    await watching.pass_by(PATIENCE)
    assert (watching.gone("llm-1"), watching.gone("llm-3"), watching.gone("two words")) == (1, 0, None)


async def test_too_many_jobs_are_remembered_within_bounds(watching: Watching, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key anybody who can write to Redis makes names up."""
    monkeypatch.setattr(job_watch, "MOST_JOBS", 50)
    watching.redis.living |= {f"made-up-{number}": envelope.new_id() for number in range(500)}
    await watching.pass_by(3 * LOOK_EVERY)
    lives = await watching.store.transact(lambda tx: tx.job_lives())
    assert len(lives) == 50
    assert all(life.state is LifeState.PRESENT for life in lives)
    del watching.redis.living["llm-1"]
    await watching.pass_by(PATIENCE)
    assert watching.gone("llm-1") == 1, "the names that were made up have not taken the place of a job"


async def test_jobs_that_have_ended_make_room_for_others(watching: Watching, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are remembered only so that an old presence is known."""
    monkeypatch.setattr(job_watch, "MOST_JOBS", 2)
    watching.tell(notice.ENDED)
    del watching.redis.living["llm-1"]
    await watching.pass_by(LOOK_EVERY)
    watching.redis.living |= {"llm-3": envelope.new_id(), "llm-4": envelope.new_id()}
    await watching.pass_by(2 * LOOK_EVERY)
    lives = await watching.store.transact(lambda tx: tx.job_lives())
    assert sorted(life.name for life in lives) == ["llm-2", "llm-3"]


async def test_a_launcher_whose_node_is_left_out_keeps_no_job_alive(watching: Watching) -> None:
    """It waits to be taken back, whatever becomes of the job."""
    watching.redis.waiting_launchers.add("llm-1")
    del watching.redis.living["llm-1"]
    await watching.pass_by(PATIENCE)
    assert watching.gone("llm-1") == 1


async def test_a_person_ends_the_alarm_about_a_job_that_was_meant_to_end(watching: Watching) -> None:
    """With the name and the note in the history; it stays so over a restart of the server, and nobody says it twice."""
    del watching.redis.living["llm-1"]
    await watching.pass_by(PATIENCE)
    await watching.watch.end("llm-1", "ann", "ended by scancel")
    assert watching.gone("llm-1") == 0
    watching.begin()
    await watching.pass_by(PATIENCE)
    assert watching.gone("llm-1") == 0
    *_, last = await watching.store.events_after(0, 10)
    assert (last.kind, last.actor) == ("job_ended", "ann")
    assert last.data == {"job": "llm-1", "reason": "ended by scancel"}
    with pytest.raises(Conflict, match="it is ended"):
        await watching.watch.end("llm-1", "ann", "again")


async def test_a_job_that_a_person_took_for_ended_can_come_back_and_die(watching: Watching) -> None:
    """The same process too, which a broken network had cut off."""
    del watching.redis.living["llm-1"]
    await watching.pass_by(PATIENCE)
    await watching.watch.end("llm-1", "ann", "ended by scancel")
    watching.redis.living["llm-1"] = INSTANCE
    await watching.pass_by(LOOK_EVERY)
    with pytest.raises(Conflict, match="1m of silence; try again"):
        await watching.watch.end("llm-1", "ann", "too early")
    del watching.redis.living["llm-1"]
    await watching.pass_by(PATIENCE)
    assert watching.gone("llm-1") == 1


async def test_of_a_job_that_nobody_has_heard_of_nothing_can_be_said(watching: Watching) -> None:
    """By a server that has not looked yet, too."""
    watching.begin()
    with pytest.raises(NotFound):
        await watching.watch.end("llm-9", "ann", "ended")


async def test_the_slurm_id_of_a_requeued_job_stays_known(watching: Watching) -> None:
    """Its presence is gone while it waits in Slurm's queue."""
    watching.redis.in_slurm = {"llm-1": "4711", "llm-2": "4711"}
    await watching.pass_by(LOOK_EVERY)
    assert watching.watch.slurm_ids().get("llm-1") == "4711"
    assert watching.watch.slurm_ids().get("llm-3") is None
    del watching.redis.living["llm-1"]
    await watching.pass_by(PATIENCE)
    assert watching.watch.slurm_ids().get("llm-1") == "4711"
    await watching.pass_by(KEPT + 2 * LOOK_EVERY)
    assert watching.watch.slurm_ids().get("llm-1") is None


async def test_an_untrusted_presence_does_not_hide_the_slurm_id(watching: Watching) -> None:
    """As after a restart of the server, which knows no trusted one yet."""
    watching.redis.in_slurm = {"llm-1": "4711"}
    await watching.pass_by(LOOK_EVERY)
    del watching.redis.living["llm-1"]
    watching.redis.silent.append(Presence("llm-1", watching.clock.now(), doubt="it is not signed"))
    await watching.pass_by(LOOK_EVERY)
    assert watching.watch.slurm_ids().get("llm-1") == "4711"


async def test_a_process_without_an_id_is_unknown(watching: Watching) -> None:
    """So data that it wrote shortly before the job's end is no return."""
    watching.tell(notice.ENDED)
    await watching.pass_by(LOOK_EVERY)
    del watching.redis.living["llm-1"]
    watching.redis.silent.append(Presence("llm-1", watching.clock.now(), {"says_end": True}))
    await watching.pass_by(LOOK_EVERY)
    lives = {life.name: life.state for life in await watching.store.transact(lambda tx: tx.job_lives())}
    assert lives["llm-1"] is LifeState.ENDED
