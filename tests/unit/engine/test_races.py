"""Things that happen at the same moment: none of them may be lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

from tests.unit.engine.books import CAP
from tests.unit.engine.held_commits import hold_next
from tests.unit.engine.test_runs import RETRYING
from tests.unit.engine.world import Source, World
from trainmedic_server import errors
from trainmedic_server.domain.alert import Identity
from trainmedic_server.domain.run import Decision, OrderKind, Status, StepStatus, UndoStatus
from trainmedic_server.engine.batching import Batcher
from trainmedic_server.engine.workers import Workers

MakeWorld = Callable[..., World]


async def test_a_resolved_that_comes_while_the_driver_ends_is_not_lost(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a driver's last look and the end of its task lies a moment; a touch in it starts another."""
    drive = Workers._drive
    w = world(CAP)
    alert = w.alert(gpu="0", node="n1")
    resolving: list[asyncio.Task[Any]] = []

    async def ends_slowly(self: Workers, driver: Any) -> None:
        await drive(self, driver)
        if not resolving:
            resolving.append(asyncio.create_task(w.resolve(alert)))
            for _ in range(20):
                await asyncio.sleep(0)

    monkeypatch.setattr(Workers, "_drive", ends_slowly)
    await w.post(alert)
    await w.pass_time(1)
    await resolving[0]
    await w.pass_time(1)
    assert w.calls() == {"cap": 1, "uncap": 1}


class SlowSource(Source):
    """Takes its time to answer; meanwhile something else may happen."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.answers = asyncio.Event()

    async def is_firing(self, identity: Identity) -> bool:
        self.asked.set()
        await self.answers.wait()
        return True


async def test_a_resolved_that_comes_while_the_alertmanager_is_asked_stays(world: MakeWorld) -> None:
    """The answer "still firing" is older than the resolved, and must not overwrite it."""
    source = SlowSource()
    w = world(CAP, source=source)
    await w.engine.start()
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    async with asyncio.timeout(3600):
        await source.asked.wait()
    await w.resolve(alert)
    source.answers.set()
    await w.pass_time(1)
    kept = await w.store.transact(lambda tx: tx.alerts([alert.identity])[alert.identity])
    assert (kept.is_resolved, kept.resolved_because) == (True, "alertmanager")
    assert w.calls() == {"cap": 1, "uncap": 1}


async def test_an_undo_in_flight_is_not_given_up_for_a_long_downtime(world: MakeWorld) -> None:
    """A day without success ends an undo; a day without a server does not, for nobody was trying."""
    w = world(CAP)
    await w.engine.start()
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    w.actions["uncap"].outcomes += ["hang", errors.TemporaryFailure("Redis is away")]
    await w.resolve(alert)
    await w.restart(after=3 * 24 * 3600)
    await w.pass_time(600)
    undo = (await w.run()).steps[0].undo
    assert undo is not None
    assert undo.status is UndoStatus.DONE
    last = w.actions["uncap"].calls[1]
    assert last.deadline > last.issued_at + timedelta(days=3), "the attempt after the restart has time to act"


async def test_an_attempt_in_flight_when_a_run_goes_stale_is_reported_as_unknown(world: MakeWorld) -> None:
    """It may have been applied; the record does not say that it was called off."""
    w = world(RETRYING)
    await w.engine.start()
    w.actions["cap"].outcomes.append("hang")
    await w.post(w.alert(node="n1"))
    await w.restart(after=3600)
    run = await w.run()
    assert (run.status, run.decision) == (Status.CANCELLED, Decision.STALE)
    assert run.steps[0].status is StepStatus.UNKNOWN
    assert run.steps[0].error is not None
    assert run.steps[0].attempts[-1].status == "unknown"


async def test_what_cannot_be_handled_fails_alone() -> None:
    """One entry that the store refuses does not fail those that came at the same moment."""
    batches: list[list[str]] = []

    async def handle(entries: Sequence[str]) -> list[str]:
        batches.append(list(entries))
        if "poison" in entries:
            raise ValueError("not text")
        return [entry.upper() for entry in entries]

    batcher: Batcher[str, str] = Batcher(handle, most=10)
    asked = [batcher.ask(entry) for entry in ("a", "poison", "b")]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert answers[0] == "A"
    assert isinstance(answers[1], ValueError)
    assert answers[2] == "B"
    assert batches == [["a", "poison", "b"], ["a"], ["poison"], ["b"]]


async def test_an_outage_fails_the_batch_at_once() -> None:
    """To try each entry alone would only hold everybody up longer."""
    calls = 0

    async def handle(entries: Sequence[str]) -> list[str]:
        nonlocal calls
        calls += 1
        raise errors.StoreUnavailable("locked")

    batcher: Batcher[str, str] = Batcher(handle, most=10)
    answers = await asyncio.gather(*(batcher.ask(entry) for entry in "abc"), return_exceptions=True)
    assert [type(answer) for answer in answers] == [errors.StoreUnavailable] * 3
    assert calls == 1


@pytest.mark.parametrize("last", [errors.PermanentFailure("no"), errors.TemporaryFailure("busy")])
async def test_a_failure_after_an_unknown_outcome_does_not_prove_that_nothing_was_applied(
    world: MakeWorld, last: Exception
) -> None:
    """The first attempt may have been: the step is unknown, and its undo is carried out."""
    w = world(RETRYING)
    w.actions["cap"].outcomes += [errors.OutcomeUnknown("no reply"), last, last]
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.pass_time(60)
    assert (await w.run()).steps[0].status is StepStatus.UNKNOWN
    await w.resolve(alert)
    assert w.calls()["uncap"] == 1


@pytest.mark.parametrize("last", ["cancelled", "paused", "failed in part"])
async def test_the_undo_is_of_the_attempt_that_may_have_been_made(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """Not of a later one, which has another id and was certainly not: of that nothing is left to take back. It is so
    however the step ends: by an order, with a pause before its next attempt, or by a failure."""
    w = world(RETRYING.replace("attempts: 3", f"attempts: {2 if last == 'failed in part' else 4}"))
    if last == "failed in part":
        in_part = errors.TemporaryFailure("half of it was done")
        in_part.is_begun = True
        w.actions["cap"].outcomes += [in_part, errors.TemporaryFailure("busy")]
    else:
        busy = errors.TemporaryFailure("busy")
        w.actions["cap"].outcomes += [errors.OutcomeUnknown("no reply"), busy, busy, busy]
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.pass_time(7)
    run = await w.run()
    first, *_, other = [attempt.command_id for attempt in run.steps[0].attempts]
    assert first != other
    if last == "paused":
        (commit,) = hold_next(w, monkeypatch)
        await commit.is_durable.wait()
        await w.engine.pause("alice")
        commit.is_known.set()
        await w.pass_time(0)
    if last != "failed in part":
        await w.engine.order(run.id, OrderKind.CANCEL, "bob")
    await w.resolve(alert)
    assert [call.undo_of for call in w.actions["uncap"].calls] == [first]
