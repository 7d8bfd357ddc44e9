"""Due undos and their attempts.

An undo is planned after its run has closed, or during a pause. Pause, mode, guards, breaker and locks do not block it.
It is retried until nothing is certainly left to revert.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from msgspec.structs import replace

from trainmedic_server.domain.event_kinds import UndoClosed, UndoDelayed, UndoDone, UndoResumed, UndoStarted
from trainmedic_server.domain.playbook import UndoTrigger
from trainmedic_server.domain.run import OperatorOrder, OrderKind, Run, Status, StepState, Undo, UndoStatus
from trainmedic_server.engine.plan_values import AttemptOutcome, Idle, PerformAttempt, RunDraft, Wait
from trainmedic_server.engine.step_sequence import failed_step
from trainmedic_server.engine.steps import next_attempt
from trainmedic_server.ports.actions import Actions

FIRST_RETRY = timedelta(seconds=2)  # Doubled with each attempt
LONGEST_RETRY = timedelta(minutes=5)
FREQUENT_ATTEMPTS = 300  # Attempts, in about a day, after which `LATER_RETRY` applies
LATER_RETRY = timedelta(hours=1)
KEPT_ATTEMPTS = 50  # The first attempt and the last ones are stored
# States of undos that an operator can order or drop. An order for a running one repeats it at once.
_STARTED_BY_ORDERS = (UndoStatus.AVAILABLE, UndoStatus.ARMED, UndoStatus.FAILED, UndoStatus.CLOSED)
OPEN_TO_ORDERS = (*_STARTED_BY_ORDERS, UndoStatus.RUNNING)
OPEN_TO_CLOSING = (UndoStatus.ARMED, UndoStatus.RUNNING, UndoStatus.FAILED)
_WHY_UNSUCCESSFUL = {
    Status.FAILED: "the run failed",
    Status.CANCELLED: "the run was cancelled",
    Status.REJECTED: "the run was rejected",
}
_UNSUCCESSFUL = frozenset(_WHY_UNSUCCESSFUL)


def next_undo(draft: RunDraft) -> PerformAttempt | Wait | Idle:
    """Return the next undo to perform, newest step first, or a wait for it. Only final steps are undone."""
    order = draft.outside.last(OrderKind.UNDO, OrderKind.CLOSE_UNDO)
    by_hand = order if order is not None and order.kind is OrderKind.UNDO else None
    later: list[datetime] = []
    for state in reversed(draft.run.steps):
        if state.undo is None or not state.status.is_final:
            continue
        if order is not None and order.kind is OrderKind.CLOSE_UNDO and _can_be_closed(state.undo):
            _close(draft, state, state.undo, order)
            continue
        if state.undo.status is UndoStatus.RUNNING:
            then = _continue_undo(draft, state, state.undo, by_hand)
            if isinstance(then, PerformAttempt):
                return then
            later.append(then)
            continue
        because = _reason_to_begin(draft, state, state.undo, by_hand)
        if because:
            undo = replace(state.undo, status=UndoStatus.RUNNING, because=because, error=None)
            draft.add_event(UndoStarted(state.id, undo.action, undo.params, because))
            return _begin_attempt(draft, state, undo, by_hand)
    return Wait(min(later)) if later else Idle()


def next_undo_while_paused(draft: RunDraft, hold: Wait) -> PerformAttempt | Wait:
    """Return `next_undo`, or `hold`, the wait for the pause, if no undo is pending."""
    then = next_undo(draft)
    return hold if isinstance(then, Idle) else then


def apply_outcome(draft: RunDraft, key: tuple[str, int], outcome: AttemptOutcome) -> None:
    state = draft.run.step(key)
    undo = state.undo
    assert undo is not None
    status = "rejected" if outcome.status == "skipped" else outcome.status  # no attempt has the status `skipped`
    attempt = replace(undo.attempts[-1], status=status, ended_at=draft.now, error=outcome.error)
    undo = replace(undo, attempts=(*undo.attempts[:-1], attempt), output=outcome.output, error=outcome.error)
    if outcome.status == "applied":
        draft.put(replace(state, undo=replace(undo, status=UndoStatus.DONE)))
        draft.add_event(UndoDone(state.id, undo.action, outcome.output))
        return
    wait = _wait_after(attempt.number)
    draft.put(replace(state, undo=replace(undo, retry_at=draft.now + wait)))
    if all(earlier.error != outcome.error for earlier in undo.attempts[:-1]):  # one event per error
        draft.add_event(UndoDelayed(state.id, undo.action, outcome.error, attempt.number, wait.total_seconds()))


def with_undos_of_closed(run: Run, actions: Actions) -> Run:
    """Return a just closed run with its pending undos.

    After success, ``on_failure`` undos are only available. Otherwise, holds for a person's decision are released too.
    """
    for state in run.steps:
        undo = state.undo
        if undo is None:
            continue
        if run.status in _UNSUCCESSFUL:
            if undo.status is UndoStatus.AVAILABLE and _was_held_for_person(run, state, actions):
                run = run.with_step(replace(state, undo=replace(undo, status=UndoStatus.ARMED)))
        elif undo.status is UndoStatus.ARMED and undo.trigger is UndoTrigger.ON_FAILURE:
            run = run.with_step(replace(state, undo=replace(undo, status=UndoStatus.AVAILABLE)))
    return run


def can_be_undone(run: Run) -> bool:
    return any(step.undo and step.undo.status in OPEN_TO_ORDERS for step in run.steps)


def can_be_closed(run: Run) -> bool:
    return any(step.undo and step.undo.status in OPEN_TO_CLOSING for step in run.steps)


def _can_be_closed(undo: Undo) -> bool:
    """Return False during an attempt, which may succeed."""
    if undo.status is UndoStatus.RUNNING:
        return undo.attempts[-1].status != "running"
    return undo.status in (UndoStatus.ARMED, UndoStatus.FAILED)


def _close(draft: RunDraft, state: StepState, undo: Undo, order: OperatorOrder) -> None:
    because = f"closed by {order.actor}: {order.note}"
    draft.put(replace(state, undo=replace(undo, status=UndoStatus.CLOSED, because=because, retry_at=None)))
    draft.add_event(UndoClosed(state.id, undo.action, order.note, undo.error), order.actor)


def _wait_after(number: int) -> timedelta:
    if number > FREQUENT_ATTEMPTS:
        return LATER_RETRY
    # After 16 attempts the wait far exceeds the longest one, and after thousands it would overflow.
    doublings = min(number - 1, 16)
    return min(FIRST_RETRY * (1 << doublings), LONGEST_RETRY)


def _reason_to_begin(draft: RunDraft, state: StepState, undo: Undo, by_hand: OperatorOrder | None) -> str | None:
    if undo.status is UndoStatus.ARMED:
        if undo.trigger is UndoTrigger.ON_RESOLVE and draft.outside.resolved:
            return f"resolved ({draft.outside.resolved_because})"
        if undo.trigger is UndoTrigger.ON_FAILURE and _has_failed(draft):
            return _WHY_UNSUCCESSFUL.get(draft.run.status, "the run failed")
        if draft.run.status in _UNSUCCESSFUL and _was_held_for_person(draft.run, state, draft.context.actions):
            return f"a person has decided, and {_WHY_UNSUCCESSFUL[draft.run.status]}"
    if by_hand is None or undo.status not in _STARTED_BY_ORDERS:
        return None
    return f"ordered by {by_hand.actor}" if _is_unanswered(by_hand, undo) else None


def _is_unanswered(order: OperatorOrder, undo: Undo) -> bool:
    return all(attempt.order != order.id for attempt in undo.attempts)  # not by time: clocks can be set back


def _has_failed(draft: RunDraft) -> bool:
    if draft.run.is_open:
        return failed_step(draft.run, draft.playbook) is not None
    return draft.run.status in _UNSUCCESSFUL


def _was_held_for_person(run: Run, state: StepState, actions: Actions) -> bool:
    action = actions.action_class(state.action or "")
    if not getattr(action, "is_hold", False):
        return False
    later = run.steps[run.steps.index(state) + 1 :]
    return any(step.kind == "approve" and step.started_at is not None for step in later)


def _continue_undo(
    draft: RunDraft, state: StepState, undo: Undo, by_hand: OperatorOrder | None
) -> PerformAttempt | datetime:  # the attempt that is due, or the time of the next one
    last = undo.attempts[-1]
    if last.status == "running":
        # It timed out while no server was up, or began before the clock was set back.
        if last.deadline <= draft.now or last.started_at > draft.now:
            later = replace(last, deadline=draft.now + _timeout(draft, undo))
            draft.put(replace(state, undo=replace(undo, attempts=(*undo.attempts[:-1], later))))
        draft.add_event(UndoResumed(state.id, undo.action, last.command_id))
        return PerformAttempt(state.key, undo=True, resumed=True)
    # A time beyond the wait is from before the clock was set back.
    is_later = undo.retry_at is not None and draft.now < undo.retry_at <= draft.now + _wait_after(last.number)
    if undo.retry_at and is_later and not (by_hand and _is_unanswered(by_hand, undo)):
        return undo.retry_at
    return _begin_attempt(draft, state, undo, by_hand)


def _begin_attempt(draft: RunDraft, state: StepState, undo: Undo, by_hand: OperatorOrder | None) -> PerformAttempt:
    attempt = next_attempt(draft, undo.attempts, _timeout(draft, undo))
    if by_hand is not None:
        attempt = replace(attempt, order=by_hand.id)
    kept = undo.attempts
    if len(kept) >= KEPT_ATTEMPTS:
        kept = (kept[0], *kept[2 - KEPT_ATTEMPTS :])
    draft.put(replace(state, undo=replace(undo, attempts=(*kept, attempt), retry_at=None)))
    return PerformAttempt(state.key, undo=True)


def _timeout(draft: RunDraft, undo: Undo) -> timedelta:
    action = draft.context.actions.action_class(undo.action)
    return action.default_timeout if action else timedelta(seconds=30)
