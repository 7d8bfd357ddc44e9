"""When an undo is due, and how it is carried out. Pure.

An undo is a duty. It is planned once its run is closed, or while pause holds the run back; and neither pause, mode,
guards, breaker nor the target's lock hold it back. It is tried again, ever more slowly, for a day; then it is
recorded as failed for a person to see, who can order it again. Who calls it: ``plan``.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise

from trainmedic_server.domain.playbook import UndoTrigger
from trainmedic_server.domain.run import Attempt, OperatorOrder, OrderKind, Run, Status, StepState, Undo, UndoStatus
from trainmedic_server.engine.plan_values import AttemptOutcome, Idle, PerformAttempt, RunDraft, Wait
from trainmedic_server.engine.step_sequence import failed_step
from trainmedic_server.engine.steps import attempt_again

FIRST_RETRY = timedelta(seconds=2)
LONGEST_RETRY = timedelta(minutes=5)
GIVE_UP_AFTER = timedelta(days=1)
_LONGEST_GAP = 3 * LONGEST_RETRY
"""What counts at most of the time between two attempts: more than a slow attempt and the longest wait take
together, so a longer gap means that no server was up."""


def next_undo(draft: RunDraft) -> PerformAttempt | Wait | Idle:
    """The next undo to perform, newest step first, or when one is due. A step that has not ended is not undone yet."""
    by_hand = draft.outside.last(OrderKind.UNDO)
    later: list[datetime] = []
    for state in reversed(draft.run.steps):
        if state.undo is None or not state.status.is_final:
            continue
        if state.undo.status is UndoStatus.RUNNING:
            then = _continue(draft, state, state.undo, by_hand)
            if isinstance(then, PerformAttempt):
                return then
            later.append(then)
            continue
        because = _because(draft, state.undo, by_hand)
        if because:
            undo = replace(state.undo, status=UndoStatus.RUNNING, because=because, error=None)
            draft.add_event(
                "undo_started", step=state.id, action=undo.action, params=dict(undo.params), because=because
            )
            return _attempt(draft, state, undo, by_hand)
    return Wait(min(later)) if later else Idle()


def next_undo_while_paused(draft: RunDraft, hold: Wait) -> PerformAttempt | Wait:
    """The next undo of a run that the pause suspends, because pause holds no undo back; if none is due, `hold`."""
    then = next_undo(draft)
    return hold if isinstance(then, Idle) else then


def apply_outcome(draft: RunDraft, key: tuple[str, int], outcome: AttemptOutcome) -> None:
    """Apply the outcome of the last attempt of an undo."""
    state = draft.run.step(key)
    undo = state.undo
    assert undo is not None
    attempt = replace(undo.attempts[-1], status=outcome.status, ended_at=draft.now, error=outcome.error)
    undo = replace(undo, attempts=(*undo.attempts[:-1], attempt), output=outcome.output, error=outcome.error)
    if outcome.status == "applied":
        draft.put(replace(state, undo=replace(undo, status=UndoStatus.DONE)))
        draft.add_event("undo_done", step=state.id, action=undo.action, output=dict(outcome.output))
        return
    if outcome.status == "rejected" or _tried_for(undo.attempts, draft.now) > GIVE_UP_AFTER:
        draft.put(replace(state, undo=replace(undo, status=UndoStatus.FAILED)))
        draft.add_event("undo_failed", step=state.id, action=undo.action, error=outcome.error)
        return
    # After 16 attempts the wait is past the longest one by far; without the bound it would overflow in the end.
    wait = min(FIRST_RETRY * 2 ** min(attempt.number - 1, 16), LONGEST_RETRY)
    draft.put(replace(state, undo=replace(undo, retry_at=draft.now + wait)))
    if attempt.number == 1:
        draft.add_event("undo_delayed", step=state.id, action=undo.action, error=outcome.error)


def drop_on_failure_undos(run: Run) -> Run:
    """Make the ``on_failure`` undos of a run that closes without failure no longer owed. An operator can still order
    them."""
    for state in run.steps:
        undo = state.undo
        if undo and undo.status is UndoStatus.ARMED and undo.trigger is UndoTrigger.ON_FAILURE:
            run = run.with_step(replace(state, undo=replace(undo, status=UndoStatus.AVAILABLE)))
    return run


def can_be_undone(run: Run) -> bool:
    """Whether there is anything that an operator could order undone."""
    possible = (UndoStatus.AVAILABLE, UndoStatus.ARMED, UndoStatus.FAILED, UndoStatus.RUNNING)
    return any(step.undo and step.undo.status in possible for step in run.steps)


def _because(draft: RunDraft, undo: Undo, by_hand: OperatorOrder | None) -> str | None:
    """Why the undo is due now; None if it is not."""
    if undo.status is UndoStatus.ARMED:
        if undo.trigger is UndoTrigger.ON_RESOLVE and draft.outside.resolved:
            return f"resolved ({draft.outside.resolved_because})"
        if undo.trigger is UndoTrigger.ON_FAILURE and _has_failed(draft):
            return "the run failed"
    if by_hand is None or undo.status not in (UndoStatus.AVAILABLE, UndoStatus.ARMED, UndoStatus.FAILED):
        return None
    return f"ordered by {by_hand.actor}" if _is_unanswered(by_hand, undo) else None


def _is_unanswered(order: OperatorOrder, undo: Undo) -> bool:
    """Whether no attempt has answered the order yet. Ids say so and not times, because a clock can be set back."""
    return all(attempt.order != order.id for attempt in undo.attempts)


def _has_failed(draft: RunDraft) -> bool:
    if draft.run.is_open:
        return failed_step(draft.run, draft.playbook) is not None
    return draft.run.status is Status.FAILED


def _continue(
    draft: RunDraft, state: StepState, undo: Undo, by_hand: OperatorOrder | None
) -> PerformAttempt | datetime:
    """The next attempt of an undo that has begun, or when it is due: at once if an operator orders it again."""
    last = undo.attempts[-1]
    if last.status == "running":
        if last.deadline <= draft.now:  # it ran out while no server was up
            later = replace(last, deadline=draft.now + _timeout(draft, undo))
            draft.put(replace(state, undo=replace(undo, attempts=(*undo.attempts[:-1], later))))
        draft.add_event("undo_resumed", step=state.id, action=undo.action, command_id=last.command_id)
        return PerformAttempt(state.key, undo=True, resumed=True)
    if undo.retry_at and draft.now < undo.retry_at and not (by_hand and _is_unanswered(by_hand, undo)):
        return undo.retry_at
    return _attempt(draft, state, undo, by_hand)


def _attempt(draft: RunDraft, state: StepState, undo: Undo, by_hand: OperatorOrder | None) -> PerformAttempt:
    attempt = attempt_again(draft, undo.attempts, _timeout(draft, undo))
    if by_hand is not None:
        attempt = replace(attempt, order=by_hand.id)
    draft.put(replace(state, undo=replace(undo, attempts=(*undo.attempts, attempt), retry_at=None)))
    return PerformAttempt(state.key, undo=True)


def _timeout(draft: RunDraft, undo: Undo) -> timedelta:
    action = draft.context.actions.action_class(undo.action)
    return action.default_timeout if action else timedelta(seconds=30)


def _tried_for(attempts: tuple[Attempt, ...], now: datetime) -> timedelta:
    """How long the undo has been tried. A gap in which no server was up counts as one wait, so that a downtime does not
    use up the day in which it is tried; a clock that was set back counts as none."""
    moments = [*(attempt.started_at for attempt in attempts), now]
    gaps = (max(later - earlier, timedelta()) for earlier, later in pairwise(moments))
    return sum((min(gap, _LONGEST_GAP) for gap in gaps), timedelta())
