"""Playbooks that a schedule starts: each time once, over restarts, kills and clocks that are set."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from tests.unit.engine.books import catalog_of
from tests.unit.engine.test_kills_of_people import DoomedStore, pass_time
from tests.unit.engine.world import World
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain.pause import PauseOrder
from trainmedic_server.domain.run import Decision, Run, Status
from trainmedic_server.engine.admission_changes import ByHand
from trainmedic_server.engine.manual_runs import StartOrder
from trainmedic_server.engine.schedules import DueTimes, due
from trainmedic_server.ports.store import HistoryFilter

MakeWorld = Callable[..., World]
MINUTE = 60.0
PATIENCE = timedelta(minutes=15)

# The world begins on Thursday, 2026-01-01, at midnight (UTC), which is 01:00 in Berlin.
NIGHTLY = """
playbook: nightly
on: {schedule: "10 1 * * *", timezone: Europe/Berlin}
target: {node: n1}
steps:
  - {action: test.cap}
"""


def utc(hour: int, minute: int = 0, day: int = 1) -> datetime:
    return datetime(2026, 1, day, hour, minute, tzinfo=UTC)


async def starts(at: World) -> list[datetime]:
    """Return the times that the runs that started stand for."""
    return [run.alert.starts_at for run in await at.runs() if run.decision is Decision.STARTED]


async def refused(at: World) -> list[tuple[Decision, str]]:
    return [(run.decision, run.message) for run in await at.runs() if run.status is Status.NOT_STARTED]


@pytest.mark.parametrize(
    ("since", "now", "expected"),
    [
        (utc(2, 10), utc(2, 50), DueTimes()),
        (utc(2, 50), utc(3, 0), DueTimes(utc(3))),
        (utc(3, 0), utc(3, 1), DueTimes()),
        (utc(2, 50), utc(3, 15), DueTimes(utc(3))),
        (utc(2, 50), utc(3, 16), DueTimes(None, utc(3), "2026-01-01T03:00:00Z was missed: no server ran")),
        (
            utc(0, 30),
            utc(3, 5),
            DueTimes(utc(3), utc(1), "2026-01-01T01:00:00Z was missed: no server ran; later times were missed too"),
        ),
    ],
)
def test_only_the_last_time_that_is_not_too_old_is_due(since: datetime, now: datetime, expected: DueTimes) -> None:
    """Earlier ones are one record, however many they are."""
    assert due("0 * * * *", "UTC", since, now, PATIENCE) == expected


def test_a_time_that_the_clock_jumped_past_is_recorded_for_now() -> None:
    """It may come again when the clock is corrected, and then it counts."""
    jumped = due("0 * * * *", "UTC", utc(2, 50), utc(3, 5), PATIENCE, lambda moment: moment == utc(3))
    assert jumped == DueTimes(None, utc(3, 5), "2026-01-01T03:00:00Z was missed: the clock jumped past it")


async def test_a_run_starts_at_the_time_in_its_zone(world: MakeWorld) -> None:
    """To the second, and the history names the schedule."""
    at = world(NIGHTLY)
    await at.engine.start()
    await at.pass_time(10 * MINUTE - 1)
    assert await at.runs() == []
    await at.pass_time(1)
    run = await at.run()
    assert (run.created_at, run.alert_name, run.status, run.target_key) == (
        utc(0, 10),
        "schedule:nightly",
        Status.SUCCEEDED,
        "node:n1",
    )


async def test_no_alert_starts_it(world: MakeWorld) -> None:
    """Not even one with the name of a schedule's stand-in."""
    at = world(NIGHTLY)
    admitted = await at.post(at.alert("schedule:nightly", node="n1"))
    assert (admitted.runs, admitted.unmatched) == ((), 1)


async def test_a_time_of_a_short_downtime_is_started_late(world: MakeWorld) -> None:
    """Within the maximum age, and once."""
    at = world(NIGHTLY)
    await at.engine.start()
    await at.pass_time(9 * MINUTE)
    await at.restart(after=10 * MINUTE)
    await at.restart(after=60)
    await at.pass_time(60)
    assert (await starts(at), await refused(at)) == ([utc(0, 10)], [])


async def test_times_of_a_long_downtime_are_recorded_as_missed(world: MakeWorld) -> None:
    """In one record."""
    at = world(NIGHTLY)
    await at.engine.start()
    await at.pass_time(MINUTE)
    await at.restart(after=50 * 60 * MINUTE)
    await at.restart(after=60)
    await at.pass_time(60)
    why = "2026-01-01T00:10:00Z was missed: no server ran; later times were missed too"
    assert (await starts(at), await refused(at)) == ([], [(Decision.STALE, why)])


async def test_a_person_may_retry_a_missed_time(world: MakeWorld) -> None:
    """Then it counts as started by hand."""
    at = world(NIGHTLY)
    await at.engine.start()
    await at.pass_time(MINUTE)
    await at.restart(after=60 * MINUTE)
    missed = await at.run()
    started = await at.engine.retry(missed.id, ByHand("ann", repeats=missed.id))
    assert (started.run.decision, started.run.target_key) == (Decision.STARTED, "node:n1")


async def test_a_time_joins_the_run_that_is_still_open(world: MakeWorld) -> None:
    """No second run waits behind it."""
    at = world(NIGHTLY.replace("10 1 * * *", "*/2 * * * *").replace("{action: test.cap}", "{wait: 5m}"))
    await at.engine.start()
    await at.pass_time(6 * MINUTE)
    assert [run.decision for run in await at.runs()] == [Decision.STARTED]
    assert (await at.story()).count("joined") == 2


async def test_a_clock_that_is_set_back_starts_nothing_twice(world: MakeWorld) -> None:
    """The minutes come again, their times do not."""
    at = world(NIGHTLY.replace("10 1 * * *", "*/2 * * * *"))
    await at.engine.start()
    await at.pass_time(4 * MINUTE + 5)
    at.clock.set_back(timedelta(minutes=3))
    await at.pass_time(5 * MINUTE)
    assert await starts(at) == [utc(0, 2), utc(0, 4), utc(0, 6)]


async def test_a_clock_that_is_set_forward_starts_nothing(world: MakeWorld) -> None:
    """The time that it jumps past is recorded, and counts when the clock is corrected."""
    at = world(NIGHTLY)
    await at.engine.start()
    await at.pass_time(MINUTE)
    at.clock.set_back(-timedelta(minutes=12))
    await at.pass_time(MINUTE)
    why = "2026-01-01T00:10:00Z was missed: the clock jumped past it"
    assert (await starts(at), await refused(at)) == ([], [(Decision.STALE, why)])
    at.clock.set_back(timedelta(minutes=12))
    await at.pass_time(15 * MINUTE)
    assert await starts(at) == [utc(0, 10)]


async def test_a_playbook_that_is_loaded_later_misses_nothing_before_it(world: MakeWorld) -> None:
    """Its times count from the look before it was seen."""
    at = world()
    await at.engine.start()
    await at.pass_time(3 * MINUTE)
    at.catalog._snapshot = catalog_of([NIGHTLY.replace("10 1 * * *", "*/2 * * * *")], at.actions)._snapshot
    await at.pass_time(2 * MINUTE)
    assert (await starts(at), await refused(at)) == ([utc(0, 4)], [])


async def test_a_playbook_that_is_loaded_in_a_downtime_counts_from_its_beginning(world: MakeWorld) -> None:
    """Also if the server had no schedule for a while before."""
    at = world(NIGHTLY)
    await at.engine.start()
    await at.pass_time(MINUTE)
    at.catalog._snapshot = catalog_of([], at.actions)._snapshot
    await at.pass_time(20 * MINUTE)
    at.catalog._snapshot = catalog_of([NIGHTLY], at.actions)._snapshot
    await at.restart(after=60)
    await at.pass_time(60)
    assert (await starts(at), await refused(at)) == ([], [])


async def test_guards_and_pauses_hold_as_for_an_alert(world: MakeWorld) -> None:
    """Each refusal is recorded, and nothing later starts for the same time."""
    at = world(NIGHTLY.replace("10 1 * * *", "*/2 * * * *") + "guards: {cooldown: 3m}\n")
    await at.engine.start()
    await at.pass_time(4 * MINUTE + 1)
    await at.engine.pause("ann", PauseOrder())
    await at.pass_time(2 * MINUTE)
    await at.engine.resume("ann")
    await at.pass_time(60)
    assert [run.decision for run in await at.runs()] == [Decision.STARTED, Decision.COOLDOWN, Decision.PAUSED]


async def test_an_observing_server_only_records_what_it_would_do(world: MakeWorld) -> None:
    """As for an alert."""
    at = world(NIGHTLY, mode="observe")
    await at.engine.start()
    await at.pass_time(11 * MINUTE)
    assert [run.status for run in await at.runs()] == [Status.OBSERVED]
    assert at.calls() == {}


async def test_a_group_is_selected_when_its_time_comes(world: MakeWorld) -> None:
    """And its rollout may last longer than an alert may be silent."""
    at = world(
        """
playbook: nightly
on: {schedule: 1 0 * * 4}
target: {nodes: {pool: h100}}
rollout: {serial: 1}
steps:
  - {wait: 10m}
  - {action: test.cap}
""",
        inventory={"attributes:n[1-3]": "pool=h100"},
        breaker_min_nodes=50,
        assume_resolved_after=timedelta(minutes=5),
    )
    await at.engine.start()
    await at.pass_time(32 * MINUTE)
    (parent,) = [run for run in await at.runs() if run.is_group]
    page, _ = await at.store.page(HistoryFilter(parent=parent.id), 10, None)
    assert sorted(run.target_key for run in page) == ["node:n1", "node:n2", "node:n3"]
    assert (parent.status, at.calls()) == (Status.SUCCEEDED, {"cap": 3})


async def test_people_start_it_too(world: MakeWorld) -> None:
    """On the target that it names."""
    at = world(NIGHTLY)
    started = await at.engine.start_run(StartOrder("nightly", None), ByHand("ann"))
    assert (started.run.target, started.run.started_by) == (Target(TargetKind.NODE, node="n1"), "ann")


async def night(fatal: int, *, before: bool) -> tuple[list[Run], int]:
    store = DoomedStore()
    at = World(NIGHTLY.replace("10 1 * * *", "5-59/10 * * * *"), store=store)
    await at.engine.start()
    store.left, store.before = fatal, before
    await pass_time(at, store, 10 * MINUTE)
    runs, commits = await at.runs(), -store.left
    calls = {call.command_id for call in at.actions["cap"].calls}
    await at.engine.stop()
    await store.close()
    assert len(calls) == 1
    return runs, commits


async def test_a_time_starts_one_run_at_any_kill() -> None:
    """The server dies before or after each commit, and the next one finds what is missing."""
    (whole,), commits = await night(0, before=False)
    assert (whole.status, commits) == (Status.SUCCEEDED, 2)
    for fatal, before in itertools.product(range(1, commits + 1), (True, False)):
        (killed,), _ = await night(fatal, before=before)
        assert (killed.status, killed.alert.fingerprint) == (Status.SUCCEEDED, whole.alert.fingerprint), (fatal, before)
