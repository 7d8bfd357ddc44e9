"""Waits for a time, a query or an action: they hold no lock before the first action, and look again after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel

from tests.unit.engine.world import Scripted, World
from trainmedic_server import errors
from trainmedic_server.domain.run import Decision, OrderKind, Status, StepStatus
from trainmedic_server.engine.admission_changes import ByHand
from trainmedic_server.engine.manual_runs import StartOrder
from trainmedic_server.ports.actions import Call

MakeWorld = Callable[..., World]


class QueryParams(BaseModel):
    query: str


class Query(Scripted):
    """A Prometheus whose only value a test sets. It evaluates no PromQL: the query's sample passes below 30."""

    name = "prometheus.query"
    harmful = False
    promql: ClassVar[frozenset[str]] = frozenset({"query"})
    Params = QueryParams
    value: float | Exception | None = 42

    async def perform(self, call: Call) -> Mapping[str, Any]:
        self.calls.append(call)
        if isinstance(self.value, Exception):
            raise self.value
        passes = self.value is not None and self.value < 30
        series = [{"labels": {}, "value": self.value}] if passes else []
        return {"value": self.value if passes else None, "series": series, "compared": self.value}


class Request(Scripted):
    name = "test.call"
    changes_elsewhere: ClassVar[bool] = True


QUIET = """
playbook: quiet
on: {alert: Idle}
target: {node: "{{ labels.node }}"}
steps:
  - id: quiet
    wait_for: {query: 'max(busy{node="{{ target.node }}"}) < 30', for: 5m, every: 30s}
    timeout: 2h
  - {id: cap, action: test.cap}
"""
OTHER = """
playbook: other
on: {alert: Hot}
target: {node: "{{ labels.node }}"}
steps:
  - {id: cap, action: test.other, timeout: 1h}
"""


def one(text: str) -> str:
    return f'playbook: p\non: {{alert: Idle}}\ntarget: {{node: "{{{{ labels.node }}}}"}}\nsteps:\n{text}'


async def begun(
    world: MakeWorld, *books: str, value: float | Exception | None = 42, **limits: Any
) -> tuple[World, Query]:
    at = world(*books, more=[Query, Request], **limits)
    query = at.actions.get("prometheus.query")
    assert isinstance(query, Query)
    query.value = value
    await at.engine.start()
    await at.post(at.alert("Idle", node="n1"))
    return at, query


async def waits_for(at: World, playbook: str | None = None) -> str:
    run = next(run for run in await at.runs() if playbook in (None, run.playbook))
    record = await at.store.record(run.id)
    assert record is not None
    upcoming = await at.engine.upcoming(run, record.alerts)
    assert upcoming is not None
    return upcoming.waits_for or ""


async def test_a_condition_must_hold_for_the_whole_time(world: MakeWorld) -> None:
    """A break begins the time again; the action follows at its end."""
    at, query = await begun(world, QUIET)
    await at.pass_time(600)
    query.value = 12
    await at.pass_time(240)
    query.value = 50
    await at.pass_time(60)
    query.value = 12
    await at.pass_time(295)
    assert (await at.run()).status is Status.WAITING
    assert "cap" not in at.calls()
    await at.pass_time(60)
    run = await at.run()
    assert run.status is Status.SUCCEEDED
    assert at.calls()["cap"] == 1
    assert run.step(("steps", 0)).output["value"] == 12


async def test_a_condition_of_its_own_decides_for_a_query_too(world: MakeWorld) -> None:
    """With `until`, a query holds by its output, also where it has no sample."""
    at, query = await begun(
        world,
        one(
            "  - id: gone\n"
            "    wait_for: {action: prometheus.query, with: {query: x}, until: output.series | length == 0}\n"
            "    timeout: 2h\n"
            "  - {id: cap, action: test.cap}\n"
        ),
        value=12,
    )
    await at.pass_time(300)
    assert (await at.run()).status is Status.WAITING
    query.value = 42
    await at.pass_time(60)
    assert (await at.run()).status is Status.SUCCEEDED


async def test_only_changes_are_recorded(world: MakeWorld) -> None:
    """Sixty looks that see the same are no history, no attempts and no commits."""
    at, query = await begun(world, QUIET)
    await at.pass_time(5)
    before = await at.run()
    looks = len(query.calls)
    await at.pass_time(1800)
    run = await at.run()
    assert len(query.calls) >= looks + 59
    assert run == before
    assert run.step(("steps", 0)).attempts == ()
    assert await at.story() == ["started", "wait_started", "wait_changed"]
    query.value = 1
    await at.pass_time(400)
    assert [kind for kind in await at.story() if kind.startswith("wait")] == [
        "wait_started",
        "wait_changed",
        "wait_changed",
        "wait_ended",
    ]


async def test_the_query_has_the_values_quoted_and_is_fixed_at_the_start(world: MakeWorld) -> None:
    """No label can leave its string."""
    at, query = await begun(world, QUIET.replace("target.node", "labels.what"))
    assert (await at.run()).step(("steps", 0)).error is not None
    await at.post(at.alert("Idle", node="n2", what='a"} or vector(1) #'))
    assert query.calls[-1].params.model_dump() == {"query": 'max(busy{node="a\\u0022} or vector(1) #"}) < 30'}


async def test_a_timeout_says_what_was_seen_last(world: MakeWorld) -> None:
    """An error does not hold, and is told."""
    at, _ = await begun(world, QUIET, value=errors.TemporaryFailure("Prometheus does not answer"))
    await at.pass_time(7201)
    run = await at.run()
    assert (run.status, run.step(("steps", 0)).status) == (Status.FAILED, StepStatus.TIMED_OUT)
    assert "Prometheus does not answer" in run.message
    assert "cap" not in at.calls()


async def test_a_run_may_go_on_after_a_timeout(world: MakeWorld) -> None:
    """With ``on_timeout: continue``, and a condition on how the wait ended."""
    text = QUIET.replace("timeout: 2h", "timeout: 6m\n    on_timeout: continue")
    at, _ = await begun(world, text, value=None)
    await at.pass_time(361)
    assert (await at.run()).status is Status.SUCCEEDED
    assert at.calls()["cap"] == 1


async def test_the_time_begins_again_after_a_kill(world: MakeWorld) -> None:
    """While no server looked, nothing is known. The deadline stays."""
    at, _ = await begun(world, QUIET, value=12)
    await at.pass_time(200)
    deadline = (await at.run()).step(("steps", 0)).deadline
    await at.restart(60)
    assert (await at.run()).step(("steps", 0)).deadline == deadline
    await at.pass_time(290)
    assert "cap" not in at.calls()
    await at.pass_time(40)
    assert at.calls()["cap"] == 1


async def test_a_wait_before_the_first_action_holds_no_lock(world: MakeWorld) -> None:
    """Other repairs of the node go on; afterwards the run queues for it and looks once more."""
    at, query = await begun(world, QUIET, OTHER)
    await at.post(at.alert("Hot", node="n1"))
    assert at.calls()["other"] == 1
    at.actions["other"].outcomes.append(timedelta(minutes=10))
    query.value = 12
    await at.pass_time(200)
    await at.post(at.alert("Hot", node="n1", again="yes"))
    await at.pass_time(200)
    quiet = next(run for run in await at.runs() if run.playbook == "quiet")
    assert (quiet.waiting_on, "cap" in at.calls()) == ("target", False)
    assert "held by run" in await waits_for(at, "quiet")
    query.value = 50
    await at.pass_time(420)
    quiet = next(run for run in await at.runs() if run.playbook == "quiet")
    assert (quiet.waiting_on, "cap" in at.calls()) == ("wait", False)
    await at.post(at.alert("Hot", node="n1", third="yes"))
    assert at.calls()["other"] == 3
    query.value = 12
    await at.pass_time(400)
    assert at.calls()["cap"] == 1


@pytest.mark.parametrize(("action", "goes_on"), [("test.tell", True), ("test.call", True), ("test.cap", False)])
async def test_a_run_on_the_cluster_stops_repairs_only_if_it_changes_something(
    world: MakeWorld, action: str, goes_on: bool
) -> None:
    text = (
        f"playbook: report\non: {{alert: Slow}}\ntarget: cluster\nsteps:\n"
        f"  - {{action: {action}}}\n  - {{wait: 10m}}\n  - {{id: last, action: {action}}}\n"
    )
    at, _ = await begun(world, text, OTHER)
    await at.post(at.alert("Slow"))
    await at.post(at.alert("Hot", node="n1"))
    assert ("other" in at.calls()) is goes_on
    await at.pass_time(4000)
    assert at.calls()["other"] == 1


async def test_a_call_of_another_service_and_a_repair_do_not_wait_for_each_other(world: MakeWorld) -> None:
    """Neither in flight nor in a queue."""
    text = "playbook: report\non: {alert: Slow}\ntarget: cluster\nsteps: [{action: test.call, timeout: 1h}]\n"
    at, _ = await begun(world, text, OTHER)
    at.actions["other"].outcomes.append("hang")
    await at.post(at.alert("Hot", node="n1"))
    at.actions["call"].outcomes.append("hang")
    await at.post(at.alert("Slow"))
    await at.post(at.alert("Hot", node="n2"))
    assert at.calls() == {"other": 2, "call": 1}


async def test_the_timeout_also_ends_the_wait_for_the_target(world: MakeWorld) -> None:
    """A condition that held, but could not be used in time, fails the run."""
    at, _ = await begun(world, QUIET.replace("timeout: 2h", "timeout: 10m"), OTHER, value=12)
    at.actions["other"].outcomes.append(timedelta(minutes=30))
    await at.post(at.alert("Hot", node="n1"))
    await at.pass_time(620)
    quiet = next(run for run in await at.runs() if run.playbook == "quiet")
    assert (quiet.status, quiet.step(("steps", 0)).status) == (Status.FAILED, StepStatus.TIMED_OUT)
    assert "the target was busy" in quiet.message
    await at.pass_time(1300)
    assert "cap" not in at.calls()


async def test_a_run_that_queues_after_its_wait_can_be_cancelled(world: MakeWorld) -> None:
    """It leaves the queue."""
    at, _ = await begun(world, QUIET, OTHER, value=12)
    at.actions["other"].outcomes.append(timedelta(minutes=30))
    await at.post(at.alert("Hot", node="n1"))
    await at.pass_time(400)
    quiet = next(run for run in await at.runs() if run.playbook == "quiet")
    assert quiet.waiting_on == "target"
    await at.engine.order(quiet.id, OrderKind.CANCEL, "ann", "", frozenset())
    await at.pass_time(1)
    assert (await at.run(quiet.id)).status is Status.CANCELLED
    await at.pass_time(2000)
    assert "cap" not in at.calls()


async def test_a_wait_after_the_first_action_keeps_the_lock(world: MakeWorld) -> None:
    """What the run has changed is nobody else's meanwhile."""
    book = one("  - {id: cap, action: test.cap}\n  - {id: settle, wait: 10m}\n  - {id: end, action: test.tell}")
    at, _ = await begun(world, book, OTHER)
    await at.post(at.alert("Hot", node="n1"))
    await at.pass_time(599)
    assert at.calls() == {"cap": 1}
    await at.pass_time(2)
    assert at.calls() == {"cap": 1, "tell": 1, "other": 1}


async def test_a_delay_goes_on_over_a_restart(world: MakeWorld) -> None:
    """It ends at the time that was fixed at its start."""
    at, _ = await begun(world, one("  - {wait: '{{ labels.time | default(\"5m\") }}'}\n  - {action: test.cap}"))
    await at.restart(100)
    await at.pass_time(199)
    assert at.calls() == {}
    await at.pass_time(2)
    assert at.calls() == {"cap": 1}
    assert await at.story() == ["started", "wait_started", "wait_ended", "step_started", "step_succeeded", "closed"]


@pytest.mark.parametrize(("time", "seconds"), [("2026-01-01T02:00:00+01:00", 3600), ("2025-01-01T00:00:00Z", 0)])
async def test_a_wait_until_a_time(world: MakeWorld, time: str, seconds: int) -> None:
    """One in the past ends at once."""
    at, _ = await begun(world, one(f'  - {{wait_until: "{time}"}}\n  - {{action: test.cap}}'))
    if seconds:
        assert await waits_for(at) == "until 2026-01-01T01:00:00Z"
        await at.pass_time(seconds - 1)
        assert at.calls() == {}
        await at.pass_time(2)
    assert at.calls() == {"cap": 1}


async def test_a_time_that_cannot_be_read_fails_the_step(world: MakeWorld) -> None:
    """It names the value."""
    at, _ = await begun(world, one('  - {wait_until: "{{ labels.node }}"}\n  - {action: test.cap}'))
    run = await at.run()
    assert (run.status, "'n1' is not a time" in run.message) == (Status.FAILED, True)


async def test_the_end_of_the_alert_ends_a_wait(world: MakeWorld) -> None:
    """Nothing is left to repair: the run does not hold on for hours."""
    at, query = await begun(world, QUIET)
    await at.resolve(at.alert("Idle", node="n1"))
    run = await at.run()
    assert (run.status, at.calls().get("cap")) == (Status.SUCCEEDED, None)
    assert [step.status for step in run.steps] == [StepStatus.SKIPPED, StepStatus.SKIPPED]
    looks = len(query.calls)
    await at.pass_time(300)
    assert len(query.calls) == looks


async def test_a_wait_behind_the_end_of_the_alert_is_kept(world: MakeWorld) -> None:
    """Such as a time to cool down."""
    book = one("  - {action: test.cap}\n  - {wait_for: resolved}\n  - {wait: 10m}\n  - {action: test.uncap}")
    at, _ = await begun(world, book)
    await at.resolve(at.alert("Idle", node="n1"))
    assert at.calls() == {"cap": 1}
    await at.pass_time(601)
    assert at.calls() == {"cap": 1, "uncap": 1}


async def test_an_action_is_repeated_until_its_output_fits(world: MakeWorld) -> None:
    """A failure is not yet; the output is the step's."""
    wait = "{action: test.look, with: {amount: 2}, until: output.healthy == 8, every: 1m}"
    book = one(
        f"  - {{id: fit, wait_for: {wait}, timeout: 1h}}\n  - {{when: steps.fit.output.healthy == 8, action: test.cap}}"
    )
    at = world(book)
    await at.engine.start()
    at.actions["look"].outcomes.extend([errors.PermanentFailure("unfit"), {"healthy": 7}, {}, *[{"healthy": 8}] * 2])
    await at.post(at.alert("Idle", node="n1"))
    assert "unfit" in await waits_for(at)
    await at.pass_time(300)
    assert (await at.run()).status is Status.SUCCEEDED
    # The fourth look held, and one more after the lock.
    assert at.calls() == {"look": 5, "cap": 1}
    assert len(set(at.actions["look"].settled_ids)) == 5


async def test_without_until_it_waits_for_the_action_to_be_applied(world: MakeWorld) -> None:
    """As a test of health that fails until it passes."""
    book = one("  - {wait_for: {action: test.look, every: 1m}, timeout: 1h}\n  - {action: test.cap}")
    at = world(book)
    await at.engine.start()
    at.actions["look"].outcomes.append(errors.TemporaryFailure("not yet"))
    await at.post(at.alert("Idle", node="n1"))
    assert at.calls() == {"look": 1}
    await at.pass_time(61)
    assert at.calls() == {"look": 3, "cap": 1}


async def test_what_a_wait_waits_for_is_told(world: MakeWorld) -> None:
    """With the last value, though it did not pass the comparison."""
    at, query = await begun(world, QUIET)
    await at.pass_time(1)
    assert await waits_for(at) == 'until max(busy{node="n1"}) < 30 has held for 5m; last value 42'
    query.value = 12
    await at.pass_time(60)
    assert "it holds since 2026-01-01T00:0" in await waits_for(at)
    assert "last value 12" in await waits_for(at)
    await at.restart()


async def test_a_wait_behind_the_question_of_mode_approve_frees_the_target(world: MakeWorld) -> None:
    """The time is kept whole, though the target was locked for the question."""
    at, query = await begun(world, QUIET, OTHER, value=12, mode="approve")
    run = await at.run()
    assert (run.status, query.calls) == (Status.AWAITING_APPROVAL, [])
    await at.engine.order(run.id, OrderKind.APPROVE, "ann", "", frozenset())
    await at.pass_time(290)
    assert (await at.run()).waiting_on == "wait"
    assert "cap" not in at.calls()
    await at.pass_time(60)
    assert at.calls()["cap"] == 1


async def test_an_observed_wait_looks_at_nothing(world: MakeWorld) -> None:
    """Mode observe."""
    at, query = await begun(world, QUIET, mode="observe")
    run = await at.run()
    assert (run.status, run.decision, query.calls) == (Status.OBSERVED, Decision.OBSERVE_ONLY, [])


async def test_a_manual_run_waits_for_longer_than_alerts_are_believed(world: MakeWorld) -> None:
    """No alert is there that could be silent: a maintenance the next day is waited for."""
    book = "playbook: m\non: {manual: {}}\ntarget: {node: n1}\nsteps:\n  - {wait: 30h}\n  - {action: test.cap}"
    at = world(book, assume_resolved_after=timedelta(hours=12))
    await at.engine.start()
    await at.engine.start_run(StartOrder("m", None), ByHand("ann"))
    await at.pass_time(29 * 3600)
    assert (await at.run()).waiting_on == "wait"
    await at.pass_time(3601)
    assert at.calls() == {"cap": 1}


async def test_a_wait_beyond_all_times_fails_its_step(world: MakeWorld) -> None:
    """An alert can state any duration."""
    steps = "  - {id: later, wait: '{{ labels.delay }}'}\n  - {id: cap, action: test.cap}\n"
    at = world(one(steps), more=[Query, Request])
    await at.engine.start()
    await at.post(at.alert("Idle", node="n1", delay="9900y"))
    run = await at.run()
    assert (run.status, run.steps[0].error) == (Status.FAILED, "'9900y' is too long; write at most 2555000d")
