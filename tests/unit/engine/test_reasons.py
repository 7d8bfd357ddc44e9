"""A run that fails has a reason, whatever an action says."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.engine.world import World
from trainmedic_server import errors
from trainmedic_server.domain.run import Attempt, Status, StepState, StepStatus

MakeWorld = Callable[..., World]
ACTS = """
playbook: acts
on: {alert: Hot}
target: node
steps:
  - {id: act, action: test.cap, timeout: 20s, undo: on_resolve}
"""
WAITS = """
playbook: waits
on: {alert: Hot}
target: node
steps:
  - {id: act, STEP}
"""
SILENT: tuple[Any, ...] = (
    *("hang", RuntimeError(), TimeoutError()),
    *(kind(text) for kind in (errors.TemporaryFailure, errors.PermanentFailure) for text in ("", " \n")),
    *(errors.OutcomeUnknown(""), errors.EffectDisproved("")),
)


@pytest.mark.parametrize("outcome", SILENT, ids=lambda each: f"{type(each).__name__} {each!s:.9}")
async def test_an_action_without_words_gives_a_reason(world: MakeWorld, outcome: Any) -> None:
    """After a restart of the server too."""
    w = world(ACTS)
    w.actions["cap"].outcomes += [outcome] * 10
    await w.post(w.alert(node="n1"))
    await w.pass_time(600)
    await w.restart(after=60)
    await w.pass_time(600)
    run = await w.run()
    assert run.status is Status.FAILED
    assert run.message.startswith("step act: ")
    assert len(run.message.removeprefix("step act: ").split()) >= 3, run.message
    assert "None" not in run.message


@pytest.mark.parametrize(
    "step",
    [
        "wait_for: resolved, timeout: 5m",
        "approve: Do it?, timeout: 5m, on_timeout: fail",
        "wait_for: {action: test.look, until: 'output.value > 5', every: 10s}, timeout: 5m",
        "wait: '{{ labels.none }}'",
        "action: test.cap, with: {amount: '{{ labels.none }}'}",
    ],
)
async def test_a_step_that_ends_a_run_gives_a_reason(world: MakeWorld, step: str) -> None:
    """By its time limit, or because it cannot be rendered."""
    w = world(WAITS.replace("STEP", step))
    await w.post(w.alert(node="n1"))
    await w.pass_time(1200)
    run = await w.run()
    assert run.status is Status.FAILED, run
    assert len(run.message.split()) >= 4, run.message
    assert "None" not in run.message


@pytest.mark.parametrize(("status", "kind"), list(itertools.product(StepStatus, ("action", "approve", "wait_for"))))
def test_every_step_state_has_a_reason(status: StepStatus, kind: str) -> None:
    """Its own error, else its message, else its last attempt's; a question is none."""
    attempt = Attempt(1, "id", None, None, status="failed", error="busy")  # type: ignore[arg-type]
    for error, message, attempts in itertools.product((None, "", " ", "e"), (None, "", "m"), ((), (attempt,))):
        state = StepState("steps", 0, "a", kind, status=status, error=error, message=message, attempts=attempts)
        if error == "e":
            expected = "e"
        elif message == "m" and kind != "approve":
            expected = "m"
        else:
            expected = "busy" if attempts else f"it ended as {status.replace('_', ' ')} without a reason"
        assert state.why_not == expected
