"""What a run needs can be gone when its server starts again; what it owes is carried out all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.unit.engine.books import CAP, catalog_of
from tests.unit.engine.test_runs import RETRYING, TWO_STAGES
from tests.unit.engine.world import World
from trainmedic_server import errors
from trainmedic_server.domain.run import OrderKind, Status, StepStatus, UndoStatus
from trainmedic_server.ports.playbooks import CompiledPlaybook

MakeWorld = Callable[..., World]


async def test_a_run_whose_playbook_was_deleted_goes_on_with_the_kept_text(world: MakeWorld) -> None:
    """Deleting the file does not stop what it began."""
    w = world(TWO_STAGES)
    alert = w.alert(node="n1")
    await w.post(alert)
    w.catalog = catalog_of([], w.actions)
    await w.restart()
    await w.resolve(alert)
    assert (await w.run()).status is Status.SUCCEEDED
    assert w.calls() == {"cap": 1, "uncap": 1}


async def test_a_run_whose_playbook_cannot_be_read_any_more_closes_and_gives_back(world: MakeWorld) -> None:
    """A newer version may refuse an older text. Nobody knows then how the run went on, but its undo is known."""
    w = world(RETRYING, TWO_STAGES.replace("Hot", "Warm"))
    in_flight, waiting = w.alert("Hot", node="n1"), w.alert("Warm", node="n2")
    w.actions["cap"].outcomes.append("hang")
    await w.post(in_flight)
    await w.post(waiting)
    lose(w)
    await w.restart(after=1)
    for run in await w.runs():
        assert run.status is Status.FAILED
        assert "unreadable" in run.message
        assert run.owes_undo
    assert (await w.runs())[0].steps[0].status is StepStatus.UNKNOWN
    await w.resolve(in_flight)
    await w.resolve(waiting)
    assert w.calls() == {"cap": 2, "uncap": 2}
    assert w.metrics.registry.get_sample_value("trainmedic_open_runs") == 0
    assert w.metrics.registry.get_sample_value("trainmedic_undos_owed") == 0


async def test_a_closed_run_is_undone_though_its_playbook_is_lost(world: MakeWorld) -> None:
    """By its alert's end after a restart, and by hand."""
    w = world(
        CAP, CAP.replace("playbook: cap", "playbook: kept").replace("Hot", "Warm").replace("    undo: on_resolve\n", "")
    )
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    by_hand = (await w.post(w.alert("Warm", gpu="1", node="n1"))).runs[0].run_id
    lose(w)
    await w.restart(after=1)
    await w.resolve(alert)
    await w.engine.order(by_hand, OrderKind.UNDO, "alice")
    await w.pass_time(0)
    assert w.calls() == {"cap": 2, "uncap": 2}


async def test_an_attempt_in_flight_of_an_action_that_is_gone_is_unknown(world: MakeWorld) -> None:
    """It may have been applied, so it is not reported as refused, and its undo is owed."""
    w = world(RETRYING.replace("attempts: 3", "attempts: 1"))
    w.actions["cap"].outcomes.append("hang")
    alert = w.alert(node="n1")
    await w.post(alert)
    w.actions.remove("cap")
    await w.restart(after=1)
    run = await w.run()
    assert (run.status, run.steps[0].status) == (Status.FAILED, StepStatus.UNKNOWN)
    assert "no action 'test.cap'" in run.message
    await w.resolve(alert)
    assert w.calls() == {"uncap": 1}


async def test_an_undo_whose_action_is_gone_is_tried_until_it_is_back(world: MakeWorld) -> None:
    """A server that lacks the action is not an answer of the receiver."""
    w = world(CAP)
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    gone = w.actions.remove("uncap")
    await w.resolve(alert)
    await w.pass_time(60)
    assert (await w.run()).steps[0].undo.status is UndoStatus.RUNNING  # type: ignore[union-attr]
    w.actions.add(gone)
    await w.restart(after=1)
    await w.pass_time(600)
    assert (await w.run()).steps[0].undo.status is UndoStatus.DONE  # type: ignore[union-attr]


async def test_a_step_whose_action_was_removed_before_it_began_fails_and_says_so(world: MakeWorld) -> None:
    """Nothing was done, so nothing is owed for it."""
    w = world(TWO_STAGES)
    alert = w.alert(node="n1")
    await w.post(alert)
    w.actions.remove("cap")
    await w.pass_time(301)
    run = await w.run()
    assert (run.status, run.message) == (Status.FAILED, "step harder: there is no action 'test.cap' in this server")
    assert run.steps[2].undo is None


def lose(w: World) -> None:
    """Neither a loaded playbook nor a stored text can be used any more."""

    def refuse(text: str, source: str) -> CompiledPlaybook:
        raise errors.PlaybookError("unreadable")

    catalog: Any = catalog_of([], w.actions)
    catalog.compile = refuse
    w.catalog = catalog
