"""What holds in any history: any playbooks, alerts, orders, failures and kills, in any order."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.unit.engine.histories import ACTION_SECONDS, History, Say, Start, Switch, histories
from tests.unit.engine.lives import Life, live, world_of
from tests.unit.engine.world import World
from trainmedic_server.domain.alert import decisive
from trainmedic_server.domain.playbook import UndoTrigger
from trainmedic_server.domain.run import OrderKind, Run, Status, StepState, StepStatus, UndoStatus
from trainmedic_server.engine import step_sequence
from trainmedic_server.ports.store import RunRecord
from trainmedic_server.simulation import virtual_time

UNSUCCESSFUL = (Status.FAILED, Status.REJECTED, Status.CANCELLED)
MANY = settings(deadline=None, max_examples=examples(15))


def lived(history: History, kills_at: list[int] | None = None) -> dict[str, Any]:
    """Live through the history in a world of its own; what is found there at the end."""

    async def whole() -> dict[str, Any]:
        world = world_of(history)
        try:
            life = await live(world, history, kills_at or ())
            return {"life": life, "runs": await world.runs(), "broken": [*life.receivers.broken, *await wrongs(life)]}
        finally:
            await world.engine.stop()
            await asyncio.sleep(0)

    return virtual_time.run(whole())


async def wrongs(life: Life) -> list[str]:
    """Every promise that the world as it is in the end does not keep."""
    world = life.world
    runs = await world.runs()
    found = [wrong for run in runs for wrong in of_run(run, life)]
    for run in runs:
        record = await world.store.record(run.id)
        assert record is not None
        kinds = Counter(event.kind for event in record.events)
        if run.steps and run.status is not Status.OBSERVED and kinds["closed"] != 1:
            found.append(f"the story of {run.id} tells {kinds['closed']} times that it closed")
        found += [wrong for step in run.steps for wrong in of_undo(step, record)]
        found += behind_closed_gates(run, world)
        if record.events[0].kind not in ("started", str(run.decision)):
            found.append(f"the story of {run.id} begins with {record.events[0].kind}")
    linked = await world.store.transact(lambda tx: tx.linked_runs(list(life.names)))
    for identity, name in life.names.items():
        wanted = {book.definition.name for book in world.catalog.for_alert(name)}
        decided = {run.playbook for run in linked.get(identity, ())}
        if decided != wanted:
            found.append(f"{identity.fingerprint}: {wanted} had to decide, {decided} did")
    for metric in ("trainmedic_open_runs", "trainmedic_undos_owed", "trainmedic_loop_errors_total"):
        samples = [s.value for m in world.metrics.registry.collect() for s in m.samples if s.name == metric]
        if any(samples):
            found.append(f"{metric} is {samples}")
    return found


def of_run(run: Run, life: Life) -> list[str]:
    found = []
    if run.is_open:
        found.append(f"{run.playbook} for {run.target} is {run.status} for ever, waiting for {run.waiting_on}")
    if run.owes_undo:
        found.append(f"{run.playbook} for {run.target} owes an undo for ever")
    applied = life.receivers.applied
    for step in run.steps:
        effects = {attempt.command_id for attempt in step.attempts} & applied.keys()
        undone = {attempt.command_id for attempt in step.undo_attempts} & applied.keys()
        if len(effects) > 1 or len(undone) > 1:
            found.append(f"step {step.id} had {len(effects)} effects, and {len(undone)} were taken back")
        if step.undo is None or step.undo.trigger is UndoTrigger.NEVER or not effects:
            continue
        due = step.undo.trigger is UndoTrigger.ON_RESOLVE or run.status in UNSUCCESSFUL
        if step.undo.status is UndoStatus.CLOSED and not undone:
            continue  # a person has ended the duty
        if due and (step.undo.status is not UndoStatus.DONE or len(undone) != 1):
            found.append(f"step {step.id} was applied, and its undo is {step.undo.status}")
        if due and step.undo.undo_of not in effects:
            found.append(f"the undo of step {step.id} takes back something else")
    return found


def of_undo(step: StepState, record: RunRecord) -> Iterator[str]:
    """Nothing is given back before the last alert of the run has resolved, those that have joined included.

    Another may join after that, where pause holds the run back in the middle.
    """
    if step.undo and step.undo.attempts and (step.undo.because or "").startswith("resolved"):
        begun = [event.kind == "undo_started" and event.data["step"] == step.id for event in record.events].index(True)
        joined = sum(event.kind == "joined" for event in record.events[:begun])
        ends = [alert.resolved_at for alert in decisive(record.alerts[: 1 + joined])]
        if any(end is None or end > step.undo.attempts[0].started_at for end in ends):
            yield f"step {step.id} was taken back while an alert of its run still fired"


def behind_closed_gates(run: Run, world: World) -> Iterator[str]:
    """What stands behind a refused approval, or a wait that failed, was not begun."""
    book = world.catalog.get(run.playbook)
    assert book is not None
    shut: set[str] = set()
    for step in run.steps:
        if step.phase in shut and step.attempts:
            yield f"step {step.id} was begun though the gate before it stayed shut"
        if step.kind != "action" and step_sequence.is_fatal(step, step_sequence.step_definition(book, step)):
            shut.add(step.phase)


def outcome(runs: list[Run]) -> list[dict[str, Any]]:
    """What must be the same with and without kills: everything but times and ids."""
    return [
        {
            "playbook": run.playbook,
            "target": run.target and run.target.key,
            "status": str(run.status),
            "decision": str(run.decision),
            "steps": [(step.id, str(step.status), len(step.attempts)) for step in run.steps],
            "undo": [step.undo and (str(step.undo.status), step.undo.because) for step in run.steps],
        }
        for run in runs
    ]


def lost_to_a_pause(run: Run) -> bool:
    return any(
        step.status is StepStatus.UNKNOWN and "the server was paused" in (step.error or "") for step in run.steps
    )


def kills_a_paused_server(history: History, kills_at: list[int]) -> bool:
    """Whether a kill comes while a command that was sent before a pause may still be in flight.

    The next server sends it again only after the pause; so what waits for its target may find its alert resolved.
    """
    switches = [(at, deed.name) for at, deed in history.deeds if isinstance(deed, Switch)]
    paused = [at for at, name in switches if name == "pause"]
    return any(0 <= kill - at <= ACTION_SECONDS for kill in kills_at for at in paused)


_ASKS_BY_HAND = History(
    playbooks=(
        """
playbook: p0
on: {alert: [Hot]}
target: node
mode: approve
steps:
  - {id: s0, action: test.cap, timeout: 20s, undo: on_resolve}
""",
    ),
    deeds=((0, Start(0, ("n1", "0"))), (1, Say(OrderKind.APPROVE, 0)), (2, Start(0, ("n2", "0")))),
    fates=("applied", "applied", "applied"),
    seed=0,
    breaker=False,
    slow_store=False,
)
"""Of two runs by hand one has given nothing back, and one waits for an answer, until a person ends them."""


@MANY
@example(_ASKS_BY_HAND)
@given(histories(kills=True, surprises=True))
def test_whatever_happens_every_promise_is_kept(history: History) -> None:
    """No effect twice, one change at a time, no harm while paused, every undo once, nothing open for ever."""
    broken = lived(history)["broken"]
    assert broken == [], history.told()


@MANY
@given(histories(kills=False, surprises=False), st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_kills_at_any_moment_change_nothing_of_the_outcome(history: History, kills_at: list[float]) -> None:
    """With a start right after each, the history ends as it would have without them.

    But where a server is killed and paused at once, it may not ask again what became of a command in flight.
    """
    kills = [int(part * (history.length + 60)) for part in kills_at]
    whole, killed = lived(history), lived(history, kills)
    assert killed["broken"] == []
    if not kills_a_paused_server(history, kills) and not any(lost_to_a_pause(run) for run in killed["runs"]):
        assert outcome(killed["runs"]) == outcome(whole["runs"]), history.told()
