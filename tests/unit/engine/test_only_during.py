"""Windows of time (``only_during``): outside all of them nothing starts, and what has begun is finished."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from tests.unit.engine.world import World
from trainmedic_server.domain.cron import CronWindow
from trainmedic_server.domain.run import Decision, Status, StepStatus
from trainmedic_server.engine import windows
from trainmedic_server.ports.store import HistoryFilter

MakeWorld = Callable[..., World]
HOUR = 3600

# The world begins on Thursday, 2026-01-01, at midnight (UTC), which is 01:00 in Berlin.
NIGHT = "only_during: {schedule: 0 2 * * *, duration: 4h, timezone: Europe/Berlin}"
TWO = "only_during: [{schedule: 0 2 * * *, duration: 1h}, {schedule: 0 12 * * *, duration: 1h}]"
CAP = """
playbook: cap
on: {alert: Hot}
target: {gpu: "{{ labels.gpu }}", node: "{{ labels.node }}"}
steps:
  - {id: cap, action: test.cap, undo: on_resolve}
"""
LATER = """
playbook: later
on: {alert: Hot}
target: {node: "{{ labels.node }}"}
steps:
  - {id: first, action: test.cap, timeout: 4h}
  - {id: second, action: test.other, retry: {attempts: 2, delay: 5m}}
"""


def test_the_last_window_before_the_year_10000_is_followed_by_none() -> None:
    """An alert can be explained as of any time."""
    early, late = (CronWindow(schedule=f"0 {hour} * * *", duration=timedelta(minutes=5)) for hour in (2, 22))
    at = datetime(9999, 12, 31, 21, tzinfo=UTC)
    assert "the next one opens at 9999-12-31T22:00:00Z" in (windows.why_outside([early, late], at) or "")
    assert "none opens again" in (windows.why_outside([early, late], at + timedelta(hours=2)) or "")


async def test_an_alert_outside_starts_nothing_until_it_is_reported_in_a_window(world: MakeWorld) -> None:
    """The age of an alert counts from the window's opening, or a night's alert would be too old at each of them."""
    at = world(f"{CAP}\n{NIGHT}")
    await at.engine.start()
    hot = at.alert(gpu="0", node="n1")
    admission = await at.post(hot)
    assert [decision.decision for decision in admission.runs] == [Decision.OUTSIDE_WINDOW]
    assert "2026-01-01T01:00:00" in (admission.runs[0].why or "")
    await at.pass_time(59 * 60)
    assert (await at.post(hot)).runs[0].decision is Decision.OUTSIDE_WINDOW
    assert at.calls() == {}
    await at.pass_time(2 * 60)
    assert (await at.post(hot)).runs[0].decision is Decision.STARTED
    first, second = await at.runs()
    assert (first.status, first.decision) == (Status.NOT_STARTED, Decision.OUTSIDE_WINDOW)
    assert second.status is Status.SUCCEEDED
    assert at.calls() == {"cap": 1}


async def test_an_alert_that_is_old_within_its_window_is_stale(world: MakeWorld) -> None:
    """A window excuses only the time before it."""
    at = world(f"{CAP}\n{NIGHT}", max_age=timedelta(minutes=15))
    await at.engine.start()
    await at.pass_time(2 * HOUR)
    old = at.alert(gpu="0", node="n1", began_ago=30 * 60)
    assert (await at.post(old)).runs[0].decision is Decision.STALE


@pytest.mark.parametrize(
    ("hours", "decision"),
    [
        (1.99, Decision.OUTSIDE_WINDOW),
        (2, Decision.STARTED),
        (2.99, Decision.STARTED),
        (3, Decision.OUTSIDE_WINDOW),
        (12.5, Decision.STARTED),
    ],
)
async def test_one_of_several_windows_suffices(world: MakeWorld, hours: float, decision: Decision) -> None:
    """The beginning belongs to a window, its end does not."""
    at = world(f"{CAP}\n{TWO}")
    await at.engine.start()
    await at.pass_time(hours * HOUR)
    assert (await at.post(at.alert(gpu="0", node="n1"))).runs[0].decision is decision


async def test_a_step_that_has_begun_is_finished_and_the_next_one_waits(world: MakeWorld) -> None:
    """The run keeps its place over a restart, and goes on at the next opening."""
    at = world(f"{LATER}\n{TWO}", max_age=timedelta(days=2))
    await at.engine.start()
    await at.pass_time(2.5 * HOUR)
    at.actions["cap"].outcomes.append(timedelta(hours=1))
    await at.post(at.alert(node="n1"))
    await at.pass_time(1.5 * HOUR)
    run = await at.run()
    assert (run.step(("steps", 0)).status, run.waiting_on) == (StepStatus.SUCCEEDED, "window")
    assert "2026-01-01T12:00:00" in run.message
    await at.restart(HOUR)
    await at.pass_time(6 * HOUR)
    assert at.calls() == {"cap": 1}
    await at.pass_time(1.1 * HOUR)
    assert (await at.run()).status is Status.SUCCEEDED
    assert at.calls() == {"cap": 1, "other": 1}


async def test_an_attempt_that_failed_is_repeated_after_the_window(world: MakeWorld) -> None:
    """Its step has begun."""
    at = world(f"{LATER}\n{TWO}")
    await at.engine.start()
    await at.pass_time(2.99 * HOUR)
    at.actions["other"].outcomes.append(TimeoutError())
    await at.post(at.alert(node="n1"))
    await at.pass_time(10 * 60)
    assert at.calls() == {"cap": 1, "other": 2}
    assert (await at.run()).status is Status.SUCCEEDED


async def test_a_run_that_waited_for_its_target_past_the_window_never_begins(world: MakeWorld) -> None:
    """It ends as not started, and acts when the alert is reported in the next window."""
    holder = LATER.replace("later", "holder").replace("Hot", "Other")
    at = world(f"{CAP}\n{TWO}", holder, max_age=timedelta(days=2))
    await at.engine.start()
    await at.pass_time(2.5 * HOUR)
    at.actions["cap"].outcomes.append(timedelta(hours=1))
    await at.post(at.alert("Other", node="n1"))
    hot = at.alert(gpu="0", node="n1")
    await at.post(hot)
    await at.pass_time(2 * HOUR)
    run = next(run for run in await at.runs() if run.playbook == "cap")
    assert (run.status, run.decision) == (Status.NOT_STARTED, Decision.OUTSIDE_WINDOW)
    await at.pass_time(8 * HOUR)
    assert (await at.post(hot)).runs[0].decision is Decision.STARTED


async def test_undo_knows_no_window(world: MakeWorld) -> None:
    """What was changed is given back as soon as it is due."""
    at = world(f"{CAP}\n{TWO}")
    await at.engine.start()
    await at.pass_time(2.5 * HOUR)
    hot = at.alert(gpu="0", node="n1")
    await at.post(hot)
    await at.pass_time(2 * HOUR)
    await at.resolve(hot)
    assert at.calls() == {"cap": 1, "uncap": 1}


RACK = """
playbook: rack
on: {alert: PDU}
target: {nodes: {rack: r1}}
rollout: {serial: 1}
steps:
  - {id: look, action: test.look, timeout: 2h}
  - {id: cap, action: test.cap}
"""


async def test_members_that_have_not_begun_wait_for_the_next_window(world: MakeWorld) -> None:
    """The member in flight is no error: its step begins at the next opening, and the others follow."""
    at = world(f"{RACK}\n{TWO}", inventory={"attributes:n[1-3]": "rack=r1"}, max_age=timedelta(minutes=15))
    await at.engine.start()
    await at.pass_time(2.5 * HOUR)
    at.actions["look"].outcomes.extend([{}, timedelta(hours=1)])
    await at.post(at.alert("PDU"))
    await at.pass_time(2 * HOUR)
    assert at.calls() == {"look": 2, "cap": 1}
    parent = await at.run()
    members, _ = await at.store.page(HistoryFilter(parent=parent.id), 10, None)
    assert [run.waiting_on for run in members if run.is_open] == ["window"]
    await at.restart()
    await at.pass_time(7 * HOUR)
    assert at.calls()["cap"] == 1
    await at.pass_time(0.6 * HOUR)
    assert (await at.run()).message == "3 members: 3 succeeded"
    assert at.calls() == {"look": 3, "cap": 3}


async def test_a_group_whose_batch_ends_outside_starts_no_other(world: MakeWorld) -> None:
    """The parent says until when it waits."""
    text = RACK.replace("{id: cap, action: test.cap}", "{id: cap, action: test.cap, timeout: 2h}")
    at = world(f"{text}\n{TWO}", inventory={"attributes:n[1-3]": "rack=r1"})
    await at.engine.start()
    await at.pass_time(2.5 * HOUR)
    at.actions["cap"].outcomes.append(timedelta(hours=1))
    await at.post(at.alert("PDU"))
    await at.pass_time(2 * HOUR)
    parent = await at.run()
    assert (parent.waiting_on, at.calls()) == ("members", {"look": 1, "cap": 1})
    assert "2026-01-01T12:00:00" in parent.message
    await at.pass_time(8 * HOUR)
    assert (await at.run()).message == "3 members: 3 succeeded"


async def test_a_playbook_without_windows_acts_at_any_time(world: MakeWorld) -> None:
    """As every playbook did before there were any."""
    at = world(CAP)
    await at.engine.start()
    assert (await at.post(at.alert(gpu="0", node="n1"))).runs[0].decision is Decision.STARTED
