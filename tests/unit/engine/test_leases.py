"""Leases: what lasts only while it is renewed is renewed as long as it is wanted, and then left to end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel

from tests.unit.engine.world import Cap, World
from trainmedic_core.target import TargetKind
from trainmedic_server import errors
from trainmedic_server.domain.run import OrderKind, UndoStatus
from trainmedic_server.ports.actions import Inverse, LeasedEffect, Renewal

MakeWorld = Callable[..., World]

THIRD = 100.0
SLACK = 20.0

HOLD = """
playbook: hold
on: {alert: Hot}
target: node
steps:
  - {id: cap, action: test.hold, with: {amount: 80}, undo: on_resolve}
"""


class Held(Cap):
    """A cap that lasts for five minutes. It tells what the test says of each renewal."""

    name = "test.hold"
    lease: ClassVar[timedelta] = timedelta(minutes=5)

    def __init__(self, services: Any = None) -> None:
        super().__init__(services)
        self.renewed: list[tuple[datetime, tuple[str, ...]]] = []
        self.says = "renewed"
        self.world: World | None = None
        self.error: Exception | None = None

    @classmethod
    def granted(cls, output: Mapping[str, Any]) -> timedelta:
        return timedelta(seconds=output.get("lease_seconds", 300))

    async def renew(self, holds: Sequence[LeasedEffect], until: datetime) -> Sequence[Renewal]:
        assert self.world is not None
        self.renewed.append((self.world.clock.now(), tuple(hold.command_id for hold in holds)))
        if self.error is not None:
            raise self.error
        return [Renewal(hold, "n1", self.says, "because") for hold in holds]


async def begun(world: MakeWorld, playbook: str = HOLD, **settings: Any) -> tuple[World, Held]:
    w = world(playbook, more=[Held], **settings)
    held = w.actions["hold"]
    assert isinstance(held, Held)
    held.world = w
    await w.engine.start()
    return w, held


def metric(w: World, name: str, **labels: str) -> float:
    return w.metrics.registry.get_sample_value(name, labels) or 0.0


def longest_gap(held: Held, since: datetime, until: datetime) -> float:
    """The longest time without a renewal."""
    moments = [since, *(at for at, _ in held.renewed if at >= since), until]
    return max((later - earlier).total_seconds() for earlier, later in pairwise(moments))


async def test_a_hold_is_renewed_in_each_third_of_its_lease_until_its_alert_resolves(world: MakeWorld) -> None:
    """Under the id of the command that made it; and no event is written for a renewal."""
    w, held = await begun(world)
    alert = w.alert(node="n1")
    await w.post(alert)
    since = w.clock.now()
    await w.pass_time(3600)
    assert longest_gap(held, since, w.clock.now()) <= THIRD + SLACK
    assert 35 <= len(held.renewed) <= 38
    assert {ids for _, ids in held.renewed} == {((await w.run()).steps[0].attempts[0].command_id,)}
    assert await w.story() == ["started", "step_started", "step_succeeded", "closed"]
    assert metric(w, "trainmedic_leases") == 1
    await w.resolve(alert)
    count = len(held.renewed)
    await w.pass_time(3600)
    assert len(held.renewed) == count
    assert metric(w, "trainmedic_leases") == 0


async def test_holds_of_several_runs_are_renewed_together(world: MakeWorld) -> None:
    """Whenever each was made, so that those of a node share a command."""
    w, held = await begun(world)
    for node in ("n1", "n2", "n3"):
        await w.post(w.alert(node=node))
        await w.pass_time(30)
    await w.pass_time(600)
    assert [len(ids) for _, ids in held.renewed[-3:]] == [3, 3, 3]


async def test_a_restarted_server_renews_at_once(world: MakeWorld) -> None:
    """It may have been away for most of the lease."""
    w, held = await begun(world)
    await w.post(w.alert(node="n1"))
    await w.restart(after=200)
    assert held.renewed[-1][0] == w.clock.now()


async def test_an_undo_that_has_begun_is_not_worked_against(world: MakeWorld) -> None:
    """Where it cannot be carried out, the lease that runs out does what it was to do."""
    w, held = await begun(world)
    alert = w.alert(node="n1")
    await w.post(alert)
    w.actions["uncap"].outcomes += [errors.TemporaryFailure("away")] * 1000
    await w.resolve(alert)
    assert (await w.run()).steps[0].undo.status is UndoStatus.RUNNING  # type: ignore[union-attr]
    await w.pass_time(3600)
    assert held.renewed == []


async def test_a_hold_that_a_later_step_has_ended_is_left_alone(world: MakeWorld) -> None:
    """Otherwise its renewal would report it as lost, or make it again."""
    w, held = await begun(world, f"{HOLD}  - {{id: uncap, action: test.uncap}}\n  - {{id: rest, wait: 1h}}\n")
    await w.post(w.alert(node="n1"))
    count = len(held.renewed)
    await w.pass_time(1000)
    assert len(held.renewed) == count


class Power(Held):
    """Its own inverse, like ``gpu.power_limit``."""

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        return None if params.model_dump()["amount"] == 0 else Inverse(cls.name, {"amount": 0})


HARDER = """
playbook: hold
on: {alert: Hot}
target: node
steps:
  - {id: cap, action: test.hold, with: {amount: 85}, undo: on_resolve}
  - {id: harder, action: test.hold, with: {amount: 65}, undo: on_resolve, on_error: continue}
  - {id: rest, wait: 1h}
  - {id: end, action: test.hold, with: {amount: 0}, when: "labels.ends == 'early'"}
  - {id: last, wait: 1h}
"""


@pytest.mark.parametrize("second", [None, errors.PermanentFailure("the policy refuses 65")], ids=["made", "refused"])
async def test_a_cap_is_renewed_after_a_second_one(world: MakeWorld, second: Exception | None) -> None:
    """Until its undo, or a step that does the same."""
    w = world(HARDER, more=[Power])
    held = w.actions["hold"]
    assert isinstance(held, Held)
    held.world = w
    held.outcomes += [{}, second or {}]
    await w.engine.start()
    alert = w.alert(node="n1", ends="early")
    await w.post(alert)
    since = w.clock.now()
    await w.pass_time(1000)
    made = [step.attempts[0].command_id for step in (await w.run()).steps[:2] if step.status == "succeeded"]
    assert len(made) == (2 if second is None else 1)
    assert longest_gap(held, since, w.clock.now()) <= THIRD + SLACK
    assert set(held.renewed[-1][1]) == set(made)
    await w.pass_time(3000)
    assert set(held.renewed[-1][1]).isdisjoint(made)


async def test_a_hold_that_a_step_failed_to_end_is_renewed(world: MakeWorld) -> None:
    ends = "  - {id: uncap, action: test.uncap, on_error: continue}\n  - {id: rest, wait: 1h}\n"
    w, held = await begun(world, HOLD + ends)
    w.actions["uncap"].outcomes.append(errors.PermanentFailure("refused"))
    await w.post(w.alert(node="n1"))
    await w.pass_time(1000)
    assert len(held.renewed) >= 9


async def test_a_hold_without_undo_is_kept_while_its_alert_fires_and_then_runs_out(world: MakeWorld) -> None:
    """Nothing that is leased is for ever."""
    w, held = await begun(world, HOLD.replace("on_resolve", "never"))
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.pass_time(1000)
    assert len(held.renewed) >= 9
    await w.resolve(alert)
    count = len(held.renewed)
    await w.pass_time(1000)
    assert len(held.renewed) == count


async def test_the_hold_of_an_ended_member_is_kept_while_the_groups_alert_fires(world: MakeWorld) -> None:
    """The alert belongs to the parent run."""
    group = HOLD.replace("target: node", 'target: {nodes: {rack: "r1"}}').replace("undo: on_resolve", "undo: never")
    w, held = await begun(world, group, inventory={"attributes:n1": "rack=r1"})
    alert = w.alert()
    await w.post(alert)
    await w.pass_time(1000)
    assert not (await w.run()).is_open
    assert len(held.renewed) >= 9
    await w.resolve(alert)
    count = len(held.renewed)
    await w.pass_time(1000)
    assert len(held.renewed) == count


async def test_a_hold_without_undo_whose_alert_nobody_speaks_of_runs_out(world: MakeWorld) -> None:
    """Its end may have been lost; so it is no longer kept than an alert that is not heard of counts as firing."""
    w, held = await begun(world, HOLD.replace("on_resolve", "never"), assume_resolved_after=timedelta(hours=1))
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.pass_time(3000)
    await w.post(alert)
    await w.pass_time(3500)
    assert (w.clock.now() - held.renewed[-1][0]).total_seconds() <= THIRD + SLACK
    await w.pass_time(200)
    count = len(held.renewed)
    await w.pass_time(3600)
    assert len(held.renewed) == count


async def test_neither_pause_nor_an_open_breaker_holds_a_renewal_back(world: MakeWorld) -> None:
    """A pause must not give a hot GPU its full power back."""
    w, held = await begun(world, breaker_min_nodes=1, breaker_share=0.1)
    await w.post(w.alert(node="n1"))
    await w.post(w.alert(node="n2"))
    assert w.engine.controls.breaker_open
    await w.engine.pause("alice")
    since = w.clock.now()
    await w.pass_time(2000)
    assert longest_gap(held, since, w.clock.now()) <= THIRD + SLACK


async def test_what_may_have_been_applied_is_renewed_too(world: MakeWorld) -> None:
    """A hold whose outcome nobody knows may stand; one that has certainly failed does not."""
    retried = HOLD.replace("undo: on_resolve", "undo: on_resolve, retry: {attempts: 2, delay: 1s}")
    w, held = await begun(world, retried)
    held.outcomes += [errors.TemporaryFailure("busy"), errors.OutcomeUnknown("no reply")]
    await w.post(w.alert(node="n1"))
    await w.pass_time(500)
    failed, unknown = (await w.run()).steps[0].attempts
    assert {ids for _, ids in held.renewed} == {(unknown.command_id,)}
    assert failed.command_id != unknown.command_id


async def test_an_attempt_in_flight_when_the_server_was_killed_is_renewed_while_pause_holds_it_back(
    world: MakeWorld,
) -> None:
    """Nobody asks again before the server is resumed, and meanwhile the cap may stand."""
    w, held = await begun(world)
    held.outcomes.append("hang")
    await w.post(w.alert(node="n1"))
    await w.engine.pause("alice")
    await w.restart(after=1)
    await w.pass_time(600)
    assert (await w.run()).waiting_on == "resume"
    assert len(held.renewed) >= 4


async def test_a_lost_lease_is_told_once(world: MakeWorld) -> None:
    """In the run's story and in the metrics, however often it is asked for, also after a restart."""
    w, held = await begun(world)
    alert = w.alert(node="n1")
    await w.post(alert)
    held.says = "lost"
    await w.pass_time(1000)
    assert metric(w, "trainmedic_leases_lost_total") == 1
    assert metric(w, "trainmedic_lease_renewals_total", outcome="lost") >= 8
    await w.restart(after=10)
    await w.pass_time(500)
    assert (await w.story()).count("lease_lost") == 1
    record = await w.store.record((await w.run()).id)
    assert record is not None
    (event,) = [event for event in record.events if event.kind == "lease_lost"]
    command_id = (await w.run()).steps[0].attempts[0].command_id
    assert event.data == {"step": "cap", "command_id": command_id, "place": "n1", "why": "because"}
    await w.resolve(alert)
    assert (await w.run()).steps[0].undo.status is UndoStatus.DONE  # type: ignore[union-attr]


async def test_a_hold_that_was_never_certain_is_not_called_lost(world: MakeWorld) -> None:
    """Where the outcome is unknown there may have been nothing to lose."""
    w, held = await begun(world)
    held.outcomes.append(errors.OutcomeUnknown("no reply"))
    held.says = "lost"
    await w.post(w.alert(node="n1"))
    await w.pass_time(500)
    assert held.renewed
    assert "lease_lost" not in await w.story()


async def test_a_hold_that_is_taken_back_while_it_is_renewed_is_not_called_lost(world: MakeWorld) -> None:
    """The receiver knows it no more because it has just been undone."""
    w, held = await begun(world)
    await w.post(w.alert(node="n1"))
    run = await w.run()

    async def renew(holds: Sequence[LeasedEffect], until: datetime) -> Sequence[Renewal]:
        await w.engine.order(run.id, OrderKind.UNDO, "alice")
        await w.pass_time(0)
        return [Renewal(hold, "n1", "lost") for hold in holds]

    held.renew = renew  # type: ignore[method-assign]
    await w.pass_time(THIRD + SLACK)
    assert (await w.run()).steps[0].undo.status is UndoStatus.DONE  # type: ignore[union-attr]
    assert "lease_lost" not in await w.story()


async def test_a_shorter_lease_that_was_granted_is_renewed_in_its_own_thirds(world: MakeWorld) -> None:
    """The receiver's policy may allow less than is asked for."""
    w, held = await begun(world)
    held.outcomes.append({"lease_seconds": 60})
    await w.post(w.alert(node="n1"))
    since = w.clock.now()
    await w.pass_time(1000)
    assert longest_gap(held, since, w.clock.now()) <= 20 + SLACK


async def test_a_step_that_made_nothing_is_not_renewed(world: MakeWorld) -> None:
    """It granted a lease of zero, like a drain that found another's."""
    w, held = await begun(world)
    held.outcomes.append({"lease_seconds": 0})
    await w.post(w.alert(node="n1"))
    await w.pass_time(1000)
    assert held.renewed == []
    assert metric(w, "trainmedic_leases") == 0


class HeldJobs(Held):
    name = "test.hold_jobs"
    targets = frozenset({TargetKind.JOB})


async def test_of_a_step_on_several_jobs_only_what_it_made_is_renewed(world: MakeWorld) -> None:
    """It may have found another's hold on one of them."""
    on_jobs = """
playbook: hold
on: {alert: Hot}
target: {node: "{{ labels.node }}", jobs: on_node}
steps:
  - {id: hold, target: jobs, action: test.hold_jobs, with: {amount: 80}, undo: on_resolve}
"""
    w = world(on_jobs, inventory={"told:node:n1": ["a", "b"]}, more=[HeldJobs])
    held = w.actions["hold_jobs"]
    assert isinstance(held, HeldJobs)
    held.world = w
    held.outcomes += [{"lease_seconds": 0}, {"held": True}]
    await w.engine.start()
    await w.post(w.alert(node="n1"))
    await w.pass_time(1000)
    assert {commands for _, commands in held.renewed} == {(held.calls[1].command_id,)}


async def test_renewing_outlives_errors(world: MakeWorld) -> None:
    """They are counted, and it is tried again when the next renewal is due."""
    w, held = await begun(world)
    await w.post(w.alert(node="n1"))
    held.error = RuntimeError("a bug")
    await w.pass_time(500)
    assert metric(w, "trainmedic_loop_errors_total", loop="leases") >= 3
    held.error = None
    held.says = "unanswered"
    await w.pass_time(500)
    assert metric(w, "trainmedic_lease_renewals_total", outcome="unanswered") >= 3
    assert metric(w, "trainmedic_leases") == 1


async def test_a_clock_that_is_set_back_delays_no_renewal(world: MakeWorld) -> None:
    """What counts is that the moment is another one."""
    w, held = await begun(world)
    await w.post(w.alert(node="n1"))
    await w.pass_time(500)
    w.clock.set_back(timedelta(hours=1))
    count = len(held.renewed)
    await w.pass_time(500)
    assert len(held.renewed) >= count + 4


ASKS = """
playbook: asks
on: {alert: Hot}
target: node
steps:
  - {id: pause, action: test.pause, with: {amount: 600}, undo: on_failure}
  - {id: sure, approve: Go on?, timeout: 1h, on_timeout: fail}
  - {id: later, wait: 1h}
"""


class Paused(Held):
    """A pause that ends by itself, unless a question is open."""

    name = "test.pause"
    is_hold: ClassVar[bool] = True


async def asked(world: MakeWorld, playbook: str = ASKS) -> tuple[World, Paused]:
    w = world(playbook, more=[Paused])
    paused = w.actions["pause"]
    assert isinstance(paused, Paused)
    paused.world = w
    await w.engine.start()
    await w.post(w.alert(node="n1"))
    return w, paused


async def test_a_pause_is_held_until_its_question_times_out(world: MakeWorld) -> None:
    """However long the question is open, across a restart; then the undo ends the pause."""
    w, paused = await asked(world)
    since = w.clock.now()
    await w.pass_time(1800)
    await w.restart(after=60)
    await w.pass_time(1700)
    assert longest_gap(paused, since, w.clock.now()) <= THIRD + SLACK
    await w.pass_time(100)
    run = await w.run()
    assert run.steps[0].undo is not None
    assert (run.steps[1].status, run.steps[0].undo.status) == ("timed_out", UndoStatus.DONE)
    count = len(paused.renewed)
    await w.pass_time(3600)
    assert len(paused.renewed) == count


async def test_a_pause_is_not_held_after_the_answer(world: MakeWorld) -> None:
    """While the run goes on, the pause's own limit holds again."""
    w, paused = await asked(world)
    await w.pass_time(600)
    await w.engine.order((await w.run()).id, OrderKind.APPROVE, "ann")
    await w.pass_time(0)
    count = len(paused.renewed)
    assert count >= 6
    await w.pass_time(1800)
    assert ((await w.run()).waiting_on, len(paused.renewed)) == ("wait", count)


async def test_a_pause_without_a_later_question_keeps_its_limit(world: MakeWorld) -> None:
    """Nor is it held for a question before it, or while a lapsed one waits to be asked again."""
    before = ASKS.replace("steps:\n", "steps:\n  - {id: first, approve: May it?, timeout: 1h}\n").replace(
        "{id: sure, approve: Go on?, timeout: 1h, on_timeout: fail}", "{id: calm, wait: 1h}"
    )
    w, paused = await asked(world, before)
    await w.engine.order((await w.run()).id, OrderKind.APPROVE, "ann")
    await w.pass_time(1800)
    assert (len(paused.calls), paused.renewed) == (1, [])
    again = ASKS.replace("approve: Go on?, timeout: 1h", "approve: {message: Go on?, ask_again: 1h}, timeout: 10m")
    w, paused = await asked(world, again)
    await w.pass_time(700)
    count = len(paused.renewed)
    await w.pass_time(1800)
    assert (len(paused.renewed), (await w.run()).status) == (count, "awaiting_approval")


async def test_a_pause_that_a_step_has_ended_is_not_held(world: MakeWorld) -> None:
    """A question after that is not about it."""
    text = ASKS.replace("  - {id: sure", "  - {id: free, action: test.uncap}\n  - {id: sure")
    w, paused = await asked(world, text)
    await w.pass_time(1800)
    assert ((await w.run()).status, paused.renewed) == ("awaiting_approval", [])
