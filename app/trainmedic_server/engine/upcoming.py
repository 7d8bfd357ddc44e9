"""Look-ahead on a run's next step by the rules of ``plan`` and ``steps``.

Results of unfinished steps are marked unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from trainmedic_core import duration, errors
from trainmedic_server.domain.alert import AlertRecord, decisive
from trainmedic_server.domain.approval import Terms
from trainmedic_server.domain.job_verdict import VerdictsOnJob
from trainmedic_server.domain.playbook import APPROVAL, CHECK, FREE_WAITS, ApproveStep, PollStep, WaitStep
from trainmedic_server.domain.run import OperatorOrder, OrderKind, Run, StepState, StepStatus, Undo, UndoStatus
from trainmedic_server.domain.upcoming import HeldBy, Upcoming, waiting
from trainmedic_server.engine import group_plan, scope, step_sequence, waits, windows
from trainmedic_server.engine.looking import Sight
from trainmedic_server.engine.turns import TURN
from trainmedic_server.ports.playbooks import CompiledPlaybook, Scope, Step

_NEXT_BATCH = "the next batch starts then, if members are left"


def of_run(
    run: Run,
    playbook: CompiledPlaybook | None,
    alerts: Sequence[AlertRecord],
    held_by: HeldBy | None = None,
    verdicts: Mapping[str, VerdictsOnJob] = MappingProxyType({}),
    orders: Sequence[OperatorOrder] = (),
    sight: Sight | None = None,
) -> Upcoming | None:
    """Return what the run, or a closed run's undo, does next; None if nothing. `playbook` is None if unreadable."""
    if not run.is_open:
        return _next_undo(run, alerts)
    if playbook is None:
        return Upcoming(note="its playbook cannot be read")
    if run.is_group and run.waiting_on == group_plan.MEMBERS:
        return Upcoming(waits_for=str(run.group) if run.group else "its members", note=run.message or _NEXT_BATCH)
    failed = step_sequence.failed_step(run, playbook)
    at = step_sequence.next_step(run, playbook, failed)
    if failed is None and run.batch is not None:  # the parent's check of a batch comes before its last steps
        at = step_sequence.next_of_check(run) or at
    if at is None:
        return Upcoming(outcome="failed" if failed else "succeeded")
    if ended_by := next((order for order in orders if order.kind in (OrderKind.CANCEL, OrderKind.UNDO)), None):
        now = {"now": at.id, **_doing(at, step_sequence.step_definition(playbook, at), alerts, sight)}
        return Upcoming(**now, outcome="cancelled", note=f"{ended_by.actor} has ended it")
    firing = [record.alert for record in alerts]
    names = scope.LazyScope(lambda: scope.build(run, playbook, firing, verdicts=verdicts))
    if at.status is StepStatus.PENDING:
        return replace(
            _first_applicable(playbook, names, _steps_from(run, at), failed is not None), **_blocking(run, held_by)
        )
    then = _first_applicable(playbook, names, _steps_from(run, at)[1:], failed is not None)
    if run.is_group and at.phase == APPROVAL:
        then = Upcoming(note="its members start then")
    elif at.phase == CHECK and then.step is None:
        then = Upcoming(note=_NEXT_BATCH)
    doing = _doing(at, step_sequence.step_definition(playbook, at), alerts, sight)
    queue = _blocking(run, held_by) if run.waiting_on == "target" else {}
    return replace(then, now=at.id, **{**doing, **queue})


def _steps_from(run: Run, state: StepState) -> Sequence[StepState]:
    sequence = _sequence_of(state)
    steps = [step for step in run.steps if _sequence_of(step) == sequence]
    return steps[steps.index(state) :]


def _sequence_of(state: StepState) -> str | None:
    return state.phase if state.phase in ("on_failure", CHECK) else None  # the steps, then ``on_success``


def holder(run: Run, ahead: Upcoming | None, *, is_certain: bool = True) -> HeldBy:
    """Return how runs that wait for this one's target show it."""
    ahead = ahead or Upcoming()
    doing = waiting(ahead.waits_for) if ahead.waits_for else f"carries out step {ahead.now or ahead.step or '?'}"
    return HeldBy(
        *(run.id, run.playbook, run.target_key, run.alert_name, run.created_at),
        *(doing, ahead.deadline, ahead.at_deadline, ahead.held_by, is_certain),
    )


def _blocking(run: Run, held_by: HeldBy | None) -> dict[str, Any]:
    # Fields of `Upcoming` for a run that cannot continue now.
    if run.waiting_on == "target":
        by = f", {_how(held_by)} run {held_by.run_id}" if held_by else ""
        holder_id = held_by.run_id if held_by else None
        targets = ", ".join(target.key for target in run.targets)
        waits_for = {"waits_for": f"{targets}{by}", "holder": holder_id, "held_by": held_by}
        # A run that has begun no step has waited since admission.
        has_waited = run.acted_at is None and not any(step.started_at for step in run.steps)
        return {**waits_for, "waiting_since": run.created_at if has_waited else None}
    if run.waiting_on == TURN:
        return {"waits_for": "its turn: max_concurrent of the playbook is reached"}
    if run.waiting_on == windows.WINDOW:
        return {"waits_for": f"its next window: {run.message}"}
    if run.waiting_on == "resume":
        return {"waits_for": "an operator to resume the server"}
    return {}


def _how(held_by: HeldBy) -> str:
    if not held_by.is_certain:
        return f"which may be the same GPU as {held_by.target} of"
    return "behind" if held_by.held_by is not None else "held by"


def _doing(state: StepState, definition: Step, alerts: Sequence[AlertRecord], sight: Sight | None) -> dict[str, Any]:
    # Fields of `Upcoming` for a step that has begun.
    if isinstance(definition, FREE_WAITS):
        of_step = sight if sight is not None and sight.key == state.key else None
        waits_for = waits.awaited_text(definition, state, of_step)
        if not isinstance(definition, PollStep):
            return {"waits_for": waits_for, "not_before": state.deadline}
        otherwise = _ends_with("continue" if definition.on_error == "continue" else definition.on_timeout)
        return {"waits_for": waits_for, "deadline": state.deadline, "at_deadline": otherwise}
    if isinstance(definition, WaitStep):
        otherwise = _ends_with("continue" if definition.on_error == "continue" else definition.on_timeout)
        return {"waits_for": _resolution_of(alerts), "deadline": state.deadline, "at_deadline": otherwise}
    if isinstance(definition, ApproveStep):
        terms = Terms.of(state)
        waits_for = f"approval: {state.message.removesuffix('.')}" if state.message else "approval"
        if terms.lapsed:
            return {"waits_for": f"{waits_for} (asked again then)", "not_before": state.retry_at}
        return {"waits_for": waits_for, "deadline": state.deadline, "at_deadline": _unanswered(definition, terms)}
    if state.retry_at is not None:
        number = len(state.attempts) + 1
        return {"waits_for": f"attempt {number} of {state.action}", "not_before": state.retry_at}
    deadline = state.attempts[-1].deadline if state.attempts else None
    return {"deadline": deadline, "at_deadline": "the attempt has failed" if deadline else None}


def _unanswered(definition: ApproveStep, terms: Terms) -> str:
    if terms.on_timeout == "escalate":
        return "it is escalated"
    if definition.question.ask_again is not None:
        return f"it is asked again {duration.write(definition.question.ask_again)} later"
    return _ends_with(definition.without_answer(terms.on_timeout))


def _ends_with(on_timeout: str) -> str:
    words = {"fail": "the run fails", "reject": "the run is rejected", "approve": "it counts as approved"}
    return words.get(on_timeout, "the run continues")


def _resolution_of(alerts: Sequence[AlertRecord]) -> str:
    names = sorted({record.alert.name for record in decisive(alerts) if not record.is_resolved})
    return f"{', '.join(names) or 'the alert'} to resolve"


def _first_applicable(
    playbook: CompiledPlaybook, names: Scope, steps: Sequence[StepState], has_failed: bool
) -> Upcoming:
    for state in steps:
        note = None
        definition = step_sequence.step_definition(playbook, state)
        try:
            if definition.when is not None and not playbook.when(state.phase, state.index, names):
                continue
        except errors.ExpressionError:
            note = f"only if {definition.when}"  # it depends on steps that have not ended
        return _rendered(playbook, state, definition, names, note)
    return Upcoming(outcome="failed" if has_failed else "succeeded")


def _rendered(
    playbook: CompiledPlaybook, state: StepState, definition: Step, names: Scope, note: str | None
) -> Upcoming:
    upcoming = Upcoming(step=state.id, kind=state.kind, action=state.action, note=note)
    try:
        if isinstance(definition, ApproveStep):
            is_of_mode = state.phase == APPROVAL
            question = None if is_of_mode else playbook.message(state.phase, state.index, names)
            return replace(upcoming, question=question or "Mode approve: may this run act?")
        if state.kind == "action":
            params = playbook.params(state.phase, state.index, names)
            return replace(upcoming, params=params.model_dump(mode="json", by_alias=True, exclude_none=True))
    except errors.ExpressionError as error:
        unknown = f"its parameters depend on the run: {error}"
        return replace(upcoming, note=f"{note}; {unknown}" if note else unknown)
    return upcoming


def _next_undo(run: Run, alerts: Sequence[AlertRecord]) -> Upcoming | None:
    for state in reversed(run.steps):
        if state.undo is not None and state.undo.status.is_owed:
            return _of_undo(state, state.undo, alerts)
    return None


def _of_undo(state: StepState, undo: Undo, alerts: Sequence[AlertRecord]) -> Upcoming:
    upcoming = Upcoming(step=state.id, kind="undo", action=undo.action, params=undo.params)
    if undo.status is UndoStatus.ARMED:
        return replace(upcoming, waits_for=_resolution_of(alerts))
    if undo.retry_at is not None:
        return replace(upcoming, waits_for="another attempt", not_before=undo.retry_at, note=undo.error)
    return replace(upcoming, now=state.id, deadline=undo.attempts[-1].deadline if undo.attempts else None)
