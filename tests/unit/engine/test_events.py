"""Playbooks that an event starts: once for each key or body, over kills."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.unit.engine.books import CAP
from tests.unit.engine.test_kills_of_people import DoomedStore, outlive, pass_time
from tests.unit.engine.world import Source, World
from trainmedic_server.domain import beginnings
from trainmedic_server.domain.admission import Admission
from trainmedic_server.domain.run import Decision, Status

MakeWorld = Callable[..., World]

PULLED = """
playbook: pulled
on: {event: rack, matchers: ['severity=~"major|critical"'], when: labels.rack != "r9"}
target: {node: "{{ labels.rack }}-1"}
guards: {cooldown: 0s}
steps:
  - {action: test.cap}
"""


async def send(at: World, key: str | None = None, body: bytes = b"{}", event: str = "rack", **labels: str) -> Admission:
    labels = {"rack": "r1", "severity": "major", **labels}
    return await at.post(beginnings.of_event(event, labels, key, body, at.clock.now()))


def decisions(admission: Admission) -> list[Decision]:
    return [run.decision for run in admission.runs]


async def test_an_event_starts_a_run_for_its_labels(world: MakeWorld) -> None:
    """The history names the event."""
    at = world(PULLED)
    assert decisions(await send(at)) == [Decision.STARTED]
    run = await at.run()
    assert (run.status, run.target_key, run.alert_name) == (Status.SUCCEEDED, "node:r1-1", "event:rack")
    assert run.alert_labels["event"] == "rack"


async def test_conditions_hold_as_for_an_alert(world: MakeWorld) -> None:
    """An event that no playbook takes is received, and starts nothing."""
    at = world(PULLED)
    for number, labels in enumerate(({"severity": "info"}, {"rack": "r9"}, {"event": "other"})):
        admission = await send(at, key=str(number), **labels)
        assert (admission.runs, admission.unmatched, admission.duplicates) == ((), 1, 0)
    assert (await send(at, key="0", severity="info")).duplicates == 1
    assert len(await at.store.transact(lambda tx: tx.firing(10))) == 3


async def test_no_alert_passes_for_an_event(world: MakeWorld) -> None:
    """Only what arrives as one."""
    at = world(PULLED)
    admission = await at.post(at.alert("event:rack", rack="r1", severity="major"))
    assert (admission.runs, admission.unmatched) == ((), 1)


async def test_a_key_starts_one_run_however_late_it_comes_again(world: MakeWorld) -> None:
    """Even after a restart; another key starts another."""
    at = world(PULLED)
    await at.engine.start()
    first = await send(at, "a")
    await at.restart(after=7200)
    again = await send(at, "a", b"other")
    assert (decisions(again), again.duplicates) == ([Decision.DUPLICATE], 1)
    assert again.runs[0].run_id == first.runs[0].run_id
    assert decisions(await send(at, "b")) == [Decision.STARTED]


async def test_the_same_body_counts_as_sent_again_for_an_hour(world: MakeWorld) -> None:
    """Then it is another event: a body without a time would start only one run otherwise."""
    at = world(PULLED)
    await send(at)
    await at.pass_time(timedelta(minutes=59).total_seconds())
    assert decisions(await send(at)) == [Decision.DUPLICATE]
    assert decisions(await send(at, body=b"[]")) == [Decision.STARTED]
    await at.pass_time(60)
    assert decisions(await send(at)) == [Decision.STARTED]


async def test_one_delivery_with_the_same_event_twice_starts_one_run(world: MakeWorld) -> None:
    """As two deliveries that share a transaction."""
    at = world(PULLED)
    labels = {"rack": "r1", "severity": "major"}
    event = beginnings.of_event("rack", labels, "k", b"", at.clock.now())
    later = beginnings.of_event("rack", labels, "k", b"", at.clock.now() + timedelta(seconds=1))
    admission = await at.post(event, later)
    assert sorted(decisions(admission)) == [Decision.DUPLICATE, Decision.STARTED]


async def test_alertmanager_is_not_asked_about_an_alert_that_an_event_brought(world: MakeWorld) -> None:
    """It does not know the alert, and would end it. The sender's report of its end counts."""
    at = world(CAP, source=Source())
    await at.engine.start()
    alert = beginnings.sent_by_event("grafana", at.alert(gpu="0", node="n1"))
    await at.post(alert)
    await at.pass_time(15 * 60)
    assert at.calls() == {"cap": 1}
    await at.resolve(alert)
    assert at.calls() == {"cap": 1, "uncap": 1}


async def night(fatal: int, *, before: bool) -> tuple[list[Any], int]:
    store = DoomedStore()
    at = World(PULLED, store=store)
    await at.engine.start()
    store.left, store.before = fatal, before
    event = beginnings.of_event("rack", {"rack": "r1", "severity": "major"}, "k", b"", at.clock.now())
    await outlive(at, store, lambda: at.post(event))
    await pass_time(at, store, 120)
    runs, commits = await at.runs(), -store.left
    calls = {call.command_id for call in at.actions["cap"].calls}
    await at.engine.stop()
    await store.close()
    return [(run.playbook, run.status, len(calls)) for run in runs], commits


async def test_an_event_that_is_sent_until_it_is_answered_starts_one_run_at_any_kill() -> None:
    """The server dies before or after each commit."""
    whole, commits = await night(0, before=False)
    assert whole == [("pulled", Status.SUCCEEDED, 1)]
    for fatal, before in itertools.product(range(1, commits + 1), (True, False)):
        assert (await night(fatal, before=before))[0] == whole, (fatal, before)
