"""``guards.again``: a playbook is tried again while its alert still fires."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.unit.engine.world import World
from trainmedic_server import errors
from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.run import Decision, OrderKind, Status
from trainmedic_server.domain.upcoming import Upcoming
from trainmedic_server.engine.admission_changes import ByHand

MakeWorld = Callable[..., World]
MINUTE, HOUR = 60, 3600

TEXT = """
playbook: clean
on: {alert: Full}
target: {node: "{{ labels.node }}"}
guards: {again: {after: 30m, times: 2}}
steps:
  - {id: clean, action: test.cap}
  - {id: enough, wait_for: resolved, timeout: 10m}
"""


def full(at: World, node: str = "n1") -> Alert:
    return at.alert("Full", node=node)


async def begun(world: MakeWorld, text: str = TEXT, **limits: object) -> tuple[World, Alert]:
    at = world(text, **limits)
    await at.engine.start()
    alert = full(at)
    await at.post(alert)
    return at, alert


async def statuses(at: World) -> list[Status]:
    return [run.status for run in await at.runs()]


async def test_it_is_tried_again_after_the_end_while_the_alert_fires(world: MakeWorld) -> None:
    """As often as said; each further run names the one that it repeats, and its alert may be of any age."""
    at, alert = await begun(world)
    await at.pass_time(39 * MINUTE)
    assert at.calls() == {"cap": 1}
    await at.pass_time(2 * MINUTE)
    assert at.calls() == {"cap": 2}
    await at.pass_time(10 * HOUR)
    first, second, third = await at.runs()
    assert [run.status for run in (first, second, third)] == [Status.FAILED] * 3
    assert (first.repeats, second.repeats, third.repeats) == (None, first.id, second.id)
    assert second.ended_at is not None
    assert timedelta(minutes=30) <= third.created_at - second.ended_at <= timedelta(minutes=31)
    assert (await at.story(second.id))[0] == "started"
    record = (await at.store.transact(lambda tx: tx.alerts([alert.identity])))[alert.identity]
    assert record.count == 1
    await at.resolve(alert)
    await at.post(full(at))
    await at.pass_time(2 * HOUR)
    assert at.calls() == {"cap": 6}


async def test_a_resolved_alert_ends_it(world: MakeWorld) -> None:
    at, alert = await begun(world)
    await at.pass_time(20 * MINUTE)
    await at.resolve(alert)
    await at.pass_time(5 * HOUR)
    assert at.calls() == {"cap": 1}


async def test_a_run_that_succeeded_without_an_end_of_the_alert_is_repeated_too(world: MakeWorld) -> None:
    """What counts is the alert."""
    at, _ = await begun(world, TEXT.replace("timeout: 10m", "timeout: 10m, on_timeout: continue"))
    await at.pass_time(5 * HOUR)
    assert await statuses(at) == [Status.SUCCEEDED] * 3


@pytest.mark.parametrize("kind", [OrderKind.CANCEL, OrderKind.UNDO])
async def test_a_person_who_ends_a_run_decides_against_further_ones(world: MakeWorld, kind: OrderKind) -> None:
    at, _ = await begun(world)
    run = await at.run()
    await at.engine.order(run.id, kind, "ann")
    await at.pass_time(5 * HOUR)
    assert await statuses(at) == [Status.CANCELLED]


async def test_a_repeated_report_neither_hurries_nor_doubles_it(world: MakeWorld) -> None:
    at, alert = await begun(world)
    await at.pass_time(20 * MINUTE)
    assert (await at.post(alert)).runs[0].decision is Decision.DUPLICATE
    await at.pass_time(21 * MINUTE)
    assert (await at.post(alert)).runs[0].decision is Decision.DUPLICATE
    await at.pass_time(5 * HOUR)
    assert at.calls() == {"cap": 3}


@pytest.mark.parametrize("moment", [5 * MINUTE, 25 * MINUTE, 45 * MINUTE])
@pytest.mark.parametrize("down", [0, 20 * MINUTE])
async def test_a_restart_forgets_no_further_run_and_makes_none_twice(world: MakeWorld, moment: int, down: int) -> None:
    """Killed during a run, before a further one, or within that."""
    at, _ = await begun(world, max_age=timedelta(hours=9))
    await at.pass_time(moment)
    await at.restart(down)
    await at.pass_time(10 * HOUR)
    assert at.calls() == {"cap": 3}
    assert await statuses(at) == [Status.FAILED] * 3


async def test_guards_hold_for_it_and_it_waits_for_them(world: MakeWorld) -> None:
    """Without an item in the history for each look: the later of ``after`` and ``cooldown`` counts."""
    at, _ = await begun(world, TEXT.replace("{again", "{cooldown: 1h, again"))
    await at.pass_time(65 * MINUTE)
    assert await statuses(at) == [Status.FAILED]
    await at.pass_time(10 * MINUTE)
    assert at.calls() == {"cap": 2}
    await at.pass_time(5 * HOUR)
    assert await statuses(at) == [Status.FAILED] * 3


async def test_runs_that_people_start_do_not_count(world: MakeWorld) -> None:
    """The next one follows the end of theirs."""
    at, _ = await begun(world)
    await at.pass_time(15 * MINUTE)
    await at.engine.retry((await at.run()).id, ByHand("ann"))
    await at.pass_time(30 * MINUTE)
    assert at.calls() == {"cap": 2}
    await at.pass_time(5 * HOUR)
    assert at.calls() == {"cap": 4}
    assert [run.started_by for run in await at.runs()] == [None, "ann", None, None]


async def test_alerts_that_joined_a_run_are_tried_again_together(world: MakeWorld) -> None:
    """One further run for all of them."""
    at, _ = await begun(world)
    await at.post(at.alert("Full", node="n1", mount="/data"))
    await at.pass_time(10 * HOUR)
    assert at.calls() == {"cap": 3}


async def test_a_failure_that_passes_is_mended_by_the_second_run(world: MakeWorld) -> None:
    at = world(TEXT)
    await at.engine.start()
    at.actions["cap"].outcomes.append(errors.PermanentFailure("no agent"))
    alert = full(at)
    await at.post(alert)
    await at.pass_time(31 * MINUTE)
    await at.resolve(alert)
    assert await statuses(at) == [Status.FAILED, Status.SUCCEEDED]


async def test_an_observed_run_is_not_repeated(world: MakeWorld) -> None:
    at, _ = await begun(world, mode="observe")
    await at.pass_time(5 * HOUR)
    assert await statuses(at) == [Status.OBSERVED]


async def told(at: World, number: int) -> Upcoming | None:
    record = await at.store.record((await at.runs())[number].id)
    assert record is not None
    return await at.engine.upcoming(record.run, record.alerts, record.orders)


async def test_the_page_of_an_ended_run_names_the_next_try(world: MakeWorld) -> None:
    """With those that are left; nothing after the last."""
    at, _ = await begun(world)
    await at.pass_time(15 * MINUTE)
    first = await at.run()
    assert first.ended_at is not None
    due, note = first.ended_at + timedelta(minutes=30), "while the alert fires, up to 2 more"
    assert await told(at, 0) == Upcoming(not_before=due, outcome="tried again", note=note)
    await at.pass_time(45 * MINUTE)
    second = await told(at, 1)
    assert second is not None
    assert (await told(at, 0), second.note) == (None, "while the alert fires, up to 1 more")
    await at.restart()
    assert await told(at, 1) == second
    await at.pass_time(5 * HOUR)
    assert await told(at, 2) is None


async def test_no_next_try_is_named_that_does_not_come(world: MakeWorld) -> None:
    """After a person's end or the alert's."""
    at, alert = await begun(world)
    await at.pass_time(15 * MINUTE)
    await at.resolve(alert)
    assert await told(at, 0) is None
    at, _ = await begun(world)
    await at.engine.order((await at.run()).id, OrderKind.CANCEL, "ann")
    assert await told(at, 0) is None
