"""Alerts and runs at their edges: joining one that closes, resolving before it acts, being decided again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import pytest

from tests.unit.engine.books import CAP
from tests.unit.engine.world import World
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.domain.run import Decision, Run, Status
from trainmedic_server.ports.store import Transaction

MakeWorld = Callable[..., World]
T = TypeVar("T")

WATCH = """
playbook: watch
on: {alert: [Hot, Hotter]}
target: node
steps:
  - {id: cap, action: test.cap, undo: on_resolve}
  - {id: gone, wait_for: resolved}
"""


class Interrupting(InMemoryStore):
    """Lets something happen just before a run's close is written, as another thread's commit would."""

    def __init__(self) -> None:
        super().__init__()
        self.before_close: Callable[[], Any] | None = None

    async def transact(self, work: Callable[[Transaction], T]) -> T:
        if self.before_close is not None and await self._closes(work):
            happen, self.before_close = self.before_close, None
            await happen()
        return await super().transact(work)

    async def _closes(self, work: Callable[[Transaction], object]) -> bool:
        """Try the work, look what it would write, and take it back."""
        closing = False

        def trial(tx: Transaction) -> None:
            nonlocal closing
            was_open: dict[str, Run] = {run.id: run for run in tx.unfinished() if run.is_open}
            work(tx)
            closing = any(not run.is_open for run in tx.runs(was_open))
            raise _TakeBack

        with contextlib.suppress(_TakeBack):
            await super().transact(trial)
        return closing


class _TakeBack(Exception):
    pass


async def test_an_alert_that_joins_a_run_at_its_closing_moment_keeps_it_open(world: MakeWorld) -> None:
    """It was told that the run sees to it; so what was given to the first alert is not taken from it."""
    store = Interrupting()
    w = world(WATCH, store=store)
    first, second = w.alert("Hot", node="n1"), w.alert("Hotter", node="n1")
    await w.post(first)
    decided: list[Decision] = []

    async def join() -> None:
        decided.extend(run.decision for run in (await w.post(second)).runs)

    store.before_close = join
    await w.resolve(first)
    await w.pass_time(1)
    assert decided == [Decision.JOINED]
    assert (await w.run()).status is Status.WAITING
    assert w.calls() == {"cap": 1}
    await w.resolve(second)
    assert (await w.run()).status is Status.SUCCEEDED
    assert w.calls() == {"cap": 1, "uncap": 1}


async def test_an_alert_that_joins_while_the_last_attempt_ends_keeps_its_outcome(world: MakeWorld) -> None:
    """The close is planned again with the alert; the act is not done again."""
    store = Interrupting()
    w = world(WATCH.replace("  - {id: gone, wait_for: resolved}\n", ""), store=store)
    first, second = w.alert("Hot", node="n1"), w.alert("Hotter", node="n1")

    async def join() -> None:
        await w.post(second)

    store.before_close = join
    await w.post(first)
    await w.pass_time(1)
    assert w.calls() == {"cap": 1}
    await w.resolve(first)
    assert w.calls() == {"cap": 1}
    await w.resolve(second)
    assert w.calls() == {"cap": 1, "uncap": 1}
    assert (await w.story()).count("step_succeeded") == 1


async def test_an_alert_that_resolves_before_the_first_act_is_not_acted_on(world: MakeWorld) -> None:
    """Both may come in one delivery."""
    w = world(CAP)
    alert = w.alert(gpu="0", node="n1")
    ended = w.alert(gpu="0", node="n1", status="resolved")
    admission = await w.post(alert, ended)
    assert [run.decision for run in admission.runs] == [Decision.STARTED]
    run = await w.run()
    assert (run.status, run.decision) == (Status.NOT_STARTED, Decision.STALE)
    assert w.calls() == {}


async def test_each_playbook_decides_for_itself(world: MakeWorld) -> None:
    """Three react to one alert: one acts, one is cooling down, one finds no target; each says so."""
    cooling = CAP.replace("playbook: cap", "playbook: cooling").replace("test.cap", "test.other")
    lost = CAP.replace("playbook: cap", "playbook: lost").replace("labels.gpu", "labels.slot | default('')")
    w = world(CAP, cooling.replace("    undo: on_resolve\n", "guards: {cooldown: 1h}\n"), lost)
    first = w.alert(gpu="0", node="n1")
    await w.post(first)
    await w.resolve(first)
    await w.pass_time(10)
    again = w.alert(gpu="0", node="n1")
    decided = {run.playbook: run.decision for run in (await w.post(again)).runs}
    assert decided == {
        "cap": Decision.STARTED,
        "cooling": Decision.COOLDOWN,
        "lost": Decision.TARGET_UNKNOWN,
    }
    assert len({run.id for run in await w.runs()}) == 6


async def test_a_repeat_that_is_refused_for_another_reason_adds_that_reason(world: MakeWorld) -> None:
    """The item stays one, its story tells both."""
    w = world(CAP + "guards: {cooldown: 10m}\n")
    first = w.alert(gpu="0", node="n1")
    await w.post(first)
    await w.resolve(first)
    await w.pass_time(1)
    second = w.alert(gpu="0", node="n1")
    refused = (await w.post(second)).runs[0]
    await w.engine.pause("alice")
    again = (await w.post(second)).runs[0]
    assert (again.run_id, again.decision) == (refused.run_id, Decision.PAUSED)
    assert await w.story(refused.run_id) == ["cooldown", "alert_repeated", "paused"]


async def test_a_rate_limit_forgets_a_run_exactly_when_its_time_is_up(world: MakeWorld) -> None:
    """Not a moment before, nor after."""
    w = world(CAP + "guards: {max_runs: {count: 1, per: 1h}}\n")
    await w.post(w.alert(gpu="0", node="n1"))
    await w.pass_time(3599)
    assert [run.decision for run in (await w.post(w.alert(gpu="1", node="n1"))).runs] == [Decision.RATE_LIMITED]
    await w.pass_time(1)
    assert [run.decision for run in (await w.post(w.alert(gpu="2", node="n1"))).runs] == [Decision.STARTED]


async def test_an_alert_that_was_assumed_to_have_resolved_and_is_reported_again_fires(world: MakeWorld) -> None:
    """An assumption gives way to a report: what else it concerns waits for its true end."""
    w = world(WATCH, assume_resolved_after=timedelta(hours=1))
    await w.engine.start()
    silent, loud = w.alert("Hot", node="n1"), w.alert("Hotter", node="n1")
    await w.post(silent, loud)
    for _ in range(8):
        await w.pass_time(600)
        await w.post(loud)
    kept = await w.store.transact(lambda tx: tx.alerts([silent.identity])[silent.identity])
    assert kept.resolved_because == "assumed"
    assert (await w.post(silent)).duplicates == 1
    await w.resolve(loud)
    assert (await w.run()).status is Status.WAITING
    await w.resolve(silent)
    assert (await w.run()).status is Status.SUCCEEDED
    assert w.calls() == {"cap": 1, "uncap": 1}


@pytest.mark.parametrize("back", [1, 3600])
async def test_a_clock_that_is_set_back_breaks_nothing(world: MakeWorld, back: int) -> None:
    """Runs go on, new ids still sort after earlier ones, deadlines come when the clock says so."""
    w = world(WATCH.replace("wait_for: resolved", "wait_for: resolved, timeout: 1m"))
    await w.engine.start()
    await w.post(w.alert("Hot", node="n1"))
    w.clock.set_back(timedelta(seconds=back))
    later = await w.post(w.alert("Hot", node="n2"))
    assert [run.decision for run in later.runs] == [Decision.STARTED]
    assert later.runs[0].run_id == max(run.id for run in await w.runs())
    await w.restart(after=1)
    await w.pass_time(back + 70)
    assert [run.status for run in await w.runs()] == [Status.FAILED, Status.FAILED]
    assert w.calls() == {"cap": 2}
