"""API models of runs, their alerts and events."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

from pydantic import ConfigDict, Field

from trainmedic_core.plain_text import json_bytes
from trainmedic_core.target import NO_PARTS
from trainmedic_server.api import examples
from trainmedic_server.api.change_views import ChangeView
from trainmedic_server.api.finding_views import RunFinding
from trainmedic_server.api.view import View
from trainmedic_server.domain import approval
from trainmedic_server.domain.alert import AlertRecord, AlertStatus
from trainmedic_server.domain.effect import Effect, EffectVerdict
from trainmedic_server.domain.playbook import Mode, UndoTrigger
from trainmedic_server.domain.run import Decision, Event, OrderKind, Run, Status, StepState, StepStatus, UndoStatus
from trainmedic_server.ports.store import RunRecord
from trainmedic_server.reports.curves import NO_PROMETHEUS

_ANSWERED = (StepStatus.SUCCEEDED, StepStatus.REJECTED)  # of approvals


class GroupView(View):
    """Counts of a group's members; all but `owing` and `batch` add up to `total`."""

    total: int
    not_begun: int
    open: int
    succeeded: int
    failed: int
    skipped: int = Field(description="Not started: vanished, in cooldown, or busy.")
    cancelled: int
    observed: int
    owing: int = Field(description="Closed with a pending undo.")
    batch: int | None = Field(description="The last batch that began, from 1; null before.")


class HistoryItem(View):
    """A run, or a decision not to start one."""

    model_config = ConfigDict(json_schema_extra={"examples": [examples.ITEM]})

    run_id: str
    timestamp: datetime = Field(description="Time of the decision.")
    alert_name: str
    alert_labels: dict[str, str]
    playbook: str
    target: str | None = Field(description="Such as gpu:node-1/GPU-5f3a, node:node-1, job:llm-1, cluster.")
    node: str | None = Field(description="The target's node.")
    gpu: str | None = Field(description="The target's GPU.")
    job: str | None = Field(description="The target's training job.")
    mode: Mode
    status: Status
    decision: Decision
    action_taken: str | None = Field(
        description="Applied actions in order; in mode observe, those that would be applied."
    )
    success: bool | None = Field(description="null if open, observed or not started.")
    message: str
    duration_ms: int | None = Field(description="null while open.")
    touched: list[str] = Field(
        description="Nodes that it changed or was about to change: the target's, and those of a job."
    )
    owes_undo: bool = Field(description="Whether an undo is pending.")
    undo_error: str | None = Field(description="Why the last attempt of a pending undo failed; null if none has.")
    undone_at: datetime | None = Field(description="End of the last undo; null without one, or while one is pending.")
    waiting_on: str | None = Field(
        description="target, resolved, retry, approval, resume, members, window, turn or wait; null if it does not "
        "wait."
    )
    deadline: datetime | None = Field(
        description="When the present activity of an open run ends by itself; null if never."
    )
    approved_by: list[str] = Field(description="Approvers, in order.")
    decided_at: datetime | None = Field(description="Time of the last approval or rejection.")
    started_by: str | None = Field(description="Who started it manually; null if an alert did.")
    repeats: str | None = Field(description="The run that it retries.")
    parent: str | None = Field(description="The parent run of a group's member.")
    batch: int | None = Field(description="Batch of a member, from 1.")
    group: GroupView | None = Field(description="Counts of a parent run's members; null for other runs.")
    original_alert_name: str | None = Field(
        description="The alertname that Alertmanager sent; null if no alert map changed the alert."
    )
    original_labels: dict[str, str] | None = Field(
        description="The labels that Alertmanager sent; null if no alert map changed them."
    )
    version: str = Field(description="Hash of the playbook's text that the run uses.")
    also: list[str] = Field(description="Further targets: the jobs on the target's node, or other names of the job.")


class HistoryPage(View):
    items: list[HistoryItem]
    next: str | None = Field(description="Cursor of the next page; null on the last.")


class AlertView(View):
    fingerprint: str
    status: AlertStatus
    labels: dict[str, str]
    annotations: dict[str, str]
    starts_at: datetime
    ends_at: datetime | None
    generator_url: str
    first_heard_at: datetime
    last_heard_at: datetime
    count: int = Field(description="How often it was reported.")
    resolved_at: datetime | None
    resolved_because: str | None = Field(description="alertmanager, superseded, asked or assumed.")
    original_labels: dict[str, str] | None = Field(
        description="The labels that Alertmanager sent; null if no alert map changed them."
    )


class AttemptView(View):
    number: int
    command_id: str
    started_at: datetime
    deadline: datetime
    status: str
    ended_at: datetime | None
    error: str | None


class UndoView(View):
    trigger: UndoTrigger
    action: str
    params: dict[str, Any]
    undo_of: str
    status: UndoStatus
    because: str | None
    attempts: list[AttemptView]
    output: dict[str, Any]
    error: str | None
    retry_at: datetime | None = Field(description="Time of the next attempt.")


class StepView(View):
    phase: str = Field(description="approval, steps, check, on_success, on_failure or on_limited.")
    index: int
    id: str
    kind: str
    action: str | None
    status: StepStatus
    params: dict[str, Any]
    attempts: list[AttemptView]
    output: dict[str, Any]
    error: str | None
    message: str | None
    started_at: datetime | None
    ended_at: datetime | None
    deadline: datetime | None
    undo: UndoView | None
    targets: list[str] = Field([], description="What it works on, if that is not the run's target.")


class EventView(View):
    seq: int
    kind: str
    at: datetime
    run_id: str | None
    actor: str
    data: dict[str, Any]


class OrderView(View):
    kind: OrderKind
    actor: str
    at: datetime
    note: str
    step: str | None


class EffectView(View):
    """The alert's metric 10 minutes before the run acted, then, and 10 minutes after.

    It is a measurement, not proof that the run was the cause.
    """

    verdict: EffectVerdict = Field(description="pending until it is measured.")
    reason: str | None = Field(description="Reason for the verdict, or for its absence.")
    acted_at: datetime
    due_at: datetime | None = Field(description="Time of the measurement; null once it is over.")
    before: float | None = Field(description="The metric 10 minutes before the act.")
    at: float | None = Field(description="The metric at the act.")
    after: float | None = Field(description="The metric 10 minutes after the act.")
    better: Literal["lower", "higher"] | None = Field(description="Direction in which the metric improves.")
    operator: str | None = Field(description="Operator of the alert's condition, if the query is from its rule.")
    limit: float | None = Field(description="Limit in the alert's condition, if it is one number.")
    query: str | None = Field(description="The Prometheus query.")
    origin: Literal["playbook", "rule"] | None = Field(description="Origin of the query.")
    series: list[tuple[float, float | None]] = Field(
        description="Unix time in seconds and value, every 30 s; null if it was no number.",
        examples=[[[1769860920.0, 88.0], [1769860950.0, 71.5]]],
    )


def effect_view(run: Run, effect: Effect | None, measures_effects: bool) -> EffectView | None:
    """Return None if the run changed nothing or belongs to a group."""
    if run.acted_at is None or run.is_group or run.parent is not None:
        return None
    if effect is not None:
        return EffectView.model_validate(effect)
    why_none = "it acted before effects were measured" if measures_effects else NO_PROMETHEUS
    missing = Effect(run.id, run.playbook, run.acted_at, None).not_measured(why_none)
    return EffectView.model_validate(missing).model_copy(update={"origin": None})


class HeldByView(View):
    run_id: str
    playbook: str
    target: str
    alert_name: str
    since: datetime = Field(description="Start of that run.")
    doing: str = Field(description="Its present activity, for people.")
    until: datetime | None = Field(
        description="Latest end of its present activity; null if it has no time limit. More steps may follow."
    )
    at_deadline: str | None = Field(description="What happens then, for people.")
    held_by: HeldByView | None = Field(None, description="The run for whose target it waits in turn; five at most.")
    is_certain: bool = Field(True, description="False if its GPU may be another.")


class NextView(View):
    now: str | None = Field(description="The present step; null if it is at none.")
    waits_for: str | None = Field(description="What it waits for, for people; null if it does not wait.")
    holder: str | None = Field(description="The run that locks its target, may lock it, or waits before it.")
    held_by: HeldByView | None = Field(None, description="Details of that run.")
    waiting_since: datetime | None = Field(None, description="Since when it waits for its target.")
    not_before: datetime | None = Field(description="Earliest time at which it continues by itself.")
    deadline: datetime | None = Field(description="End of its present activity; null if never.")
    at_deadline: str | None = Field(description="What happens then, for people.")
    step: str | None = Field(description="The next step; null if the run then ends.")
    kind: str | None = Field(description="action, wait_for, wait, approve or undo.")
    action: str | None = Field(description="Action of that step, or of the undo.")
    params: dict[str, Any] = Field(description="Its parameters, rendered as far as known.")
    question: str | None = Field(description="Its question, if it is an approval.")
    note: str | None = Field(description="Why its condition or parameters are not known yet.")
    outcome: str | None = Field(
        description="The run's end without further steps: succeeded, failed, or cancelled. After its end: tried again."
    )


class RunView(HistoryItem):
    model_config = ConfigDict(json_schema_extra={"examples": [examples.RUN]})

    ended_at: datetime | None
    acted_at: datetime | None = Field(description="Time of its first change.")
    alerts: list[AlertView]
    findings: list[RunFinding] = Field(description="The first log findings that raised the alerts.")
    steps: list[StepView]
    events: list[EventView]
    orders: list[OrderView]
    effect: EffectView | None = Field(description="Effect on the alert's metric; null if nothing was changed.")
    members: list[str] = Field(description="The fixed list of a parent run, as targets; empty for other runs.")
    next: NextView | None = Field(description="What it does next, as far as known; null if it is over.")
    changed: list[ChangeView] = Field(description="What it has changed and not reverted, the newest first.")


def item(run: Run) -> HistoryItem:
    return HistoryItem.of(run, **_item_members(run))


def page(runs: list[Run], cursor: str | None) -> HistoryPage:
    return HistoryPage(items=[item(run) for run in runs], next=cursor)


def record(
    stored: RunRecord,
    findings: Sequence[RunFinding] = (),
    measures_effects: bool = False,
    upcoming: NextView | None = None,
    changed: Sequence[ChangeView] = (),
) -> RunView:
    run = stored.run
    return RunView.of(
        run,
        **_item_members(run),
        alerts=[_alert(alert) for alert in stored.alerts],
        findings=list(findings),
        steps=[_step(run, step) for step in run.steps],
        events=[event(stored_event) for stored_event in stored.events],
        orders=[OrderView.model_validate(order) for order in stored.orders],
        effect=effect_view(run, stored.effect, measures_effects),
        members=stored.members,
        next=upcoming,
        changed=list(changed),
    )


def one_line(view: View) -> bytes:
    """Return ASCII JSON, with Unicode's line separators escaped."""
    return json_bytes(view.model_dump(mode="json"))


def event(stored: Event) -> EventView:
    return EventView.model_validate(stored)


def _step(run: Run, step: StepState) -> StepView:
    view = StepView.model_validate(step)
    if step.target is None:
        return view
    return view.model_copy(update={"targets": [target.key for target in run.also]})


def _alert(stored: AlertRecord) -> AlertView:
    members = (stored, stored.alert)
    known = {name: getattr(of, name) for of in members for name in of.__struct_fields__}
    return AlertView.model_validate({**known, "original_labels": stored.alert.original})


def _is_taken_back(run: Run) -> bool:
    reverted = (step for step in run.steps if step.undo is not None and step.undo.status is UndoStatus.DONE)
    return run.undone_at is not None and not all(step.changed_nothing for step in reverted)


def _item_members(run: Run) -> dict[str, Any]:
    target = run.target
    return {
        "run_id": run.id,
        "timestamp": run.created_at,
        "target": target.key if target else None,
        **(target.parts if target else NO_PARTS),
        "message": "; ".join(filter(None, (run.message, "taken back"))) if _is_taken_back(run) else run.message,
        "duration_ms": round((run.ended_at - run.created_at).total_seconds() * 1000) if run.ended_at else None,
        "undo_error": run.delayed_undo.error if run.delayed_undo else None,
        "deadline": _deadline_of(run),
        "approved_by": approval.approved_by(run),
        "decided_at": _decided_at(run),
        "batch": run.batch + 1 if run.batch is not None else None,
        "also": [target.key for target in run.also],
    }


def _deadline_of(run: Run) -> datetime | None:
    """Return the present step's or attempt's end; None if it does not end by itself."""
    if not run.is_open:
        return None
    at = next((step for step in run.steps if step.status in (StepStatus.RUNNING, StepStatus.WAITING)), None)
    if at is None:
        return None
    if at.deadline is None and at.status is StepStatus.RUNNING and at.attempts:
        return at.attempts[-1].deadline
    return at.deadline


def _decided_at(run: Run) -> datetime | None:
    return max((step.ended_at for step in _decided(run) if step.ended_at is not None), default=None)


def _decided(run: Run) -> list[StepState]:  # approvals that people answered, not a timeout
    answers = (step for step in run.steps if step.kind == "approve" and step.status in _ANSWERED)
    return [step for step in answers if approval.approvers(step) or step.output.get("by")]
