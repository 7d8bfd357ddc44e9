"""Validation and storage of operator commands, in one transaction, so that only one person can decide."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from trainmedic_server import errors
from trainmedic_server.domain import approval
from trainmedic_server.domain import event_kinds as kinds
from trainmedic_server.domain.approval import AskedQuestion, Terms
from trainmedic_server.domain.event_codec import recorded
from trainmedic_server.domain.run import OperatorOrder, OrderKind, Run, StepState
from trainmedic_server.engine import undoing
from trainmedic_server.ports.store import Transaction


def accept(
    tx: Transaction,
    order: OperatorOrder,
    groups: frozenset[str],
    question: AskedQuestion | None = None,
    undo: OperatorOrder | None = None,
) -> None:
    """Store a command if it fits the run's state.

    `groups` are its author's; `question` is the answered one, if known. `undo` is stored too if there is something to
    undo. Raises NotFound, Conflict, NotEntitled.
    """
    run = tx.run(order.run_id)
    if run is None:
        raise errors.NotFound(f"there is no run {order.run_id}")
    match order.kind:
        case OrderKind.APPROVE | OrderKind.REJECT:
            step = _answered_step(tx, run, order, groups, question)
            order = replace(order, step=step.id, asked=Terms.of(step).asked)
        case OrderKind.CANCEL:
            if not run.is_open:
                raise errors.Conflict(f"run {run.id} is closed already; it is {run.status}")
        case OrderKind.UNDO:
            if not _can_be_undone(tx, run):
                is_done = run.undone_at is not None
                why = "is undone already" if is_done else "has applied nothing that can be undone"
                raise errors.Conflict(f"run {run.id} {why}")
        case OrderKind.CLOSE_UNDO:
            if run.is_open:
                raise errors.Conflict(f"run {run.id} is open; cancel it first, then close its pending undo")
            if not _can_be_closed(tx, run):
                raise errors.Conflict(f"run {run.id} has no pending undo to close")
    accepted = [order, undo] if undo is not None and _can_be_undone(tx, run) else [order]
    for new_order in accepted:
        tx.add_order(new_order)
        content = _EVENT_OF_ORDER[new_order.kind](new_order.note, new_order.step)
        tx.append([recorded(content, new_order.at, run.id, new_order.actor)])


def _can_be_undone(tx: Transaction, run: Run) -> bool:
    """A group is undone through its members."""
    return undoing.can_be_undone(run) or bool(run.is_group and tx.members_with_undo(run.id, undoing.OPEN_TO_ORDERS))


def _can_be_closed(tx: Transaction, run: Run) -> bool:
    return undoing.can_be_closed(run) or bool(run.is_group and tx.members_with_undo(run.id, undoing.OPEN_TO_CLOSING))


def _answered_step(
    tx: Transaction, run: Run, order: OperatorOrder, groups: frozenset[str], question: AskedQuestion | None
) -> StepState:
    asked = approval.waiting_step(run)
    if asked is None:
        raise errors.Conflict(f"run {run.id} does not wait for approval; it is {run.status}")
    terms = Terms.of(asked)
    if question not in (None, AskedQuestion(asked.id, terms.asked)):
        raise errors.Conflict(f"run {run.id} now asks a different question; read it first")  # or the next round
    answers = approval.answers(asked, tx.orders_of([run.id]).get(run.id, ()))
    approvers = {earlier.actor for earlier in answers if earlier.kind is OrderKind.APPROVE}
    if len(approvers) >= terms.count or len(approvers) < len(answers):  # approved, or one answer is a rejection
        raise errors.Conflict(f"step {asked.id} of run {run.id} has been decided already")
    if order.kind is OrderKind.APPROVE and not terms.may_be_answered_by(order.actor, groups):
        raise errors.NotEntitled(f"step {asked.id} of run {run.id} is approved by {' or '.join(terms.by)}")
    if order.kind is OrderKind.APPROVE and order.actor in approvers:
        needed = f"it takes {terms.count} different people"
        raise errors.Conflict(f"{order.actor} has approved step {asked.id} of run {run.id} already; {needed}")
    return asked


_EVENT_OF_ORDER: Mapping[OrderKind, type[kinds.Ordered]] = {
    OrderKind.APPROVE: kinds.RunApproved,
    OrderKind.REJECT: kinds.RunRejected,
    OrderKind.CANCEL: kinds.CancelOrdered,
    OrderKind.UNDO: kinds.UndoOrdered,
    OrderKind.CLOSE_UNDO: kinds.UndoCloseOrdered,
}
