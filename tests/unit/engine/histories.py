"""Random histories: playbooks, what happens over time, and receivers that remember; and living through one.

A history is plain data, drawn by Hypothesis, so that one that breaks a promise shrinks to a small
example. `live` plays it on the real engine in virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from itertools import accumulate
from typing import Any, Literal, TypeVar

from hypothesis import strategies as st

from tests.unit.engine.world import Scripted, World
from trainmedic_server import errors
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.domain.alert import BY_HAND, Alert, Identity
from trainmedic_server.domain.pause import PauseOrder, Scope
from trainmedic_server.domain.playbook import TargetParts, UndoTrigger
from trainmedic_server.domain.run import OrderKind, UndoStatus
from trainmedic_server.domain.target import Target, TargetKind
from trainmedic_server.engine.admission_changes import ByHand
from trainmedic_server.engine.by_hand import StartOrder
from trainmedic_server.ports.actions import Call
from trainmedic_server.ports.store import Transaction
from trainmedic_server.simulation import virtual_time

ALERTS = ("Hot", "Slow")
PLACES = (("n1", "0"), ("n1", "1"), ("n2", "0"))
GAPS = (0, 1, 1, 3, 10, 10, 45, 130, 400)
"""Seconds between one deed and the next: most come while what the last one began is still going on."""

ACTION_SECONDS = 20
"""The timeout of each action."""

T = TypeVar("T")
Fate = Literal["applied", "failed", "rejected", "lost"]

# --- playbooks ------------------------------------------------------------------------------------

_GPU = '{gpu: "{{ labels.gpu }}", node: "{{ labels.node }}"}'
_TARGETS = ("node", "node", _GPU, _GPU, "cluster")
_GUARDS = ("", "", "", "", "cooldown: 3m", "max_concurrent: 1", "max_runs: {count: 2, per: 10m}")
_MODES = ("enforce", "enforce", "enforce", "enforce", "approve", "observe")


@st.composite
def _steps(draw: st.DrawFn, phase: str, most: int) -> list[str]:
    return [f"  - {{id: {phase}{index}, {draw(_step(index))}}}" for index in range(draw(st.integers(1, most)))]


@st.composite
def _step(draw: st.DrawFn, index: int) -> str:
    kind = draw(st.sampled_from(("action", "action", "action", "wait", "approve")))
    goes_on = draw(st.sampled_from(("fail", "continue")))
    if kind == "wait":
        timeout = draw(st.sampled_from(("", ", timeout: 50s", ", timeout: 7m")))
        return f"wait_for: resolved{timeout}, on_timeout: {goes_on}"
    if kind == "approve":
        return f"approve: 'go on?', timeout: {draw(st.sampled_from(('40s', '9m')))}, on_timeout: {goes_on}"
    action = draw(st.sampled_from(("cap", "cap", "other", "look", "tell")))
    text = f"action: test.{action}, timeout: {ACTION_SECONDS}s, on_error: {goes_on}"
    if action == "cap":
        text += f", undo: {draw(st.sampled_from(('never', 'on_resolve', 'on_resolve', 'on_failure')))}"
    if draw(st.booleans()):
        text += ", retry: {attempts: 3, delay: 4s}"
    if index and draw(st.integers(0, 4)) == 0:
        text += ", when: 'steps | length > 1'"
    return text


@st.composite
def _playbook(draw: st.DrawFn, name: str) -> str:
    alerts = draw(st.sampled_from(("[Hot]", "[Hot, Slow]", "[Slow]")))
    lines = [
        f"playbook: {name}",
        f"on: {{alert: {alerts}}}",
        f"target: {draw(st.sampled_from(_TARGETS))}",
        f"mode: {draw(st.sampled_from(_MODES))}",
        f"guards: {{{draw(st.sampled_from(_GUARDS))}}}",
        "steps:",
        *draw(_steps("s", 4)),
    ]
    if draw(st.booleans()):
        lines += ["on_failure:", *draw(_steps("f", 2))]
    return "\n".join(lines)


# --- what happens ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fire:
    """The alert fires; if it fires already, it is reported again."""

    alert: str
    place: tuple[str, str]


@dataclass(frozen=True)
class Resolve:
    """The alert resolves, if it fires."""

    alert: str
    place: tuple[str, str]


@dataclass(frozen=True)
class Say:
    """An order to one of the runs that there are, if it takes it."""

    kind: OrderKind
    which: int


@dataclass(frozen=True)
class Switch:
    """Pause, resume or close_breaker."""

    name: str


@dataclass(frozen=True)
class Kill:
    """The server is killed where it stands, and another one started some seconds later."""

    down: int = 0


@dataclass(frozen=True)
class Start:
    """A person has a playbook run at this place, and asks twice."""

    which: int
    place: tuple[str, str]


@dataclass(frozen=True)
class Again:
    """A person wants one of the runs that there are to be tried again."""

    which: int


@dataclass(frozen=True)
class Hold:
    """A person pauses a node for so many seconds."""

    node: str
    seconds: int


Deed = Fire | Resolve | Say | Switch | Kill | Start | Again | Hold

_places = {"alert": st.sampled_from(ALERTS), "place": st.sampled_from(PLACES)}
_fires = st.builds(Fire, **_places)
_resolves = st.builds(Resolve, **_places)
_orders = st.builds(Say, st.sampled_from((*OrderKind, OrderKind.APPROVE)), st.integers(0, 5))
_switches = st.builds(Switch, st.sampled_from(("pause", "pause", "resume", "resume", "resume", "close_breaker")))
_people = st.one_of(
    st.builds(Start, st.integers(0, 2), st.sampled_from(PLACES)),
    st.builds(Again, st.integers(0, 5)),
    st.builds(Hold, st.sampled_from(("n1", "n2", "n*")), st.sampled_from((30, 300))),
)
_kills = st.builds(Kill, st.sampled_from((0, 0, 7, 60, 1200)))


@dataclass(frozen=True)
class History:
    """What is drawn. ``fates`` says by turns what becomes of a new command, ``seed`` for whom and how soon."""

    playbooks: tuple[str, ...]
    deeds: tuple[tuple[int, Deed], ...]
    fates: tuple[Fate, ...]
    seed: int
    breaker: bool
    slow_store: bool

    @property
    def length(self) -> int:
        """Seconds from its first deed to its last."""
        return self.deeds[-1][0]

    def told(self) -> str:
        """For whoever has to find out what went wrong in it."""
        books = "\n---\n".join(self.playbooks)
        deeds = "\n".join(f"{at:5} {deed}" for at, deed in self.deeds)
        return f"History(\n{books}\n\n{deeds}\n{self.fates=} {self.seed=} {self.breaker=} {self.slow_store=})"


@st.composite
def histories(draw: st.DrawFn, *, kills: bool, surprises: bool) -> History:
    """`surprises`: replies are lost, and commits take a moment in which something else can happen."""
    fates: tuple[Fate, ...] = ("applied", "failed", "rejected", *(("lost",) if surprises else ()))
    names = [f"p{number}" for number in range(draw(st.integers(1, 3)))]
    deeds = [_fires, _fires, _resolves, _orders, _switches, _people, *([_kills] if kills else [])]
    gaps = draw(st.lists(st.sampled_from(GAPS), min_size=2, max_size=14))
    first = draw(_fires)
    rest = [(moment, draw(st.one_of(deeds))) for moment in accumulate(gaps)]
    return History(
        playbooks=tuple(draw(_playbook(name)) for name in names),
        deeds=((0, first), *rest),
        fates=("applied", draw(st.sampled_from(fates)), draw(st.sampled_from(fates))),
        seed=draw(st.integers(0, 1000)),
        breaker=draw(st.integers(0, 3)) == 0,
        slow_store=surprises and draw(st.booleans()),
    )


# --- receivers ------------------------------------------------------------------------------------


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
