"""``GET /now``: how things stand, told by the real engine and store; and ids of runs that are shortened."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.support.api_world import World, alert, payload
from tests.support.clocks import START, ManualClock
from tests.unit.engine.books import CAP
from tests.unit.engine.test_lease_recovery import HOLD, THIRD, Held, MakeWorld, begun, told
from tests.unit.engine.world import Uncap
from tests.unit.engine.world import World as EngineWorld
from trainmedic_server.domain.agent_life import AgentLife
from trainmedic_server.domain.job_life import JobLife, LifeState
from trainmedic_server.domain.run import OrderKind
from trainmedic_server.live.now import LASTING_CHANGES_FOR, NowApi, NowView
from trainmedic_server.settings.server import load
from trainmedic_server.wiring.notifications import missing_channels

ASK = CAP.replace("playbook: cap", "playbook: ask\nmode: approve").replace("Hot", "Warm")

A_SECOND = timedelta(seconds=1)


class GivesBack(Uncap):
    gives_back = True


async def _now(world: EngineWorld) -> NowView:
    return await NowApi(world.store, world.store, world.engine, world.clock).view()


async def test_everything_that_is_changed_asked_or_lost_is_told() -> None:
    """With who, since when, and when it goes back; and nothing of what is over."""
    world = EngineWorld(CAP, ASK)
    await world.engine.start()
    world.actions["cap"].outcomes.append({"previous_watts": 700, "limit_watts": 560})
    hot, gone = world.alert(node="node-1", gpu="0"), world.clock.now()
    await world.post(hot, world.alert("Warm", node="node-2", gpu="1"))
    lives = [AgentLife("node-4", gone, gone), AgentLife("node-5", gone)]
    job = JobLife("llm-1", LifeState.GONE, gone, reason="its launcher gave it up")
    await world.store.transact(lambda tx: (tx.agents.save(lives), tx.save_job_lives([job])))
    standing = await _now(world)
    assert (standing.mode, standing.paused, standing.breaker.open) == ("enforce", [], False)
    [approval] = standing.approvals
    assert (approval.target, approval.playbook) == ("gpu:node-2/1", "ask")
    assert approval.asked_at - gone < A_SECOND
    assert [(step.action, step.params) for step in approval.steps] == [("test.cap", {"amount": 80.0})]
    [change] = standing.changed
    assert (change.target, change.before, change.after) == ("gpu:node-1/0", "700 W", "560 W")
    assert change.given_back == "when Hot resolves"
    assert change.since - gone < A_SECOND
    assert standing.running == []
    assert {(lost.kind, lost.name, lost.since) for lost in standing.lost} == {
        ("agent", "node-4", gone),
        ("job", "llm-1", gone),
    }
    assert standing.last_hour.decisions == {"started": 2}
    assert standing.counts.open == {"running": 0, "waiting": 0, "awaiting_approval": 1}
    assert (standing.counts.owing, standing.counts.left_out) == (1, 0)
    await world.resolve(hot)
    assert (await _now(world)).changed == []
    await world.engine.stop()


async def test_a_change_without_an_undo_is_listed_as_such() -> None:
    """Also after its run has ended; not once it was given back, by an order or by a later step, nor after a week."""
    book = (
        "playbook: lasting\non: {alert: Hot}\ntarget: node\nsteps:\n"
        "  - {id: halved, action: test.cap, with: {amount: 0.5}}\n  - {id: gone, action: test.other}\n"
        "  - {id: told, action: test.tell}\n"
    )
    taken_back = (
        "playbook: brief\non: {alert: Warm}\ntarget: node\nsteps:\n  - {action: test.cap}\n  - {action: test.uncap}\n"
    )
    world = EngineWorld(book, taken_back, more=(GivesBack,))
    await world.engine.start()
    await world.post(world.alert(node="node-1"), world.alert("Warm", node="node-2"))
    standing = await _now(world)
    listed = [(change.step, change.undo, change.is_reversible, change.is_certain) for change in standing.changed]
    assert listed == [("gone", "never", False, True), ("halved", "never", True, True)]
    assert standing.changed[1].given_back == "never automatically, only by an undo order"
    assert standing.changed_since == standing.at - LASTING_CHANGES_FOR
    await world.engine.order(standing.changed[1].run_id, OrderKind.UNDO, "ann")
    await world.pass_time(1)
    assert [change.step for change in (await _now(world)).changed] == ["gone"]
    later = ManualClock(world.clock.now() + LASTING_CHANGES_FOR)
    assert (await NowApi(world.store, world.store, world.engine, later).view()).changed == []
    await world.engine.stop()


async def test_the_changes_of_a_groups_members_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each under its own target, of members that work and that have ended, until all are given back."""
    book = (
        "playbook: rack\non: {alert: PDU}\ntarget: {nodes: {rack: r1}}\nrollout: {serial: 2}\nsteps:\n"
        "  - {id: cap, action: test.cap, undo: on_resolve}\n  - {id: gone, action: test.other}\n  - {wait: 9s}\n"
    )
    world = EngineWorld(book, inventory={"attributes:n[1-4]": "rack=r1"})
    await world.engine.start()
    await world.post(pdu := world.alert("PDU"))
    pending, lasting = [("n1", "cap"), ("n2", "cap")], [("n1", "gone"), ("n2", "gone")]
    for _ in range(2):
        changed = [(each.target.removeprefix("node:"), each.step, each.undo) for each in (await _now(world)).changed]
        assert sorted(changed[: len(pending)]) == [(*each, "on_resolve") for each in pending]
        assert sorted(changed[len(pending) :]) == [(*each, "never") for each in lasting]
        await world.pass_time(9)
        pending += [("n3", "cap"), ("n4", "cap")]
        lasting += [("n3", "gone"), ("n4", "gone")]
    standing = await _now(world)
    assert {each.given_back for each in standing.changed if each.step == "cap"} == {"when PDU resolves"}
    assert standing.counts.left_out == 0
    monkeypatch.setattr("trainmedic_server.live.now.MOST", 1)
    assert (await _now(world)).counts.left_out == 3
    monkeypatch.undo()
    await world.pass_time(9)
    assert len((await _now(world)).changed) == 8
    monkeypatch.setattr("trainmedic_server.live.now._MOST_GROUPS", 0)
    cut = await _now(world)
    ended_at = (await world.run()).ended_at
    assert ([each.undo for each in cut.changed], cut.changed_since) == (["on_resolve"] * 4 + ["never"] * 4, ended_at)
    monkeypatch.undo()
    await world.resolve(pdu)
    assert sorted((each.target, each.undo) for each in (await _now(world)).changed) == [
        (f"node:n{number}", "never") for number in range(1, 5)
    ]
    await world.engine.stop()


@pytest.mark.parametrize(("reported", "shown"), [(90, 90.0), (1e300, None), (float("inf"), None), (0, None)])
async def test_a_lease_of_any_length_is_answered(reported: float, shown: float | None) -> None:
    """A job chooses what its own commands output."""
    world = EngineWorld(CAP)
    await world.engine.start()
    world.actions["cap"].outcomes.append({"lease_seconds": reported})
    await world.post(world.alert(node="node-1", gpu="0"))
    assert [change.lease_seconds for change in (await _now(world)).changed] == [shown]
    await world.engine.stop()


async def test_a_change_that_has_ended_before_its_undo_says_so(world: MakeWorld) -> None:
    """It was listed as the present value, of a certain change. The run's own changes say it too."""
    w, held, alert = await begun(world)
    await w.engine.pause("ann")
    held.lapse()
    await w.pass_time(THIRD)
    [change] = (await _now(w)).changed
    assert (change.undo, change.lost_because) == ("on_resolve", "its lease had run out")
    record = await w.store.record(change.run_id)
    assert record is not None
    [of_run] = NowApi(w.store, w.store, w.engine, w.clock).changes_of(record.run, record.alerts, record.events)
    assert of_run.lost_because == "its lease had run out"
    await w.engine.resume("ann")
    await w.pass_time(THIRD)
    assert await told(w) == ["lease_lost", "set_again_held", "set_again_started", "set_again_done"]
    assert [change.lost_because for change in (await _now(w)).changed] == [None]
    await w.resolve(alert)
    await w.engine.stop()


async def test_a_leased_change_without_an_undo_ends_with_its_lease(world: MakeWorld) -> None:
    """It was listed for a week as one that only an undo order reverts."""
    w, _, alert = await begun(world, HOLD.replace("undo: on_resolve", "undo: never"))
    [change] = (await _now(w)).changed
    assert (change.undo, change.given_back) == ("never", "when its lease ends, after Hot resolves")
    await w.resolve(alert)
    assert [change.given_back for change in (await _now(w)).changed] == ["when its lease ends"]
    await w.pass_time(Held.lease.total_seconds() + 1)
    assert (await _now(w)).changed == []
    await w.engine.stop()


async def test_a_lost_lease_without_an_undo_is_shown_as_lost(world: MakeWorld) -> None:
    w, held, _ = await begun(world, HOLD.replace("undo: on_resolve", "undo: never"))
    await w.engine.pause("ann")
    held.lapse()
    await w.pass_time(THIRD)
    [change] = (await _now(w)).changed
    assert (change.undo, change.lost_because) == ("never", "its lease had run out")
    await w.engine.stop()


async def test_a_pause_says_who_and_since_when() -> None:
    """And a run that it holds back says that it waits for somebody to resume."""
    world = EngineWorld(
        CAP.replace("steps:", "steps:\n  - wait_for: resolved\n    timeout: 1m\n    on_timeout: continue")
    )
    await world.engine.start()
    await world.post(world.alert(node="node-1", gpu="0"))
    paused_at = world.clock.now()
    await world.engine.pause("ann")
    await world.pass_time(90)
    standing = await _now(world)
    [pause] = standing.paused
    assert (pause.scope, pause.by) == ("everything", "ann")
    assert pause.since is not None
    assert pause.since - paused_at < A_SECOND
    [run] = standing.running
    assert run.waiting_on == "resume"
    assert run.next is not None
    assert run.next.waits_for == "an operator to resume the server"
    await world.engine.stop()


async def test_what_was_lost_more_than_a_day_ago_is_not_told() -> None:
    world = EngineWorld(CAP)
    await world.engine.start()
    long_ago = world.clock.now() - timedelta(days=1, seconds=1)
    await world.store.transact(lambda tx: tx.agents.save([AgentLife("node-4", long_ago, long_ago)]))
    assert (await _now(world)).lost == []
    await world.engine.stop()


async def test_the_call_answers_and_an_item_says_what_is_next() -> None:
    """Over HTTP; a run's own document has its next step."""
    world = World()
    async with world.client() as client:
        run_id = (await client.post("/webhook", json=payload(alert()))).json()["runs"][0]["run_id"]
        standing = (await client.get("/now")).json()
        assert [run["run_id"] for run in standing["running"]] == [run_id]
        assert standing["running"][0]["next"]["action"] == "gpu.power_limit"
        assert standing["at"] == START.isoformat().replace("+00:00", "Z")
        assert (await client.get(f"/history/{run_id}")).json()["next"]["step"] == "cap"


@pytest.mark.parametrize("call", ["GET history/{}", "POST runs/{}/cancel"])
async def test_an_id_may_be_shortened_to_a_part_that_one_run_has(call: str) -> None:
    """A beginning or an end of it; what several runs have is refused with their ids, and what none has is unknown."""
    world = EngineWorld(CAP)
    await world.engine.start()
    await world.post(world.alert(node="node-1", gpu="0"), world.alert(node="node-1", gpu="1"))
    first, second = [run.id for run in await world.runs()]
    found = World(findings=world.store)
    for run in await world.runs():
        record = await world.store.record(run.id)
        assert record is not None
        found.history.records[run.id] = record
    method, path = call.split()
    async with found.client() as client:
        answer = await client.request(method, "/" + path.format(second[-8:]))
        assert answer.status_code in (200, 409)
        assert second in answer.text
        several = await client.request(method, "/" + path.format(first[:8]))
        assert (several.status_code, first in several.text, second in several.text) == (409, True, True)
        unknown = await client.request(method, "/" + path.format("ffff-none"))
        assert unknown.status_code == 404
    await world.engine.stop()


async def test_what_is_missing_for_messages_is_told(world: Callable[..., EngineWorld]) -> None:
    """No channel at all, or none for what no route takes."""
    made = world()
    await made.engine.start()
    urls = {"TRAINMEDIC_NOTIFY_URLS": "a=json://h b=json://h"}
    told = []
    for environ in ({}, urls, urls | {"TRAINMEDIC_MESSAGE_ROUTES": "a=kind:pause b=kind:approval"}):
        missing = missing_channels(load({}, environ))
        told.append((await NowApi(made.store, made.store, made.engine, made.clock, "", missing).view()).notifications)
    assert told[:2] == ["no notification channel is configured", ""]
    assert told[2].startswith("no default channel is set")
