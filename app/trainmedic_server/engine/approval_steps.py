"""Progress of approve steps: question, answers, timeouts."""

from __future__ import annotations

from datetime import datetime, timedelta

from msgspec.structs import replace

from trainmedic_core import errors, words
from trainmedic_server.domain import approval
from trainmedic_server.domain import event_kinds as kinds
from trainmedic_server.domain.approval import StepAhead, Terms, Unanswered
from trainmedic_server.domain.playbook import APPROVAL, CHECK, ApproveStep
from trainmedic_server.domain.run import OrderKind, Status, StepState, StepStatus
from trainmedic_server.engine import after_resolve, group_plan, preview
from trainmedic_server.engine.plan_values import RunDraft, Wait
from trainmedic_server.ports.playbooks import Scope


def proceed(draft: RunDraft, state: StepState, definition: ApproveStep) -> Wait | None:
    """Ask, or continue to wait. Return None once the step is final."""
    if state.status is StepStatus.PENDING:
        asked = _ask(draft, state, definition)
        if asked is None:
            return None
        state = asked
    if _apply_answers(draft, state):
        return None
    state = draft.run.step(state.key)
    if after_resolve.is_moot(draft, state):
        _end_moot(draft, state)
        return None
    deadline = _deadline(draft, state)
    state = draft.run.step(state.key)  # `RunDraft.timely` restarts it if the clock was set back
    if deadline and draft.now >= deadline:
        lapsed = _time_out(draft, state, definition)
        if lapsed is None:
            return None
        state = lapsed
    current = _remind_or_ask_again(draft, state, definition)
    if current is None:
        return None
    draft.set_status(Status.AWAITING_APPROVAL, "approval")
    moments = [moment for moment in (_deadline(draft, current), current.retry_at) if moment is not None]
    return Wait(min(moments, default=None))


def is_rejected(draft: RunDraft) -> bool:
    """Return whether a rejection waits to be planned."""
    asked = approval.waiting_step(draft.run)
    answers = approval.answers(asked, draft.outside.orders) if asked is not None else ()
    return any(order.kind is OrderKind.REJECT for order in answers)


def _end_moot(draft: RunDraft, state: StepState) -> None:
    """End a question whose alert resolved. A run that acted continues at its next ``wait_for: resolved``, if any."""
    continues = draft.run.acted_at is not None and after_resolve.next_wait(draft.run, state) is not None
    is_of_check = state.phase == CHECK  # no further batch starts
    status = StepStatus.SKIPPED if continues or is_of_check else StepStatus.CANCELLED
    draft.end(state, status, error="the alert resolved before anybody approved", retry_at=None)
    draft.add_event(kinds.ApprovalEnded(state.id, Unanswered.RESOLVED))
    if continues and not is_of_check:
        after_resolve.skip_to_wait(draft, state)


def _deadline(draft: RunDraft, state: StepState) -> datetime | None:
    return draft.timely(state, is_question=True).deadline


def _ask(draft: RunDraft, state: StepState, definition: ApproveStep) -> StepState | None:
    """Return None if the question's template failed, which fails the step."""
    question, names = definition.question, draft.scope()
    try:
        message = draft.playbook.message(state.phase, state.index, names)
    except errors.ExpressionError as error:
        draft.end(state, StepStatus.FAILED, error=str(error), started_at=state.started_at or draft.now)
        draft.add_event(kinds.StepFailed(state.id, state.action, str(error)))
        return None
    steps = _steps_ahead(draft, state, names)
    asked = Terms.of(state).asked + 1 if state.params else 1  # has parameters if it was asked before
    # Answers without the number of their question, as earlier releases stored them, belong to an earlier question.
    void = tuple(order.id for order in draft.outside.orders if order.step == state.id and order.asked is None)
    otherwise = definition.without_answer(definition.on_timeout)
    terms = Terms(steps, question.by, question.count, otherwise, asked, to=question.to, void=void)
    message = message or _default_question(draft, state)
    deadline = draft.now + definition.timeout if definition.timeout else None
    draft.run = replace(draft.run, message=message)
    draft.add_event(_question_event(kinds.ApprovalRequested, state.id, message, deadline, terms))
    return draft.put(
        replace(
            state,
            status=StepStatus.WAITING,
            started_at=draft.now,
            deadline=deadline,
            retry_at=draft.now + question.remind if question.remind else None,  # the next reminder or question
            message=message,
            params=terms.as_data(),
            output={},
        )
    )


def _steps_ahead(draft: RunDraft, state: StepState, names: Scope) -> tuple[StepAhead, ...]:
    run, playbook, actions, topology = draft.run, draft.playbook, draft.context.actions, draft.context.topology()
    if draft.group is None or state.phase not in (APPROVAL, CHECK):
        return preview.steps_after(state, run, playbook, names, actions, topology)
    firing = [record.alert for record in draft.outside.alerts]
    if state.phase == APPROVAL:
        return preview.steps_of_group(draft.group.members, run, playbook, firing, actions, topology)
    rules, batch = group_plan.settings(playbook), (run.batch or 0) + 1
    size = rules.batch(batch, len(draft.group.members))
    members = group_plan.chosen(rules, draft.group, size, run.id, topology)
    return preview.steps_of_group(members, run, playbook, firing, actions, topology, batch + 1) if members else ()


def _default_question(draft: RunDraft, state: StepState) -> str:
    run, summary = draft.run, draft.playbook.definition.summary
    if draft.group is not None and state.phase == CHECK:
        then = "start the next batch" if draft.group.left() else "end the run"
        over = f"Batch {(run.batch or 0) + 1} of {run.target_key} is over ({draft.group.counts})."
        return f"{over} May {run.playbook} {then}?"
    of = f"{words.count(len(draft.group.members), 'member')} of " if draft.group is not None else ""
    on = ", ".join(target.key for target in run.targets) or run.target_key
    asked = f"May {run.playbook} act on {of}{on}?"
    return f"{asked} {summary}" if summary else asked


def _apply_answers(draft: RunDraft, state: StepState) -> bool:
    """Return whether the answers end the step."""
    answers = approval.answers(state, draft.outside.orders)
    # Reports count a step as answered if it ended before its deadline or has none (`sql_store/tallies`, `run_facts`).
    # The deadline may have passed since, as in a downtime, which does not count: it is removed then.
    deadline = state.deadline if state.deadline is not None and draft.now < state.deadline else None
    rejected = next((order for order in answers if order.kind is OrderKind.REJECT), None)
    if rejected is not None:
        output = {"by": rejected.actor, "note": rejected.note, "approved_by": list(approval.approvers(state))}
        error = f"rejected by {rejected.actor}"
        draft.end(state, StepStatus.REJECTED, output=output, error=error, retry_at=None, deadline=deadline)
        return True
    names = tuple(dict.fromkeys(order.actor for order in answers if order.kind is OrderKind.APPROVE))
    if not names:
        return False
    output = {"by": ", ".join(names), "note": answers[-1].note, "approved_by": list(names)}
    if len(names) >= Terms.of(state).count:
        draft.run = replace(draft.run, message="")
        draft.end(state, StepStatus.SUCCEEDED, output=output, retry_at=None, deadline=deadline)
        return True
    if names != approval.approvers(state):
        draft.put(replace(state, output=output))
    return False


def _time_out(draft: RunDraft, state: StepState, definition: ApproveStep) -> StepState | None:
    """Escalate, postpone the next question, or end the step. Return None if it has ended."""
    terms, question = Terms.of(state), definition.question
    if definition.on_timeout == "escalate" and question.escalate is not None and not terms.escalated:
        second = question.escalate
        terms = replace(
            terms,
            escalated=True,
            by=(*terms.by, *second.by) if terms.by else (),
            to=second.to,
            on_timeout=definition.without_answer(second.on_timeout),
        )
        deadline = draft.now + (second.timeout or definition.timeout or timedelta(0))
        draft.add_event(_question_event(kinds.ApprovalEscalated, state.id, state.message, deadline, terms))
        remind_at = draft.now + question.remind if question.remind else None
        return draft.put(
            replace(state, started_at=draft.now, deadline=deadline, params=terms.as_data(), retry_at=remind_at)
        )
    if question.ask_again is not None:
        again_at = draft.now + question.ask_again
        draft.add_event(kinds.ApprovalEnded(state.id, Unanswered.ASKED_AGAIN_LATER, again_at))
        return draft.put(replace(state, deadline=None, retry_at=again_at, params={**state.params, "lapsed": True}))
    outcome, status, error = _END_BY_TIMEOUT[definition.last_resort]
    output = {"by": "nobody", "note": "nobody answered in time", "approved_by": list(approval.approvers(state))}
    approved = status is StepStatus.SUCCEEDED
    if approved:
        draft.run = replace(draft.run, message="")
    draft.end(state, status, error=error, retry_at=None, output=output if approved else dict(state.output))
    draft.add_event(kinds.ApprovalEnded(state.id, outcome))
    return None


_END_BY_TIMEOUT = {  # by the step's `last_resort`
    "approve": (Unanswered.APPROVED_BY_TIMEOUT, StepStatus.SUCCEEDED, None),
    "reject": (Unanswered.REJECTED_BY_TIMEOUT, StepStatus.REJECTED, "nobody approved in time"),
    "fail": (Unanswered.TIMED_OUT, StepStatus.TIMED_OUT, "nobody approved in time"),
    "continue": (Unanswered.TIMED_OUT, StepStatus.TIMED_OUT, "nobody approved in time"),
}


def _remind_or_ask_again(draft: RunDraft, state: StepState, definition: ApproveStep) -> StepState | None:
    """Return None if asking again ended the step."""
    lapsed, question = Terms.of(state).lapsed, definition.question
    every = question.ask_again if lapsed else question.remind
    if every is None or state.retry_at is None:
        return state
    if state.retry_at > draft.now + every:  # the clock was set back
        return draft.put(replace(state, retry_at=draft.now + every))
    if draft.now < state.retry_at:
        return state
    if lapsed:
        return _ask(draft, state, definition)
    draft.add_event(
        _question_event(kinds.ApprovalReminded, state.id, state.message, _deadline(draft, state), Terms.of(state))
    )
    return draft.put(replace(state, retry_at=draft.now + every))


def _question_event(
    kind: type[kinds.QuestionEvent], step: str, message: str | None, deadline: datetime | None, terms: Terms
) -> kinds.QuestionEvent:
    return kind(step, message, deadline, terms.asked, terms.by, terms.count, terms.to, len(terms.nodes), terms.gpus)
