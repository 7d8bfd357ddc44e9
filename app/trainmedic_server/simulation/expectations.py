"""Comparison of a test's expectations with the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from trainmedic_core.problems import DocumentPath
from trainmedic_logs.simulation.log_expectations import Difference, contains, count, equal, says, shown
from trainmedic_server.domain.admission import PlaybookDecision
from trainmedic_server.domain.group_counts import GroupCounts
from trainmedic_server.domain.run import Controls, Status, StepState, Undo
from trainmedic_server.ports.store import RunRecord
from trainmedic_server.simulation.scripted import RecordedCall
from trainmedic_server.simulation.suite_format import Check, GroupExpected, RunExpected, StepExpected, UndoExpected


class Observations(Struct, frozen=True):
    """Everything up to a check, in order. ``unmatched``: why playbooks did not react to an alert."""

    decisions: Sequence[PlaybookDecision]
    runs: Sequence[RunRecord]
    calls: Sequence[RecordedCall]
    controls: Controls
    unmatched: Sequence[str] = ()


def differences(check: Check, observed: Observations) -> Iterator[Difference]:
    if check.decisions is not None:
        made = [f"{decision.playbook} {decision.target or '-'}: {decision.decision}" for decision in observed.decisions]
        yield from count(("decisions",), len(check.decisions), made, observed.unmatched)
        for index, (expected, got) in enumerate(zip(check.decisions, observed.decisions, strict=False)):
            path: DocumentPath = ("decisions", index)
            yield from equal((*path, "playbook"), expected.playbook, got.playbook)
            yield from equal((*path, "target"), expected.target, got.target)
            yield from equal((*path, "decision"), expected.decision, got.decision)
    if check.runs is not None:
        items = [
            f"{record.run.playbook} {_target(record)}: {record.run.status} ({record.run.decision})"
            for record in observed.runs
        ]
        yield from count(("runs",), len(check.runs), items, observed.unmatched)
        for index, (run, record) in enumerate(zip(check.runs, observed.runs, strict=False)):
            yield from _run(("runs", index), run, record)
    if check.calls is not None:
        done = [f"{call.action}{' (undo)' if call.undo else ''} {shown(call.params)}" for call in observed.calls]
        yield from count(("calls",), len(check.calls), done)
        for index, (expected_call, call) in enumerate(zip(check.calls, observed.calls, strict=False)):
            path = ("calls", index)
            yield from equal((*path, "action"), expected_call.action, call.action)
            yield from equal((*path, "target"), expected_call.target, call.target)
            yield from contains((*path, "params"), expected_call.params, call.params)
            yield from equal((*path, "undo"), expected_call.undo, call.undo)
    yield from equal(("paused",), check.paused, observed.controls.paused)
    yield from equal(("breaker_open",), check.breaker_open, observed.controls.breaker_open)


def failed_runs(observed: Observations, message: str) -> Iterator[str]:
    """Yield failure reasons of runs that `message` does not contain."""
    for record in observed.runs:
        run = record.run
        if run.status is Status.FAILED and run.message not in message:
            yield f"{run.playbook} {_target(record)} failed: {run.message}"


def _run(path: DocumentPath, expected: RunExpected, record: RunRecord) -> Iterator[Difference]:
    run = record.run
    reason = f" ({run.message})" if run.message else ""
    yield from equal((*path, "playbook"), expected.playbook, run.playbook)
    yield from equal((*path, "target"), expected.target, _target(record))
    also = [target.key for target in run.also]
    yield from equal((*path, "also"), None if expected.also is None else list(expected.also), also)
    yield from equal((*path, "decision"), expected.decision, run.decision, reason)
    yield from equal((*path, "status"), expected.status, run.status, reason)
    yield from equal((*path, "mode"), expected.mode, run.mode)
    yield from says((*path, "message"), expected.message, run.message)
    yield from equal((*path, "alerts"), expected.alerts, len(record.alerts))
    if expected.group is not None:
        yield from _group((*path, "group"), expected.group, run.group)
    states = {step.id: step for step in run.steps}
    for step_id, step in expected.steps.items():
        step_path = (*path, "steps", step_id)
        if step_id in states:
            yield from _step(step_path, step, states[step_id])
        else:
            yield Difference(step_path, "a step", f"no step of that id; the run has {', '.join(states) or 'no steps'}")
    if expected.events is not None:
        yield from _in_order((*path, "events"), expected.events, [event.kind for event in record.events])


def _group(path: DocumentPath, expected: GroupExpected, counts: GroupCounts | None) -> Iterator[Difference]:
    if counts is None:
        yield Difference(path, "a group", "a run of one target")
        return
    for name in expected.model_fields_set:
        yield from equal((*path, name), getattr(expected, name), getattr(counts, name))


def _step(path: DocumentPath, expected: StepExpected, state: StepState) -> Iterator[Difference]:
    reason = state.error or state.message
    yield from equal((*path, "status"), expected.status, state.status, f" ({reason})" if reason else "")
    yield from contains((*path, "params"), expected.params, state.params)
    yield from contains((*path, "output"), expected.output, state.output)
    yield from equal((*path, "attempts"), expected.attempts, len(state.attempts))
    yield from says((*path, "error"), expected.error, state.error)
    yield from says((*path, "message"), expected.message, state.message)
    if expected.undo is not None:
        yield from _undo((*path, "undo"), expected.undo, state.undo)


def _undo(path: DocumentPath, expected: UndoExpected, undo: Undo | None) -> Iterator[Difference]:
    if undo is None:
        yield Difference(path, "an undo", "none: the action has not begun, or cannot be undone")
        return
    yield from equal((*path, "status"), expected.status, undo.status, f" ({undo.error})" if undo.error else "")
    yield from equal((*path, "action"), expected.action, undo.action)
    yield from contains((*path, "params"), expected.params, undo.params)


def _in_order(path: DocumentPath, expected: Sequence[str], got: Sequence[str]) -> Iterator[Difference]:
    left = iter(got)
    for index, kind in enumerate(expected):
        if kind not in left:  # consumes the iterator up to the kind
            yield Difference((*path, index), f"{shown(kind)} next", f"the events {', '.join(got)}")
            return


def _target(record: RunRecord) -> str:
    return record.run.target_key
