"""Lapses: what ended because nobody renewed it, and is still wanted, is brought about again; or it is told why not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar

import pytest

from tests.unit.engine.test_lost_playbooks import lose
from tests.unit.engine.world import Cap, Source, World
from trainmedic_core.target import TargetKind
from trainmedic_server import errors
from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.pause import PauseOrder, Scope
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.domain.run import OrderKind, Status, UndoStatus
from trainmedic_server.ports.actions import LeasedEffect, Renewal

MakeWorld = Callable[..., World]

HOLD = """
playbook: hold
on: {alert: Hot}
target: node
steps:
  - {id: cap, action: test.hold, with: {amount: 80}, undo: on_resolve}
"""
THIRD = 120
"""Seconds after which each hold has been asked about again: a third of five minutes, and a look."""
RESENT_AFTER = 300
AGAIN = ["set_again_started", "set_again_done"]


class Held(Cap):
    """An effect that stands in places until the test lets it lapse. What it is asked for, it is asked for by id."""

    name = "test.hold"
    lease: ClassVar[timedelta] = timedelta(minutes=5)

    def __init__(self, services: Any = None) -> None:
        super().__init__(services)
        self.places = ["n1"]
        self.lapsed: set[tuple[str, str]] = set()
        self.again: list[str] = []
        self.asked = 0
        self.hangs = ""
        self.has_forgotten = False
        """Whether it no longer knows that the leases have run out."""
        self.away: set[str] = set()
        self.slow: asyncio.Event | None = None
        """Holds back the next answers that are not about a reapplication."""

    @classmethod
    def granted(cls, output: Mapping[str, Any]) -> timedelta:
        return cls.lease

    def lapse(self, *places: str) -> None:
        """The leases of everything that was ever made run out there."""
        self.lapsed |= {(call.command_id, place) for call in self.calls for place in places or self.places}

    async def renew(self, holds: Sequence[LeasedEffect], until: datetime) -> Sequence[Renewal]:
        self.asked += 1
        wants_again = any(hold.again for hold in holds)
        if wants_again and self.hangs == "before":
            await asyncio.Event().wait()
        told = [self._renewed(hold, place) for hold in holds for place in self.places]
        if not wants_again and self.slow is not None:
            slow, self.slow = self.slow, None
            await slow.wait()
        if wants_again and self.hangs == "after":
            await asyncio.Event().wait()
        return told

    def _renewed(self, hold: LeasedEffect, place: str) -> Renewal:
        pair = (hold.command_id, place)
        if place in self.away:
            return Renewal(hold, place, "unanswered", f"{place} is away")
        if pair not in self.lapsed:
            return Renewal(hold, place, "renewed")
        if not hold.again or self.has_forgotten:
            return Renewal(hold, place, "lost", "its lease had run out", has_expired=not self.has_forgotten)
        self.lapsed.discard(pair)
        self.again.append(hold.command_id)
        return Renewal(hold, place, "renewed", output={"gpus": [{"limit_watts": 560}]})


async def begun(world: MakeWorld, playbook: str = HOLD, **settings: Any) -> tuple[World, Held, Alert]:
    """A world in which a run has brought about its effect, and has listened for long."""
    w = world(playbook, more=[Held], **settings)
    held = w.actions["hold"]
    assert isinstance(held, Held)
    await w.engine.start()
    await w.pass_time(RESENT_AFTER)
    alert = w.alert(node="n1")
    await w.post(alert)
    return w, held, alert


async def told(w: World, *kinds: str) -> list[str]:
    """The kinds of what happened to the lease, in order."""
    return [kind for kind in await w.story() if kind.startswith(("lease_", "set_again_"))]


async def held_because(w: World) -> list[str]:
    record = await w.store.record((await w.run()).id)
    assert record is not None
    return [event.data["why"] for event in record.events if event.kind == "set_again_held"]


async def test_what_has_lapsed_is_brought_about_again_once(world: MakeWorld) -> None:
    """Under the id of its command, with the intent in the story before, the outcome after, and the undo as before."""
    w, held, alert = await begun(world)
    held.lapse()
    await w.pass_time(THIRD)
    command_id = (await w.run()).steps[0].attempts[0].command_id
    assert held.again == [command_id]
    assert await told(w) == ["lease_lost", *AGAIN]
    await w.pass_time(3600)
    assert held.again == [command_id]
    assert await told(w) == ["lease_lost", *AGAIN]
    assert w.metrics.registry.get_sample_value("trainmedic_leases_set_again_total") == 1
    await w.resolve(alert)
    undo = (await w.run()).steps[0].undo
    assert undo is not None
    assert (undo.status, undo.undo_of) == (UndoStatus.DONE, command_id)
    assert w.actions["uncap"].calls[0].undo_of == command_id


async def test_each_loss_is_told_and_made_good(world: MakeWorld) -> None:
    """Also the second of the same effect."""
    w, held, _ = await begun(world)
    for _ in range(2):
        held.lapse()
        await w.pass_time(THIRD)
    assert await told(w) == ["lease_lost", *AGAIN] * 2


async def test_it_is_one_outcome_in_all_its_places(world: MakeWorld) -> None:
    """One that is away meanwhile is asked again, and the story says why it takes so long."""
    w, held, _ = await begun(world)
    held.places = ["n1", "n2"]
    held.lapse()
    held.away = {"n2"}
    await w.pass_time(THIRD)
    assert await told(w) == ["lease_lost", "set_again_started", "set_again_held"]
    assert await held_because(w) == ["n2 is away"]
    await w.pass_time(1000)
    assert await held_because(w) == ["n2 is away"]
    held.away = set()
    await w.pass_time(THIRD)
    assert await told(w) == ["lease_lost", "set_again_started", "set_again_held", "lease_lost", "set_again_done"]
    assert len(held.again) == 2


async def test_late_answers_from_before_a_reapplication_are_no_new_loss(world: MakeWorld) -> None:
    w, held, _ = await begun(world)
    held.lapse()
    held.slow = slow = asyncio.Event()
    await w.pass_time(20)
    assert (held.slow, await told(w)) == (None, [])
    await w.pass_time(THIRD)
    assert await told(w) == ["lease_lost", *AGAIN]
    slow.set()
    await w.pass_time(1)
    assert await told(w) == ["lease_lost", *AGAIN]


async def test_late_answers_from_before_a_loss_do_not_end_the_reapplication(world: MakeWorld) -> None:
    w, held, _ = await begun(world)
    held.slow = slow = asyncio.Event()
    await w.pass_time(20)
    assert held.slow is None
    held.lapse()
    held.hangs = "before"
    await w.pass_time(THIRD)
    assert await told(w) == ["lease_lost", "set_again_started"]
    slow.set()
    await w.pass_time(1)
    assert await told(w) == ["lease_lost", "set_again_started"]


class HeldJobs(Held):
    name = "test.hold_jobs"
    targets = frozenset({TargetKind.JOB})


async def test_a_step_on_several_jobs_is_made_good_on_each(world: MakeWorld) -> None:
    """Each has a command of its own, whose cooldown runs from the step's attempt."""
    on_jobs = """
playbook: hold
on: {alert: Hot}
target: {node: "{{ labels.node }}", jobs: on_node}
guards: {cooldown: 1m}
steps:
  - {id: hold, target: jobs, action: test.hold_jobs, with: {amount: 80}, undo: on_resolve}
"""
    w = world(on_jobs, inventory={"told:node:n1": ["a", "b"]}, more=[HeldJobs])
    held = w.actions["hold_jobs"]
    assert isinstance(held, HeldJobs)
    await w.engine.start()
    await w.pass_time(RESENT_AFTER)
    await w.post(w.alert(node="n1"))
    await w.pass_time(60)
    held.lapse()
    await w.pass_time(THIRD)
    assert sorted(held.again) == sorted(call.command_id for call in held.calls)
    assert len(held.again) == 2
    assert sorted(await told(w)) == ["lease_lost"] * 2 + ["set_again_done"] * 2 + ["set_again_started"] * 2


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_server_that_is_killed_in_between_is_followed_by_one_that_ends_it(
    world: MakeWorld, moment: str
) -> None:
    """Before the effect it is asked for again, after it it is found: one intent, one effect, one outcome."""
    w, held, _ = await begun(world)
    held.lapse()
    held.hangs = moment
    while await told(w) != ["lease_lost", "set_again_started"]:
        await w.pass_time(15)
    held.hangs = ""
    await w.restart(after=RESENT_AFTER)
    await w.pass_time(RESENT_AFTER + THIRD)
    assert len(held.again) == 1
    assert [kind for kind in await told(w) if kind != "set_again_held"] == ["lease_lost", *AGAIN]


async def test_what_a_killed_server_began_is_only_recorded_if_nobody_knows_how_it_was_lost(world: MakeWorld) -> None:
    """A person may have ended it since."""
    w, held, _ = await begun(world)
    held.hangs = "before"
    held.lapse()
    while "set_again_started" not in await told(w):
        await w.pass_time(15)
    held.hangs, held.has_forgotten = "", True
    for _ in range(2):
        await w.restart(after=RESENT_AFTER)
        await w.pass_time(RESENT_AFTER + 3 * THIRD)
    assert (held.again, (await told(w))[-1]) == ([], "set_again_held")
    why = [reason for reason in await held_because(w) if "alert fires" not in reason]
    assert why == ["reapplying it began before, and it is not in effect: its lease had run out"]
    assert (await told(w)).count("set_again_started") == 1


async def test_an_intent_that_was_begun_waits_for_pause_as_well(world: MakeWorld) -> None:
    """To ask again is to act."""
    w, held, _ = await begun(world)
    held.lapse()
    held.hangs = "before"
    await w.pass_time(THIRD)
    await w.engine.pause("alice")
    held.hangs = ""
    await w.restart(after=1)
    await w.pass_time(2 * RESENT_AFTER)
    assert held.again == []
    await w.engine.resume("alice")
    await w.pass_time(THIRD)
    assert len(held.again) == 1
    assert (await told(w)).count("set_again_started") == 1


async def test_it_waits_while_the_server_is_paused(world: MakeWorld) -> None:
    """The story says so once, and it is made good when somebody resumes."""
    w, held, _ = await begun(world)
    await w.engine.pause("alice")
    held.lapse()
    await w.pass_time(1000)
    assert held.again == []
    assert await held_because(w) == ["the server is paused by alice"]
    await w.engine.resume("alice")
    await w.pass_time(THIRD)
    assert len(held.again) == 1
    assert await told(w) == ["lease_lost", "set_again_held", *AGAIN]


async def test_it_waits_while_a_job_on_its_node_is_paused(world: MakeWorld) -> None:
    """Which the topology shows. Nothing is said to have begun."""
    w, held, _ = await begun(world, inventory={"n1": "n1", "told:node:n1": "llm"})
    await w.engine.pause("alice", PauseOrder(Scope(job="llm")))
    held.lapse()
    await w.pass_time(1000)
    assert (held.again, await told(w)) == ([], ["lease_lost", "set_again_held"])
    assert await held_because(w) == ["the server is paused by alice for job llm"]
    await w.engine.resume("alice")
    await w.pass_time(THIRD)
    assert len(held.again) == 1


async def test_a_pause_that_comes_while_the_intent_is_put_on_record_holds_it_back(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing harmful is begun once the pause is in force; when it ends the same intent is carried out."""
    w, held, _ = await begun(world)
    transact, is_durable, is_known = w.store.transact, asyncio.Event(), asyncio.Event()

    async def slow(work: Any) -> Any:
        done = await transact(work)
        if not is_durable.is_set() and "set_again_started" in await w.story():
            is_durable.set()
            await is_known.wait()
        return done

    monkeypatch.setattr(w.store, "transact", slow)
    held.lapse()
    await is_durable.wait()
    await w.engine.pause("alice")
    is_known.set()
    await w.pass_time(1000)
    assert held.again == []
    await w.engine.resume("alice")
    await w.pass_time(THIRD)
    assert len(held.again) == 1
    assert (await told(w)).count("set_again_started") == 1


async def test_it_waits_while_the_breaker_is_open(world: MakeWorld) -> None:
    """It stops new harm."""
    w, held, _ = await begun(world, breaker_min_nodes=1, breaker_share=0.1)
    first = (await w.runs())[0].id
    await w.post(w.alert(node="n2"))
    assert w.engine.controls.breaker_open
    held.lapse()
    await w.pass_time(1000)
    assert held.again == []
    assert "set_again_held" in await w.story(first)
    await w.engine.close_breaker("alice")
    await w.pass_time(THIRD)
    assert "set_again_done" in await w.story(first)


@pytest.mark.parametrize("kind", [OrderKind.CANCEL, OrderKind.UNDO])
async def test_a_run_that_a_person_has_ended_brings_nothing_about(world: MakeWorld, kind: OrderKind) -> None:
    """Not even where its undo is still owed."""
    w, held, _ = await begun(world, HOLD + "  - {id: cooled, wait_for: resolved}\n")
    w.actions["uncap"].outcomes += [errors.TemporaryFailure("away")] * 1000
    await w.engine.order((await w.run()).id, kind, "alice")
    held.lapse()
    await w.pass_time(1000)
    assert held.again == []


async def test_an_undo_that_has_begun_is_not_worked_against(world: MakeWorld) -> None:
    """The lease that has run out did what it was to do."""
    w, held, alert = await begun(world)
    w.actions["uncap"].outcomes += [errors.TemporaryFailure("away")] * 1000
    held.lapse()
    await w.resolve(alert)
    await w.pass_time(1000)
    assert held.again == []
    assert await told(w) == []


async def test_what_a_person_approved_once_is_not_done_twice(world: MakeWorld) -> None:
    """In mode approve; he is told, and may do it by hand."""
    w = world(HOLD.replace("on: {", "mode: approve\non: {"), more=[Held])
    held = w.actions["hold"]
    assert isinstance(held, Held)
    await w.engine.start()
    await w.post(w.alert(node="n1"))
    await w.engine.order((await w.run()).id, OrderKind.APPROVE, "alice")
    await w.pass_time(RESENT_AFTER)
    held.lapse()
    await w.pass_time(1000)
    assert held.again == []
    assert await told(w) == ["lease_lost", "set_again_held"]


async def test_a_server_whose_mode_has_become_stricter_brings_nothing_about(world: MakeWorld) -> None:
    """The stricter of the two counts, here too."""
    w, held, _ = await begun(world)
    held.lapse()
    await w.restart(mode=Mode.OBSERVE)
    await w.pass_time(1000)
    assert held.again == []
    assert await held_because(w) == ["the mode is not enforce"]


async def test_a_server_that_comes_back_waits_for_the_resolved_that_it_may_have_missed(world: MakeWorld) -> None:
    """For as long as it can take to be sent again; an alert that is heard of meanwhile fires."""
    w, held, alert = await begun(world)
    held.lapse()
    await w.restart(after=400)
    await w.pass_time(RESENT_AFTER - 60)
    assert held.again == []
    assert await held_because(w) == ["it is not known yet whether its alert fires"]
    await w.pass_time(60 + THIRD)
    assert len(held.again) == 1
    held.lapse()
    await w.restart(after=400)
    await w.post(alert)
    await w.pass_time(THIRD)
    assert len(held.again) == 2


async def test_the_alertmanager_is_asked_where_there_is_one(world: MakeWorld) -> None:
    """What it does not know to fire is left; what it knows is made good at once."""
    source = Source()
    w, held, alert = await begun(world, source=source)
    source.firing = {alert.identity}
    held.lapse()
    await w.restart(after=400)
    assert len(held.again) == 1
    held.lapse()
    source.firing = set()
    await w.pass_time(THIRD)
    assert len(held.again) == 1


async def test_an_alertmanager_that_is_away_holds_nothing_up_for_ever(world: MakeWorld) -> None:
    """Then what the server has heard counts."""
    source = Source()
    w, held, _ = await begun(world, source=source)
    source.error = errors.TemporaryFailure("away")
    held.lapse()
    await w.pass_time(THIRD)
    assert len(held.again) == 1


async def test_the_playbooks_cooldown_bounds_how_soon(world: MakeWorld) -> None:
    """It runs from when the effect was last brought about."""
    guarded = HOLD.replace("steps:", "guards: {cooldown: 20m}\nsteps:")
    w, held, _ = await begun(world, guarded)
    held.lapse()
    await w.pass_time(1000)
    assert held.again == []
    assert await held_because(w) == ["cooldown: last applied less than 20m ago"]
    await w.pass_time(200 + THIRD)
    assert len(held.again) == 1
    held.lapse()
    await w.pass_time(1000)
    assert len(held.again) == 1


async def test_the_playbooks_rate_bounds_how_often(world: MakeWorld) -> None:
    """Each time counts like a run."""
    guarded = HOLD.replace("steps:", "guards: {max_runs: {count: 2, per: 1h}}\nsteps:")
    w, held, _ = await begun(world, guarded)
    for _ in range(4):
        held.lapse()
        await w.pass_time(THIRD)
    assert len(held.again) == 2
    assert await held_because(w) == ["rate_limited: 2 times in the last 1h"]
    await w.pass_time(3600)
    assert len(held.again) == 3


async def test_what_something_else_has_ended_stays_ended(world: MakeWorld) -> None:
    """Somebody else decides there now; and of an agent that has forgotten the cap nothing can be asked."""
    w, held, _ = await begun(world)

    async def renew(holds: Sequence[LeasedEffect], until: datetime) -> Sequence[Renewal]:
        assert not any(hold.again for hold in holds)
        return [Renewal(hold, "n1", "lost", "somebody else had set the limit since") for hold in holds]

    held.renew = renew  # type: ignore[method-assign]
    await w.pass_time(1000)
    assert await told(w) == ["lease_lost"]


async def test_an_effect_that_nobody_was_sure_of_is_made_good_where_it_was_there(world: MakeWorld) -> None:
    """Its reply was lost together with the lease."""
    w = world(HOLD, more=[Held])
    held = w.actions["hold"]
    assert isinstance(held, Held)
    held.outcomes.append(errors.OutcomeUnknown("no reply"))
    await w.engine.start()
    await w.post(w.alert(node="n1"))
    assert (await w.run()).status is Status.FAILED
    await w.pass_time(RESENT_AFTER)
    held.lapse()
    await w.pass_time(THIRD)
    assert len(held.again) == 1
    assert await told(w) == ["lease_lost", *AGAIN]


async def test_it_comes_between_other_attempts_on_the_same_target(world: MakeWorld) -> None:
    """One change at a time: it waits for the one in flight, and for no longer."""
    other = """
playbook: other
on: {alert: Other}
target: node
steps:
  - {action: test.other, timeout: 20m}
"""
    w = world(HOLD, other, more=[Held])
    held = w.actions["hold"]
    assert isinstance(held, Held)
    await w.engine.start()
    await w.post(w.alert(node="n1"))
    await w.pass_time(RESENT_AFTER)
    w.actions["other"].outcomes.append(timedelta(seconds=900))
    await w.post(w.alert("Other", node="n1"))
    held.lapse()
    await w.pass_time(800)
    assert held.again == []
    await w.pass_time(200)
    assert len(held.again) == 1


async def test_a_playbook_that_nobody_can_read_any_more_brings_nothing_about(world: MakeWorld) -> None:
    """Its guards are not known."""
    w, held, _ = await begun(world)
    lose(w)
    await w.restart(after=RESENT_AFTER)
    held.lapse()
    await w.pass_time(RESENT_AFTER + THIRD)
    assert held.again == []
    (why,) = await held_because(w)
    assert "guards are not known" in why
