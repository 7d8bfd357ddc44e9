"""Living through a random history: the real engine in virtual time, before receivers that remember."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from tests.unit.engine.histories import (
    ALERTS,
    Again,
    Deed,
    Fate,
    Fire,
    History,
    Hold,
    Kill,
    Resolve,
    Say,
    Start,
    Switch,
)
from tests.unit.engine.world import Scripted, World
from trainmedic_core.target import Target, TargetKind
from trainmedic_server import errors
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.domain.alert import BY_HAND, Alert, Identity, decisive
from trainmedic_server.domain.pause import PauseOrder, Scope
from trainmedic_server.domain.playbook import TargetParts, UndoTrigger
from trainmedic_server.domain.run import OrderKind, StepStatus, UndoStatus
from trainmedic_server.engine.admission_changes import ByHand
from trainmedic_server.engine.manual_runs import StartOrder
from trainmedic_server.ports.actions import Call
from trainmedic_server.ports.store import Transaction
from trainmedic_server.simulation import virtual_time

T = TypeVar("T")


@dataclass
class Receivers:
    """Agents and jobs: they remember each command, do it once, and answer alike whenever they are asked again.

    A reply that is lost once is there when it is asked for again. ``broken`` is what calls did that
    none may do.
    """

    world: World
    history: History
    fates: dict[str, tuple[Fate, datetime]] = field(default_factory=dict)
    applied: dict[str, Call] = field(default_factory=dict)
    acting: list[Target] = field(default_factory=list)
    begun: dict[tuple[str, str], int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    async def perform(self, action: Scripted, call: Call) -> Mapping[str, Any]:
        self.broken.extend([wrong async for wrong in self._what_it_breaks(action, call)])
        self.acting.append(call.target)
        try:
            return await self._answer(action, call)
        finally:
            self.acting.remove(call.target)

    async def _what_it_breaks(self, action: Scripted, call: Call) -> AsyncIterator[str]:
        if action.harmful and call.undo_of is None and self.world.engine.controls.paused:
            yield f"{action.name} was begun while paused"
        if call.command_id in self.fates and not call.resumed:
            yield "a command was sent again as if it were new"
        if call.deadline <= self.world.clock.now():
            yield "a command was sent that had run out"
        run = next(iter(await self.world.store.transact(lambda tx: tx.runs([call.run_id]))))
        controls = self.world.engine.controls
        begins = action.harmful and call.undo_of is None and run.acted_at == call.issued_at
        if begins and controls.breaker_opened_at is not None and call.issued_at > controls.breaker_opened_at:
            yield "a run began to act once the breaker was open"
        if action.harmful and call.undo_of is None and not call.resumed and not self.history.slow_store:
            records = (await self.world.store.transact(lambda tx: tx.alerts_of([call.run_id])))[call.run_id]
            awaited = any(step.kind == "wait_for" and step.status is StepStatus.SUCCEEDED for step in run.steps)
            if all(record.is_resolved for record in decisive(records)) and not awaited:
                yield f"{action.name} was begun after its alert had resolved"
        for target in self.acting:
            if target.overlaps(call.target):
                yield f"{target.key} and {call.target.key} were acted on at once"

    async def _answer(self, action: Scripted, call: Call) -> Mapping[str, Any]:
        clock = self.world.clock
        known = self.fates.get(call.command_id)
        if known is None:
            known = self.fates[call.command_id] = self._decide(call, action)
            if known[0] in ("applied", "lost"):
                self.applied[call.command_id] = call
            if known[0] == "lost":
                await asyncio.Event().wait()
        fate, ready_at = known
        await clock.sleep_until(ready_at)
        if fate == "failed":
            raise errors.TemporaryFailure("failed")
        if fate == "rejected":
            raise errors.PermanentFailure("rejected")
        return {"done": True}

    def _decide(self, call: Call, action: Scripted) -> tuple[Fate, datetime]:
        """What becomes of a new command: by who asks for what the how-manieth time, not by its random id."""
        about = (f"{call.playbook} {call.target.key}", f"{action.name} {call.params} {call.undo_of is not None}")
        count = self.begun[about] = self.begun.get(about, 0) + 1
        digest = hashlib.sha256(f"{self.history.seed} {about} {count}".encode()).digest()
        fate = self.history.fates[digest[0] % len(self.history.fates)]
        if call.undo_of is not None and fate == "rejected":
            fate = "failed"  # a refused undo waits for a person, which is another test's matter
        seconds = digest[1] % 16 + digest[2] / 256 + 0.01
        return fate, self.world.clock.now() + timedelta(seconds=seconds)


# --- living through one ---------------------------------------------------------------------------


class SlowStore(InMemoryStore):
    """Each unit of work takes a moment, as a commit to a disk does."""

    def __init__(self) -> None:
        super().__init__()
        self._units = 0

    async def transact(self, work: Callable[[Transaction], T]) -> T:
        self._units += 1
        await asyncio.sleep(0.001 + self._units % 3 * 0.002)
        done = await super().transact(work)
        await asyncio.sleep(0.001)
        return done


def world_of(history: History) -> World:
    """The world in which the history takes place."""
    store = SlowStore() if history.slow_store else InMemoryStore()
    breaker = {"breaker_min_nodes": 1, "breaker_share": 0.5} if history.breaker else {}
    return World(*history.playbooks, store=store, assume_resolved_after=timedelta(days=30), **breaker)


@dataclass
class Life:
    """A history that has been lived through: the world as it is then, and every alert that was reported."""

    world: World
    receivers: Receivers
    firing: dict[tuple[str, tuple[str, str]], Alert] = field(default_factory=dict)
    names: dict[Identity, str] = field(default_factory=dict)

    async def do(self, deed: Deed) -> None:
        match deed:
            case Fire(name, place):
                alert = self.firing.get((name, place)) or self.world.alert(name, node=place[0], gpu=place[1])
                self.firing[name, place] = alert
                self.names[alert.identity] = name
                await self._post_as_explained(alert)
            case Resolve(name, place):
                if (name, place) in self.firing:
                    await self.world.resolve(self.firing.pop((name, place)))
            case Say(kind, which):
                await self._order(kind, which)
            case Switch("pause"):
                await self.world.engine.pause("alice")
            case Switch("resume"):
                await self.world.engine.resume("alice")
            case Switch():
                await self.world.engine.close_breaker("alice")
            case Start(which, place):
                await self._start(which, place)
            case Again(which):
                await self._retry(which)
            case Hold(node, seconds):
                await self.world.engine.pause("bob", PauseOrder(Scope(node=node), length=timedelta(seconds=seconds)))
            case Kill(down):
                await self.world.restart(after=down)
        await self.world.pass_time(0.1)
        await self._look_for_undo_held_back()

    async def _look_for_undo_held_back(self) -> None:
        """Whatever the switches say: of an alert that has resolved, each undo has been begun."""
        for run in await self.world.runs():
            if any(step.undo and step.undo.status is UndoStatus.RUNNING for step in run.steps):
                continue  # one after the other
            record = await self.world.store.record(run.id)
            assert record is not None
            if not all(alert.is_resolved for alert in record.alerts):
                continue
            if run.is_open and run.waiting_on != "resume":
                continue
            for step in run.steps:
                if all(attempt.status in ("failed", "rejected") for attempt in step.attempts):
                    continue  # there is nothing to take back, at least not yet
                if step.undo and step.undo.trigger is UndoTrigger.ON_RESOLVE and step.undo.status is UndoStatus.ARMED:
                    self.receivers.broken.append(f"the undo of {run.playbook}.{step.id} is held back")

    async def _post_as_explained(self, alert: Alert) -> None:
        """What the server says that it would do changes nothing, and is what it then does."""
        before = await self.world.store.last_seq()
        (explained,) = await self.world.engine.explain([alert])
        after = await self.world.store.last_seq()
        admitted = await self.world.post(alert)
        if self.receivers.history.slow_store:
            return  # runs go on in the time that each question takes
        if after != before:
            self.receivers.broken.append("something has changed by explaining")
        would = {each.playbook: str(each.decision) for each in explained.playbooks if each.decision is not None}
        did = {each.playbook: str(each.decision) for each in admitted.runs}
        if would != did:
            self.receivers.broken.append(f"it was to be {would}, and is {did}")

    async def _start(self, which: int, place: tuple[str, str]) -> None:
        books = [book for name in ALERTS for book in self.world.catalog.for_alert(name)]
        book = sorted(books, key=lambda each: each.definition.name)[which % len(books)].definition
        kind = book.target.kind if isinstance(book.target, TargetParts) else book.target
        node, gpu = place[0] if kind is not TargetKind.CLUSTER else None, place[1] if kind is TargetKind.GPU else None
        wanted = StartOrder(book.name, Target(kind, node=node, gpu=gpu))
        by = ByHand("carol", key=f"{self.world.clock.now()}")
        with contextlib.suppress(errors.Conflict):  # one is open
            first = await self.world.engine.start_run(wanted, by)
            if (await self.world.engine.start_run(wanted, by)).run.id != first.run.id:
                self.receivers.broken.append("one request has started two runs")

    async def _retry(self, which: int) -> None:
        runs = await self.world.runs()
        if runs:
            run_id = runs[which % len(runs)].id
            with contextlib.suppress(errors.Conflict):  # it is open, has succeeded, or its alert has resolved
                await self.world.engine.retry(run_id, ByHand("carol", repeats=run_id))

    async def _order(self, kind: OrderKind, which: int) -> None:
        runs = [run for run in await self.world.runs() if run.steps]
        if not runs:
            return
        with contextlib.suppress(errors.Conflict):  # the run is in no state for it
            await self.world.engine.order(runs[which % len(runs)].id, kind, "alice")

    async def end(self) -> None:
        """Everything resolves, nobody pauses any more, and enough time passes for whatever is still to come."""
        await self.do(Switch("resume"))
        for alert in list(self.firing.values()):
            await self.world.resolve(alert)
        self.firing.clear()
        await self.world.pass_time(7200)
        for run in await self.world.runs():
            if run.alert.fingerprint.startswith(BY_HAND):  # which nothing resolves but a person
                for kind in (OrderKind.CANCEL, OrderKind.UNDO):
                    with contextlib.suppress(errors.Conflict):  # it is closed, or owes nothing
                        await self.world.engine.order(run.id, kind, "alice")
        await self.world.pass_time(7200)


async def live(world: World, history: History, kills_at: Sequence[int] = ()) -> Life:
    """Play the history, with further kills at these seconds; then let everything come to its end."""
    receivers = Receivers(world, history)
    for name in world.actions.names():
        action = world.actions[name.removeprefix("test.")]
        setattr(action, "perform", partial(receivers.perform, action))  # noqa: B010 - an instance's own, for this life
    life = Life(world, receivers)
    await world.engine.start()
    kills: list[tuple[float, Deed]] = [(at + 0.5, Kill()) for at in sorted(set(kills_at))]
    for at, deed in sorted([*history.deeds, *kills], key=lambda entry: entry[0]):
        await _until(world, at)
        await life.do(deed)
    await _until(world, history.length + 100)
    await life.end()
    return life


async def _until(world: World, seconds: float) -> None:
    now = (world.clock.now() - virtual_time.BEGINNING).total_seconds()
    await world.pass_time(max(seconds - now, 0))
