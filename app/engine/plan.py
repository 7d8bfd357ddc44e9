"""What a run does next. Pure.

`advance` takes a run as it stands and what is known from outside, and returns the run as it should
stand, the events that tell why, and what to do then. All state is in the run: a new process that
reads it back from the store goes on at the same place.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from app import errors
from app.domain import duration
from app.domain.run import Decision, OrderKind, Run, Status, StepState, StepStatus
from app.engine import steps, undoing
from app.engine.moves import Act, Context, Draft, Hold, Next, Outcome, Plan, Signals
from app.ports import Book, Scope


def advance(run: Run, signals: Signals, context: Context, now: datetime) -> Plan:
    """What `run` does next."""
    return _advance(Draft(run, signals, context, now))


def conclude_and_advance(
    run: Run, act: Act, outcome: Outcome, signals: Signals, context: Context, now: datetime
) -> Plan:
    """Take in how an attempt ended, and go on: one plan, so that both are committed at once."""
    draft = Draft(run, signals, context, now)
    (undoing if act.undo else steps).conclude(draft, act.key, outcome)
    return _advance(draft)


def close_stale(run: Run, signals: Signals, context: Context, now: datetime, why: str, decision: Decision) -> Plan:
    """Close a run that must not act any more: not started where it never acted, else cancelled."""
    draft = Draft(run, signals, context, now)
    status = Status.NOT_STARTED if run.acted_at is None else Status.CANCELLED
    _lose_flight(draft, why)
    draft.run = replace(draft.run, decision=decision)
    _close(draft, status, why, decision=str(decision))
    return Plan(draft.run, tuple(draft.events), undoing.due(draft))


def give_up(run: Run, signals: Signals, context: Context, now: datetime, why: str) -> Plan:
    """Close an open run as failed that cannot go on. Asks nothing of its playbook."""
    draft = Draft(run, signals, context, now)
    _lose_flight(draft, why)
    _close(draft, Status.FAILED, why)
    return Plan(draft.run, tuple(draft.events), undoing.due(draft))


def stale(run: Run, signals: Signals, max_age: timedelta, now: datetime) -> str | None:
    """Why a run that was held up, and has not acted, must not act any more; None where it may."""
    if signals.resolved:
        return "the alert resolved before the run could act"
    newest = max(
        (record.alert.starts_at for record in signals.alerts if not record.is_resolved), default=run.created_at
    )
    if now - newest > max_age:
        return f"the alert began {duration.write(now - newest)} ago, over the maximum age of {duration.write(max_age)}"
    return None


def observe(run: Run, book: Book, names: Scope) -> Run:
    """The run of mode observe: each step with the parameters that it would have had.

    What depends on the outcome of a step cannot be known; such a step says so in its message.
    """
    for state in run.steps:
        if state.phase == "steps":
            run = run.with_step(_observed(state, book, names))
        else:
            run = run.with_step(replace(state, status=StepStatus.SKIPPED, message="is for a run that fails"))
    return run


def _observed(state: StepState, book: Book, names: Scope) -> StepState:
    message = None
    try:
        if not book.when(state.phase, state.index, names):
            return replace(state, status=StepStatus.SKIPPED, message="its condition was not met")
    except errors.ExpressionError:
        message = f"would depend on how the run goes: {steps.spec_of(book, state).when}"
    state = replace(state, status=StepStatus.OBSERVED, message=message)
    if state.kind != "action":
        return state
    try:
        params = book.params(state.phase, state.index, names)
    except errors.ExpressionError as error:
        return replace(state, message=f"its parameters depend on the run: {error}")
    return replace(state, params=params.model_dump(mode="json", by_alias=True, exclude_none=True))


def _advance(draft: Draft) -> Plan:
    then: Next | None = _go_on(draft) if draft.run.is_open else None
    if then is None:
        then = undoing.due(draft)
    return Plan(draft.run, tuple(draft.events), then)


def _go_on(draft: Draft) -> Act | Hold | None:
    """What an open run does next; None once it has closed."""
    flight = steps.interrupted(draft.run)
    if flight is not None:
        return _resume(draft, flight)
    told = draft.signals.last(OrderKind.CANCEL, OrderKind.UNDO)
    if told is not None:
        _close(draft, Status.CANCELLED, f"cancelled by {told.actor}")
        return None
    if draft.run.waiting_on == "resume" and not draft.signals.paused and draft.run.acted_at is None:
        why = stale(draft.run, draft.signals, draft.context.max_age, draft.now)
        if why:
            draft.run = replace(draft.run, decision=Decision.STALE)
            _close(draft, Status.NOT_STARTED, why, decision=str(Decision.STALE))
            return None
    while draft.run.is_open:
        then = _next_step(draft)
        if then is not None:
            return then
    return None


def _next_step(draft: Draft) -> Act | Hold | None:
    """Proceed with the first step that is not final, or close the run where there is none."""
    book = draft.context.book
    regular = [step for step in draft.run.steps if step.phase != "on_failure"]
    broken = next((step for step in regular if steps.is_fatal(step, steps.spec_of(book, step))), None)
    if broken is not None and broken.status in (StepStatus.REJECTED, StepStatus.CANCELLED):
        if broken.status is StepStatus.CANCELLED and draft.run.acted_at is None:
            draft.run = replace(draft.run, decision=Decision.STALE)
        status = Status.REJECTED if broken.status is StepStatus.REJECTED else Status.CANCELLED
        _close(draft, status, broken.error or str(status))
        return None
    phase = regular if broken is None else [step for step in draft.run.steps if step.phase == "on_failure"]
    state = next((step for step in phase if not step.status.is_final), None)
    if state is not None:
        return steps.proceed(draft, state)
    if broken is None:
        _close(draft, Status.SUCCEEDED, _summary(draft.run))
    else:
        _close(draft, Status.FAILED, f"step {broken.id}: {broken.error}")
    return None


def _resume(draft: Draft, flight: StepState) -> Act | Hold:
    """Go on with an attempt that a killed server may have made, under the same command id."""
    action = draft.context.actions.spec(flight.action or "")
    if draft.signals.paused and action is not None and action.harmful:
        draft.stand(Status.WAITING, "resume")
        return Hold()
    attempt = flight.attempts[-1]
    if attempt.deadline <= draft.now:
        later = replace(attempt, deadline=draft.now + (attempt.deadline - attempt.started_at))
        draft.put(replace(flight, attempts=(*flight.attempts[:-1], later)))
    draft.stand(Status.RUNNING)
    draft.note("step_resumed", step=flight.id, action=flight.action, command_id=attempt.command_id)
    return Act(flight.key, resumed=True)


def _lose_flight(draft: Draft, why: str) -> None:
    flight = steps.interrupted(draft.run)
    if flight is not None:
        steps.lose(draft, flight, f"it may have been applied; nobody asked again, because {why}")


def _close(draft: Draft, status: Status, message: str, **data: str) -> None:
    unused = StepStatus.CANCELLED if status is Status.CANCELLED else StepStatus.SKIPPED
    for state in draft.run.steps:
        if not state.status.is_final:
            draft.put(replace(state, status=unused, ended_at=draft.now if state.started_at else None))
    draft.run = replace(draft.run, status=status, ended_at=draft.now, waiting_on=None, message=message)
    if status is not Status.FAILED:
        draft.run = undoing.release(draft.run)
    draft.note("closed", status=str(status), message=message, **data)


def _summary(run: Run) -> str:
    """What was done, and what was tried in vain by a step that lets the run go on all the same."""
    missed = [f"step {step.id}: {step.error}" for step in run.steps if step.kind == "action" and step.error]
    done = f"applied {run.action_taken}" if run.action_taken else "nothing was applied"
    if not missed:
        return done if run.action_taken else "nothing had to be done"
    return "; ".join([done, *missed])
