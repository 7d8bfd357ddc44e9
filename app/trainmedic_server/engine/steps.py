"""How one step begins, waits, is tried again, and ends. Pure.

`proceed` is asked about the first step that is not final: it returns what to do, or None when the
step has become final and the run can go on to the next. `conclude` takes in how an attempt ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from trainmedic_server import errors
from trainmedic_server.domain.playbook import (
    APPROVAL,
    ActionStep,
    ApproveStep,
    Question,
    UndoTrigger,
    WaitStep,
    step_id,
)
from trainmedic_server.domain.run import (
    Attempt,
    Decision,
    OrderKind,
    Run,
    Status,
    StepState,
    StepStatus,
    Undo,
    UndoStatus,
)
from trainmedic_server.engine.plan_values import AttemptOutcome, PerformAttempt, PlanningContext, RunDraft, Wait
from trainmedic_server.ports.actions import Action
from trainmedic_server.ports.playbooks import CompiledPlaybook, Step

_MODE_APPROVAL = ApproveStep(id=APPROVAL, approve=Question(message="Mode approve: may this run act?"))


def spec_of(book: CompiledPlaybook, state: StepState) -> Step:
    """The playbook's entry that a step's state belongs to."""
    if state.phase == APPROVAL:
        return _MODE_APPROVAL
    entries = book.spec.steps if state.phase == "steps" else book.spec.on_failure
    return entries[state.index]


def fresh(book: CompiledPlaybook, *, ask_first: bool) -> tuple[StepState, ...]:
    """The steps of a new run, all pending; with mode approve's question in front if `ask_first`."""
    states = [StepState(APPROVAL, 0, APPROVAL, "approve")] if ask_first else []
    for phase, entries in (("steps", book.spec.steps), ("on_failure", book.spec.on_failure)):
        for index, entry in enumerate(entries):
            action = entry.action if isinstance(entry, ActionStep) else None
            states.append(StepState(phase, index, step_id(entry, index, phase), _kind(entry), action))
    return tuple(states)


def is_fatal(state: StepState, spec: Step) -> bool:
    """Whether the run fails because this step ended as it did."""
    match state.status:
        case StepStatus.REJECTED | StepStatus.CANCELLED:
            return True
        case StepStatus.FAILED | StepStatus.UNKNOWN:
            return spec.on_error == "fail"
        case StepStatus.TIMED_OUT:
            tolerated = isinstance(spec, WaitStep | ApproveStep) and spec.on_timeout == "continue"
            return spec.on_error == "fail" and not tolerated
        case _:
            return False


def broken(run: Run, book: CompiledPlaybook) -> StepState | None:
    """The step by which the run fails; None where none has."""
    regular = (step for step in run.steps if step.phase != "on_failure")
    return next((step for step in regular if is_fatal(step, spec_of(book, step))), None)


def following(run: Run, book: CompiledPlaybook, failed: StepState | None) -> StepState | None:
    """The first step that is not final, in ``on_failure`` where the run has `failed`; None for none.

    There a failed action does not keep those after it from running, for they may be what tells a
    person. A refused approval does, and a wait or an approval whose time ran out: what comes after
    one was meant to happen only behind it.
    """
    for state in run.steps:
        if (state.phase == "on_failure") != (failed is not None):
            continue
        if not state.status.is_final:
            return state
        if failed is not None and state.kind != "action" and is_fatal(state, spec_of(book, state)):
            return None
    return None


def proceed(draft: RunDraft, state: StepState) -> PerformAttempt | Wait | None:
    """What to do about the first step that is not final.

    None once it has become final, or where the run must not act (`RunDraft.refused`)."""
    spec = spec_of(draft.book, state)
    if held_by_pause(draft, state):
        if draft.outside.resolved and _may_be_applied(state):
            lose(
                draft,
                state,
                "it may have been applied; nobody asked again, because the server was paused and the alert resolved",
            )
            return None
        return draft.hold_for_resume()
    if state.status is StepStatus.PENDING:
        try:
            wanted = spec.when is None or draft.book.when(state.phase, state.index, draft.scope())
        except errors.ExpressionError as error:
            _fail(draft, state, str(error))
            return None
        if not wanted:
            draft.put(
                replace(state, status=StepStatus.SKIPPED, ended_at=draft.now, message="its condition was not met")
            )
            draft.note("step_skipped", step=state.id, when=spec.when)
            return None
    if isinstance(spec, WaitStep):
        return _wait(draft, state, spec)
    if isinstance(spec, ApproveStep):
        return _approve(draft, state, spec)
    return _act(draft, state, spec)


def located(draft: RunDraft, key: tuple[str, int], params: Mapping[str, Any]) -> None:
    """Put on record where the attempt that comes next is to work, which its undo has to know too."""
    state = draft.run.step(key)
    action = draft.context.actions.spec(state.action) if state.action else None
    undo = state.undo
    if undo is not None and action is not None:
        undo = _expected_undo(action, params, undo.trigger, undo.undo_of)
    draft.put(replace(state, params=params, undo=undo))
    draft.note("step_located", step=state.id, action=state.action, params=dict(params))


def conclude(draft: RunDraft, key: tuple[str, int], outcome: AttemptOutcome) -> None:
    """Take in how the last attempt of an action step ended."""
    # While it is open a run says what it last met with: that it waits, or why an attempt failed.
    draft.run = replace(draft.run, message="" if outcome.status == "applied" else outcome.error or outcome.status)
    state = draft.run.step(key)
    spec = spec_of(draft.book, state)
    assert isinstance(spec, ActionStep)
    attempt = replace(
        state.attempts[-1],
        status=outcome.status,
        ended_at=draft.now,
        error=outcome.error,
        in_part=outcome.in_part,
    )
    state = replace(state, attempts=(*state.attempts[:-1], attempt), output=outcome.output, error=outcome.error)
    if outcome.status == "applied":
        state = _with_known_undo(draft.context, state, spec, outcome.output)
        draft.put(replace(state, status=StepStatus.SUCCEEDED, ended_at=draft.now))
        draft.note("step_succeeded", step=state.id, action=state.action, output=dict(outcome.output))
        return
    if outcome.status != "rejected" and attempt.number < spec.retry.attempts:
        pause = min(spec.retry.delay * spec.retry.backoff ** (attempt.number - 1), spec.retry.max_delay)
        draft.put(replace(state, status=StepStatus.WAITING, retry_at=draft.now + pause))
        draft.note(
            "attempt_failed", step=state.id, attempt=attempt.number, error=outcome.error, retry_in=pause.total_seconds()
        )
        return
    if any(one.status == "unknown" for one in state.attempts):
        # Also where a later attempt certainly failed: an earlier one may have been applied, and its
        # undo stays owed.
        draft.put(replace(state, status=StepStatus.UNKNOWN, ended_at=draft.now))
        draft.note("step_unknown", step=state.id, action=state.action, error=outcome.error)
        return
    _fail(draft, without_needless_undo(state), outcome.error or outcome.status)


def without_needless_undo(state: StepState) -> StepState:
    """A step that ends without success: where it was certainly not applied there is nothing to take back."""
    if state.undo is None or _may_be_applied(state):
        return state
    return replace(state, undo=replace(state.undo, status=UndoStatus.DROPPED, because="the action was not applied"))


def _may_be_applied(state: StepState) -> bool:
    return any(attempt.status in ("unknown", "running") or attempt.in_part for attempt in state.attempts)


def attempt_again(draft: RunDraft, attempts: tuple[Attempt, ...], timeout: timedelta) -> Attempt:
    """The next attempt. It keeps the command id while the last outcome is unknown, so that a receiver
    which did apply the command does not apply it twice; a known failure calls for a new id."""
    last = attempts[-1] if attempts else None
    known = last is None or last.status != "unknown"
    command_id = draft.context.new_id() if last is None or known else last.command_id
    return Attempt(len(attempts) + 1, command_id, draft.now, draft.now + timeout)


def _act(draft: RunDraft, state: StepState, spec: ActionStep) -> PerformAttempt | Wait | None:
    if state.retry_at and draft.now < state.retry_at:
        draft.stand(Status.WAITING, "retry")
        return Wait(state.retry_at)
    action = draft.context.actions.spec(spec.action)
    if action is None:
        _fail(draft, state, f"there is no action {spec.action!r} in this server")
        return None
    if action.harmful and draft.run.acted_at is None and draft.outside.breaker and _was_held_up(draft.run):
        draft.refuse(Decision.BREAKER_OPEN, f"before the run could act the breaker opened: {draft.outside.breaker}")
        return None
    if not state.attempts:
        try:
            params = draft.book.params(state.phase, state.index, draft.scope())
        except errors.ExpressionError as error:
            _fail(draft, state, str(error))
            return None
        state = replace(state, params=params.model_dump(mode="json", by_alias=True, exclude_none=True))
    attempt = attempt_again(draft, state.attempts, spec.timeout or action.default_timeout)
    state = replace(
        state,
        status=StepStatus.RUNNING,
        started_at=state.started_at or draft.now,
        retry_at=None,
        error=None,
        attempts=(*state.attempts, attempt),
        undo=_expected_undo(action, state.params, spec.undo, attempt.command_id),
    )
    draft.put(state)
    draft.stand(Status.RUNNING)
    if action.harmful and draft.run.acted_at is None:
        draft.run = replace(draft.run, acted_at=draft.now)
    draft.note(
        "step_started",
        step=state.id,
        action=state.action,
        params=dict(state.params),
        attempt=attempt.number,
        command_id=attempt.command_id,
    )
    return PerformAttempt(state.key)


def _was_held_up(run: Run) -> bool:
    """Whether the run has let time pass since it was admitted, when the breaker was closed."""
    return run.waiting_on is not None or any(step.status is not StepStatus.PENDING for step in run.steps)


def _wait(draft: RunDraft, state: StepState, spec: WaitStep) -> Wait | None:
    if draft.outside.resolved:
        draft.put(
            replace(state, status=StepStatus.SUCCEEDED, started_at=state.started_at or draft.now, ended_at=draft.now)
        )
        draft.note("wait_ended", step=state.id, outcome="resolved", because=draft.outside.resolved_because)
        return None
    if state.status is StepStatus.PENDING:
        deadline = draft.now + spec.timeout if spec.timeout else None
        state = draft.put(replace(state, status=StepStatus.WAITING, started_at=draft.now, deadline=deadline))
        draft.note("wait_started", step=state.id, wait_for=spec.wait_for, deadline=_text(deadline))
    if state.deadline and draft.now >= state.deadline:
        error = "the alert had not resolved in time"
        draft.put(replace(state, status=StepStatus.TIMED_OUT, ended_at=draft.now, error=error))
        draft.note("wait_ended", step=state.id, outcome="timed_out")
        return None
    draft.stand(Status.WAITING, "resolved")
    return Wait(state.deadline)


def _approve(draft: RunDraft, state: StepState, spec: ApproveStep) -> Wait | None:
    if state.status is StepStatus.PENDING:
        try:
            message = (
                spec.message if state.phase == APPROVAL else draft.book.message(state.phase, state.index, draft.scope())
            )
        except errors.ExpressionError as error:
            _fail(draft, state, str(error))
            return None
        deadline = draft.now + spec.timeout if spec.timeout else None
        state = draft.put(
            replace(state, status=StepStatus.WAITING, started_at=draft.now, deadline=deadline, message=message)
        )
        draft.note("approval_requested", step=state.id, message=message, deadline=_text(deadline))
    said = next((order for order in draft.outside.orders if order.step == state.id), None)
    if said is not None:
        approved = said.kind is OrderKind.APPROVE
        status = StepStatus.SUCCEEDED if approved else StepStatus.REJECTED
        refusal = None if approved else f"rejected by {said.actor}"
        output = {"by": said.actor, "note": said.note}
        draft.put(replace(state, status=status, ended_at=draft.now, output=output, error=refusal))
        return None
    if draft.outside.resolved and not _waited_for_it(draft.run):
        late = "the alert resolved before anybody approved"
        draft.put(replace(state, status=StepStatus.CANCELLED, ended_at=draft.now, error=late))
        draft.note("approval_ended", step=state.id, outcome="resolved")
        return None
    if state.deadline and draft.now >= state.deadline:
        draft.put(replace(state, status=StepStatus.TIMED_OUT, ended_at=draft.now, error="nobody approved in time"))
        draft.note("approval_ended", step=state.id, outcome="timed_out")
        return None
    draft.stand(Status.AWAITING_APPROVAL, "approval")
    return Wait(state.deadline)


def _waited_for_it(run: Run) -> bool:
    """Whether the run itself has waited for its alerts to resolve, so that it may ask what to do then."""
    return any(step.kind == "wait_for" and step.status is StepStatus.SUCCEEDED for step in run.steps)


def held_by_pause(draft: RunDraft, state: StepState) -> bool:
    """Whether the step must wait until somebody resumes the server."""
    action = draft.context.actions.spec(state.action) if state.action else None
    return draft.outside.paused and action is not None and action.harmful


def _fail(draft: RunDraft, state: StepState, error: str) -> None:
    draft.put(
        replace(
            state, status=StepStatus.FAILED, ended_at=draft.now, error=error, started_at=state.started_at or draft.now
        )
    )
    draft.note("step_failed", step=state.id, action=state.action, error=error)


def _expected_undo(
    action: type[Action], params: Mapping[str, Any], trigger: UndoTrigger, command_id: str
) -> Undo | None:
    """The inverse as far as it is known before the act: a duty from now on, unless nobody asked for it."""
    inverse = action.inverse(action.Params.model_validate(params), None)
    if inverse is None:
        return None
    status = UndoStatus.AVAILABLE if trigger is UndoTrigger.NEVER else UndoStatus.ARMED
    return Undo(trigger, inverse.action, inverse.params, command_id, status)


def _with_known_undo(
    context: PlanningContext, state: StepState, spec: ActionStep, output: Mapping[str, Any]
) -> StepState:
    """The inverse again, now that the action's output is known."""
    action = context.actions.spec(spec.action)
    if action is None:
        return state
    inverse = action.inverse(action.Params.model_validate(state.params), output)
    if inverse is None:
        return state
    command_id = state.attempts[-1].command_id
    known = state.undo or Undo(
        spec.undo,
        inverse.action,
        inverse.params,
        command_id,
        UndoStatus.AVAILABLE if spec.undo is UndoTrigger.NEVER else UndoStatus.ARMED,
    )
    return replace(state, undo=replace(known, action=inverse.action, params=inverse.params, undo_of=command_id))


def interrupted(run: Run) -> StepState | None:
    """The step with an attempt in flight. Planning never meets one but after a restart."""
    return next(
        (step for step in run.steps if step.status is StepStatus.RUNNING and step.attempts[-1].status == "running"),
        None,
    )


def lose(draft: RunDraft, state: StepState, why: str) -> None:
    """An attempt was in flight and is not asked about any more. Whether it was applied stays unknown."""
    attempt = replace(state.attempts[-1], status="unknown", ended_at=draft.now, error=why)
    attempts = (*state.attempts[:-1], attempt)
    draft.put(replace(state, status=StepStatus.UNKNOWN, ended_at=draft.now, error=why, attempts=attempts))
    draft.note("step_unknown", step=state.id, action=state.action, error=why)


def _kind(entry: Step) -> str:
    if isinstance(entry, WaitStep):
        return "wait_for"
    return "approve" if isinstance(entry, ApproveStep) else "action"


def _text(moment: Any) -> str | None:
    return moment.isoformat() if moment else None
