"""Checks of a playbook across its fields, which the models do not make."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import timedelta

from trainmedic_core import duration
from trainmedic_core.problems import DocumentPath, shown
from trainmedic_core.target import TargetKind
from trainmedic_server.domain import inputs, promql
from trainmedic_server.domain.playbook import (
    EVERY_PHASE,
    ActionStep,
    Approval,
    ApproveStep,
    DelayStep,
    Escalation,
    Playbook,
    PolledQuery,
    PollStep,
    Question,
    UndoTrigger,
    UntilStep,
    WaitStep,
    place_of,
)
from trainmedic_server.ports.playbooks import Step

SILENCE, EXPIRE_SILENCE = "alertmanager.silence", "alertmanager.expire_silence"  # actions
_LOOKS_LIKE_PATTERN = re.compile(r"\.[*+]|\w\*$|^\*|\w\|\w|^\^|\{\{|\w,\w")
_NEVER_ASKED_AGAIN = ("approve", "continue", "escalate")  # `ask_again` can only precede fail and reject


def problems(definition: Playbook) -> Iterator[tuple[DocumentPath, str]]:  # place and message
    yield from _alertnames(definition)
    yield from _durations(definition)
    for phase in EVERY_PHASE:
        yield from _waits_during_silence(place_of(phase), definition.phase(phase))
    yield from _group(definition)
    yield from _inputs(definition)
    yield from _without_alert(definition)
    yield from _again(definition)
    yield from _limited(definition)
    for place, step in _steps(definition):
        yield from _waits(place, step)
    yield from _question(("approval",), ("approval",), definition.approval)
    for place, step in _steps(definition):
        if isinstance(step, ApproveStep):
            yield from _question((*place, "approve"), place, step.question, step)


def _steps(definition: Playbook) -> Iterator[tuple[DocumentPath, Step]]:
    for phase in EVERY_PHASE:
        for index, step in enumerate(definition.phase(phase)):
            yield (*place_of(phase), index), step


def _alertnames(definition: Playbook) -> Iterator[tuple[DocumentPath, str]]:
    names = definition.on.alert or ()
    for index, name in enumerate((names,) if isinstance(names, str) else names):
        if _LOOKS_LIKE_PATTERN.search(name):
            path: DocumentPath = ("on", "alert") if isinstance(names, str) else ("on", "alert", index)
            yield path, f"on.alert: {shown(name)} is compared as it is, not as a pattern; write a list of names"


def _waits_during_silence(place: DocumentPath, steps: Sequence[Step]) -> Iterator[tuple[DocumentPath, str]]:
    """Alertmanager reports no end of a silenced alert, so a wait that is not longer always times out."""
    silence: timedelta | None = None
    for index, step in enumerate(steps):
        if isinstance(step, ActionStep) and step.action == SILENCE:
            silence = _constant_duration(step.with_.get("duration"))
        elif isinstance(step, ActionStep) and step.action == EXPIRE_SILENCE:
            silence = None
        elif isinstance(step, WaitStep) and silence and step.timeout is not None and step.timeout <= silence:
            yield (
                (*place, index, "wait_for"),
                f"wait_for: always times out: an earlier step silences the alert for {duration.write(silence)}, "
                "and its end is not reported during that time; wait before the silence, or longer",
            )


def _waits(place: DocumentPath, step: Step) -> Iterator[tuple[DocumentPath, str]]:
    if isinstance(step, (DelayStep, UntilStep)) and step.timeout is not None:
        yield (*place, "timeout"), "timeout: a wait for a time needs none"
    if not isinstance(step, PollStep):
        return
    if step.timeout is None:
        yield (*place, "wait_for"), "wait_for: needs a timeout; write timeout: 1h"
    elif step.wait_for.for_ >= step.timeout:
        yield (*place, "wait_for", "for"), f"for: must be shorter than the timeout, {duration.write(step.timeout)}"
    if isinstance(step.wait_for, PolledQuery) and promql.gives_bool(step.wait_for.query):
        yield (
            (*place, "wait_for", "query"),
            "query: a comparison with bool has a sample whether it holds or not; leave out bool",
        )


def _constant_duration(written: object) -> timedelta | None:
    try:
        return duration.parse(written) if isinstance(written, str) else None
    except ValueError:
        return None


def _group(definition: Playbook) -> Iterator[tuple[DocumentPath, str]]:
    if definition.group is None:
        if definition.rollout is not None:
            yield ("rollout",), "rollout: only for a group, such as target: {nodes: {pool: h100}}"
        return
    limit = definition.rollout.max_unavailable if definition.rollout is not None else None
    if limit is not None and definition.target_kind is TargetKind.JOB:
        yield ("rollout", "max_unavailable"), "max_unavailable: counts nodes; a group of jobs has none"
    if definition.effect is not None:
        yield ("effect",), "effect: is not measured for a group"
    for index, step in enumerate(definition.steps):
        if isinstance(step, ApproveStep):
            yield (
                ("steps", index, "approve"),
                "approve: the members of a group do not ask; with mode: approve, a person approves the whole list "
                "once; to ask between batches, use rollout.check",
            )


def _inputs(definition: Playbook) -> Iterator[tuple[DocumentPath, str]]:
    manual = definition.on.manual
    if manual is None:
        return
    for name, message in inputs.wrong_defaults(manual.inputs):
        yield ("on", "manual", "inputs", name, "default"), message


def _without_alert(definition: Playbook) -> Iterator[tuple[DocumentPath, str]]:
    starter = definition.on.starter
    if not starter:
        return
    kind = definition.target
    if definition.on.schedule is not None and isinstance(kind, TargetKind) and kind.parts:
        group = f", or a group such as {{{kind.plural}: {{name: NAME}}}}" if kind.plural else ""
        cure = f"write target: {{{kind}: NAME}}{group}"
        yield ("target",), f"target: {kind} is named by an alert's labels, and {starter}; {cure}"
    for place, step in _steps(definition):
        if isinstance(step, WaitStep):
            yield (*place, "wait_for"), f"wait_for: resolved needs an alert, and {starter}"
        if isinstance(step, ActionStep) and step.undo_trigger is UndoTrigger.ON_RESOLVE:
            yield (*place, "undo"), f"undo: on_resolve needs an alert, and {starter}; use on_failure or never"


def _durations(definition: Playbook) -> Iterator[tuple[DocumentPath, str]]:
    limits: list[tuple[DocumentPath, timedelta | None]] = []
    if definition.guards.max_runs is not None:
        limits.append((("guards", "max_runs", "per"), definition.guards.max_runs.per))
    for place, step in _steps(definition):
        limits.append(((*place, "timeout"), step.timeout))
        if isinstance(step, ApproveStep):
            limits += _times((*place, "approve"), step.question)
    if definition.guards.queue is not None:
        limits.append((("guards", "queue"), definition.guards.queue))
        if definition.guards.max_concurrent is None:
            yield ("guards", "queue"), "queue: needs max_concurrent, for which runs would wait"
    if definition.guards.min_available is not None and definition.target_kind not in (TargetKind.NODE, TargetKind.GPU):
        yield ("guards", "min_available"), "min_available: counts nodes, and the target is no node or GPU"
    limits += [(("approval", "timeout"), definition.approval.timeout), *_times(("approval",), definition.approval)]
    for path, value in limits:
        if value is not None and not value:
            yield path, f"{path[-1]}: must be longer than 0s"


def _limited(definition: Playbook) -> Iterator[tuple[DocumentPath, str]]:
    """``on_limited`` follows a refusal by ``max_runs``, and nothing is left to revert afterwards."""
    steps = definition.guards.on_limited
    if steps and definition.guards.max_runs is None:
        yield ("guards", "on_limited"), "on_limited: needs max_runs; write max_runs: {count: 5, per: 1h}"
    for index, step in enumerate(steps):
        if step.undo_trigger is not UndoTrigger.NEVER:
            yield ("guards", "on_limited", index, "undo"), "undo: on_limited changes nothing, so there is no undo"


def _again(definition: Playbook) -> Iterator[tuple[DocumentPath, str]]:
    again = definition.guards.again
    if again is None:
        return
    if not definition.on.alertnames:
        yield ("guards", "again"), f"again: needs an alert, and {definition.on.starter}; use retry at its steps"
    if definition.group is not None:
        message = "again: is not for a group; 'trainmedic runs retry' repeats the members that have not succeeded"
        yield ("guards", "again"), message
    if not again.after:
        yield ("guards", "again", "after"), "after: must be longer than 0s"


def _times(place: DocumentPath, asking: Question | Approval) -> list[tuple[DocumentPath, timedelta | None]]:
    second = asking.escalate.timeout if asking.escalate else None
    return [
        ((*place, "remind"), asking.remind),
        ((*place, "ask_again"), asking.ask_again),
        ((*place, "escalate", "timeout"), second),
    ]


def _question(
    place: DocumentPath, step_place: DocumentPath, asking: Question | Approval, step: ApproveStep | None = None
) -> Iterator[tuple[DocumentPath, str]]:  # `step` is the one that asks; None for mode approve
    timed = asking if isinstance(asking, Approval) else step
    assert timed is not None
    timeout, on_timeout = timed.timeout, timed.on_timeout
    if timeout is None:
        # `fail` and `continue` are older than this check, and valid playbooks stay valid.
        if "on_timeout" in timed.model_fields_set and on_timeout not in ("fail", "continue"):
            yield (*step_place, "on_timeout"), "on_timeout: has no effect without a timeout"
        if asking.ask_again is not None and "ask_again" in asking.model_fields_set:
            yield (*place, "ask_again"), "ask_again: has no effect without a timeout"
    elif asking.remind is not None and asking.remind >= timeout:
        yield (*place, "remind"), "remind: must be shorter than the timeout"
    if "ask_again" in asking.model_fields_set and asking.ask_again is not None and on_timeout in _NEVER_ASKED_AGAIN:
        yield (*place, "ask_again"), f"ask_again: cannot be combined with on_timeout {on_timeout}"
    yield from _escalation(place, step_place, asking.escalate, on_timeout)


def _escalation(
    place: DocumentPath, step_place: DocumentPath, escalate: Escalation | None, on_timeout: str
) -> Iterator[tuple[DocumentPath, str]]:
    if on_timeout == "escalate" and escalate is None:
        yield (*step_place, "on_timeout"), "on_timeout: escalate needs 'escalate', which names whom to ask next"
    if escalate is not None and on_timeout != "escalate":
        yield (*place, "escalate"), "escalate: needs on_timeout: escalate"
