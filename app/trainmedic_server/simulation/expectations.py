"""Comparing what a test expects with what the engine did. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from trainmedic_server.catalog.problems import Path
from trainmedic_server.domain.admission import PlaybookDecision
from trainmedic_server.domain.run import Controls, StepState, Undo
from trainmedic_server.ports.store import RunRecord
from trainmedic_server.simulation.scripted import RecordedCall
from trainmedic_server.simulation.suite_format import Check, RunExpected, StepExpected, UndoExpected

_LONGEST = 300


@dataclass(frozen=True, slots=True)
class Observations:
    """Everything that has happened up to a check, in order.

    ``unmatched`` says of alerts that no playbook reacted to why each did not.
    """

    decisions: Sequence[PlaybookDecision]
    runs: Sequence[RunRecord]
    calls: Sequence[RecordedCall]
    controls: Controls
    unmatched: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """One expectation that was not met. ``path`` is within the check."""

    path: Path
    expected: str
    got: str


def differences(check: Check, seen: Observations) -> Iterator[Difference]:
    """Everything in which `seen` is not what `check` expects."""
    if check.decisions is not None:
        made = [f"{each.playbook} {each.target or '-'}: {each.decision}" for each in seen.decisions]
        yield from _count(("decisions",), len(check.decisions), made, seen.unmatched)
        for index, (wanted, got) in enumerate(zip(check.decisions, seen.decisions, strict=False)):
            path: Path = ("decisions", index)
            yield from _equal((*path, "playbook"), wanted.playbook, got.playbook)
            yield from _equal((*path, "target"), wanted.target, got.target)
            yield from _equal((*path, "decision"), wanted.decision, got.decision)
    if check.runs is not None:
        items = [f"{each.run.playbook} {_target(each)}: {each.run.status} ({each.run.decision})" for each in seen.runs]
        yield from _count(("runs",), len(check.runs), items, seen.unmatched)
        for index, (run, record) in enumerate(zip(check.runs, seen.runs, strict=False)):
            yield from _run(("runs", index), run, record)
    if check.calls is not None:
        done = [f"{each.action}{' (undo)' if each.undo else ''} {_shown(each.params)}" for each in seen.calls]
        yield from _count(("calls",), len(check.calls), done)
        for index, (expected, carried) in enumerate(zip(check.calls, seen.calls, strict=False)):
            path = ("calls", index)
            yield from _equal((*path, "action"), expected.action, carried.action)
            yield from _contains((*path, "params"), expected.params, carried.params)
            yield from _equal((*path, "undo"), expected.undo, carried.undo)
    yield from _equal(("paused",), check.paused, seen.controls.paused)
    yield from _equal(("breaker_open",), check.breaker_open, seen.controls.breaker_open)


def _run(path: Path, wanted: RunExpected, record: RunRecord) -> Iterator[Difference]:
    run = record.run
    why = f" ({run.message})" if run.message else ""
    yield from _equal((*path, "playbook"), wanted.playbook, run.playbook)
    yield from _equal((*path, "target"), wanted.target, _target(record))
    yield from _equal((*path, "decision"), wanted.decision, run.decision, why)
    yield from _equal((*path, "status"), wanted.status, run.status, why)
    yield from _equal((*path, "mode"), wanted.mode, run.mode)
    yield from _says((*path, "message"), wanted.message, run.message)
    yield from _equal((*path, "alerts"), wanted.alerts, len(record.alerts))
    states = {step.id: step for step in run.steps}
    for step_id, step in wanted.steps.items():
        place = (*path, "steps", step_id)
        if step_id in states:
            yield from _step(place, step, states[step_id])
        else:
            yield Difference(place, "a step", f"none of that id; the run has {', '.join(states) or 'no steps'}")
    if wanted.events is not None:
        yield from _in_order((*path, "events"), wanted.events, [event.kind for event in record.events])


def _step(path: Path, wanted: StepExpected, state: StepState) -> Iterator[Difference]:
    told = state.error or state.message
    yield from _equal((*path, "status"), wanted.status, state.status, f" ({told})" if told else "")
    yield from _contains((*path, "params"), wanted.params, state.params)
    yield from _contains((*path, "output"), wanted.output, state.output)
    yield from _equal((*path, "attempts"), wanted.attempts, len(state.attempts))
    yield from _says((*path, "error"), wanted.error, state.error)
    yield from _says((*path, "message"), wanted.message, state.message)
    if wanted.undo is not None:
        yield from _undo((*path, "undo"), wanted.undo, state.undo)


def _undo(path: Path, wanted: UndoExpected, undo: Undo | None) -> Iterator[Difference]:
    if undo is None:
        yield Difference(path, "an undo", "none: the action has not begun, or cannot be undone")
        return
    yield from _equal((*path, "status"), wanted.status, undo.status, f" ({undo.error})" if undo.error else "")
    yield from _equal((*path, "action"), wanted.action, undo.action)
    yield from _contains((*path, "params"), wanted.params, undo.params)


def _equal(path: Path, wanted: object, got: object, why: str = "") -> Iterator[Difference]:
    if wanted is not None and wanted != got:
        yield Difference(path, _shown(wanted), _shown(got) + why)


def _says(path: Path, wanted: str | None, got: str | None) -> Iterator[Difference]:
    if wanted is not None and wanted not in (got or ""):
        yield Difference(path, f"a text with {_shown(wanted)}", _shown(got) if got else "none")


def _count(path: Path, wanted: int, got: Sequence[str], unmatched: Sequence[str] = ()) -> Iterator[Difference]:
    if wanted != len(got):
        told = [*got, *(unmatched if wanted > len(got) else ())]
        listed = "".join(f"\n      {each}" for each in told)
        yield Difference(path, f"{wanted}", f"{len(got)}{':' if told else ''}{listed}")


def _contains(path: Path, wanted: object, got: object) -> Iterator[Difference]:
    """Mappings hold at least what is wanted; anything else is equal."""
    if wanted is None:
        return
    if isinstance(wanted, Mapping) and isinstance(got, Mapping):
        for key, each in wanted.items():
            if key in got:
                yield from _exactly_or_contains((*path, key), each, got[key])
            else:
                yield Difference((*path, key), _shown(each), f"nothing; there are {', '.join(map(str, got)) or 'none'}")
        return
    yield from _exactly_or_contains(path, wanted, got)


def _exactly_or_contains(path: Path, wanted: object, got: object) -> Iterator[Difference]:
    if isinstance(wanted, Mapping) and isinstance(got, Mapping):
        yield from _contains(path, wanted, got)
    elif wanted != got:
        yield Difference(path, _shown(wanted), _shown(got))


def _in_order(path: Path, wanted: Sequence[str], got: Sequence[str]) -> Iterator[Difference]:
    left = iter(got)
    for index, kind in enumerate(wanted):
        if kind not in left:  # takes from the iterator up to the kind
            yield Difference((*path, index), f"{_shown(kind)} next", f"the events {', '.join(got)}")
            return


def _target(record: RunRecord) -> str:
    return record.run.target.key if record.run.target else ""


def _shown(value: object) -> str:
    if isinstance(value, Enum):
        value = value.value
    text = value if isinstance(value, str) and value and value.isprintable() else repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
