"""Kinds of history events.

The struct tag (default: the name in snake case) is `Event.kind`; the fields are the members of `Event.data`. Fields
without a default are always written, None as null; others if they differ from it. ``docs/reference/events.md`` is
generated from these docstrings (``python -m tests.support.event_tables``), its sections from the classes between
`EventKind` and the kinds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from trainmedic_server.domain.approval import Unanswered
from trainmedic_server.domain.run import Decision, Status


class EventKind(Struct, frozen=True, tag_field="event", tag=lambda name: re.sub(r"\B([A-Z])", r"_\1", name).lower()):
    """Content of an event."""


class OfDecision(EventKind, frozen=True):
    """Decisions on alerts."""

    alert: str


class Joined(OfDecision, frozen=True):
    """An open run of the playbook on the target takes the alert in."""

    fingerprint: str


class Decided(OfDecision, frozen=True):
    """A decision on an alert or a manual start. The members after `why` are those of a manual start."""

    playbook: str | None = None
    target: str | None = None
    why: str | None = None
    by_hand: bool = False
    repeats: str | UnsetType | None = UNSET  # UNSET, here and below: not written, unlike None
    note: str | None = None


class RunStarted(Decided, frozen=True, tag="started"):
    """The playbook acts."""


class ObserveOnly(Decided, frozen=True):
    """Mode `observe`: planned actions are only recorded."""


class Cooldown(Decided, frozen=True):
    """The guard `cooldown` blocks it."""


class RateLimited(Decided, frozen=True):
    """The guard `max_runs` blocks it."""


class ConcurrencyLimited(Decided, frozen=True):
    """The guard `max_concurrent` blocks it."""


class CapacityLimited(Decided, frozen=True):
    """The guard `min_available` blocks it."""


class BreakerOpen(Decided, frozen=True):
    """The breaker is open."""


class Paused(Decided, frozen=True):
    """A pause blocks it."""


class OutsideWindow(Decided, frozen=True):
    """It is outside the playbook's `only_during`."""


class Stale(Decided, frozen=True):
    """The alert is too old or had already resolved, a schedule's time was missed, or the server was down for too
    long."""


class NotAccepted(Decided, frozen=True):
    """`accept` of the [alert map](alert-map.md) refuses the alert, such as one of another cluster."""


class TargetUnknown(Decided, frozen=True):
    """The labels name no target, or an unknown one, or it is gone."""


class TargetAmbiguous(Decided, frozen=True):
    """The labels name several targets, or too little to select one."""


class TargetBusy(Decided, frozen=True):
    """Another run held the target until the alert ended or was too old; for a member of a group, it still does."""


class OfAlert(EventKind, frozen=True):
    """Alerts."""


class AlertRepeated(OfAlert, frozen=True):
    """The alert was reported again."""

    alert: str
    count: int


class AlertResolved(OfAlert, frozen=True):
    """The alert ended."""

    alert: str
    because: str | None


class AlertRejected(OfAlert, frozen=True, kw_only=True):
    """The alert is malformed: only its end is accepted, if readable. `index` is its position in the delivery. After
    the first 20 one event counts the rest."""

    alert: str | UnsetType | None = UNSET
    index: int | None = None
    why: str
    fingerprint: str | None = None
    delivery: str


class MatchFailed(OfAlert, frozen=True):
    """A playbook's condition could not be evaluated."""

    playbook: str
    alert: str
    why: str


class OfRun(EventKind, frozen=True):
    """Runs and their steps."""


class Retried(OfRun, frozen=True):
    """A person had the run retried, as run `run_id`."""

    run_id: str


class StartedLater(OfRun, frozen=True):
    """Run `run_id` started for a repeat of the blocked alert."""

    run_id: str


class WaitingForTarget(OfRun, frozen=True):
    """Another run locks the target, may lock it, or waits before it."""

    holder: str | None


class WaitingForResume(OfRun, frozen=True):
    """A pause holds the run."""

    pause: str
    why: str


class OfStep(OfRun, frozen=True):
    """A step with an action."""

    step: str
    action: str | None


class StepStarted(OfStep, frozen=True):
    """An attempt starts."""

    params: Mapping[str, Any]
    attempt: int
    command_id: str


class StepLocated(OfStep, frozen=True):
    """The step's nodes are known."""

    params: Mapping[str, Any]


class AttemptWaits(OfRun, frozen=True):
    """No response yet."""

    step: str
    why: str


class AttemptCalledOff(OfRun, frozen=True):
    """An attempt was cancelled before start. The next event states why."""

    step: str
    attempt: int
    command_id: str


class AttemptFailed(OfRun, frozen=True):
    """The attempt failed and is retried in `retry_in` seconds."""

    step: str
    attempt: int
    error: str | None
    retry_in: float


class StepResumed(OfStep, frozen=True):
    """A killed server's attempt is resumed."""

    command_id: str


class StepSucceeded(OfStep, frozen=True):
    """The action was applied."""

    output: Mapping[str, Any]


class StepFailed(OfStep, frozen=True):
    """The action was not applied, or in part, and is not retried."""

    error: str | None


class StepSkipped(OfRun, frozen=True):
    """The `when` was false, the alert resolved, there is no alert or job, or the action is not set up (`notify` without
    a channel)."""

    step: str
    when: str | None = None
    action: str | None = None
    why: str | UnsetType | None = UNSET


class StepStopped(OfStep, frozen=True):
    """The alert resolved: the step is stopped or not retried."""

    error: str | None
    output: Mapping[str, Any]


class StepUnknown(OfStep, frozen=True):
    """It is unknown whether the action was applied. Its undo, if any, is pending."""

    error: str | None


class LateReply(OfRun, frozen=True):
    """A reply to a step of unknown outcome arrived later."""

    command_id: str
    status: str
    rank: int | None
    output: Mapping[str, Any]


class QuestionEvent(OfRun, frozen=True):
    """A question, how often it was asked, and the number of nodes and GPUs concerned."""

    step: str
    message: str | None
    deadline: datetime | None
    asked: int | None
    by: Sequence[str] | None
    count: int | None
    to: str | None
    nodes: int | None
    gpus: int | None


class ApprovalRequested(QuestionEvent, frozen=True):
    """A question to `count` people of `by` on channel `to`, for the `asked`-th time."""


class ApprovalReminded(QuestionEvent, frozen=True):
    """No answer yet."""


class ApprovalEscalated(QuestionEvent, frozen=True):
    """No answer in time. Further approvers are asked."""


class ApprovalEnded(OfRun, frozen=True):
    """No answer: `resolved`, `timed_out`, `rejected_by_timeout`, `approved_by_timeout`, or `unanswered` with
    `asked_again_at`.
    """

    step: str
    outcome: Unanswered
    asked_again_at: datetime | None = None


class Closed(OfRun, frozen=True):
    """The run ended. `decision` is set if one ended it, such as `stale`."""

    status: Status
    message: str
    decision: Decision | None = None


class Ordered(EventKind, frozen=True):
    """Operator commands to a run. The actor is the operator."""

    note: str
    step: str | None


class RunApproved(Ordered, frozen=True, tag="approved"):
    """The question was approved."""


class RunRejected(Ordered, frozen=True, tag="rejected"):
    """The question was rejected."""


class CancelOrdered(Ordered, frozen=True):
    """The run is to end."""


class UndoOrdered(Ordered, frozen=True):
    """All changes are to be reverted."""


class UndoCloseOrdered(Ordered, frozen=True):
    """The pending undo is to be dropped."""


class OfUndo(EventKind, frozen=True):
    """Undos and leases."""


class OfUndoStep(OfUndo, frozen=True):
    """The undo of a step."""

    step: str
    action: str


class UndoStarted(OfUndoStep, frozen=True):
    """An undo starts."""

    params: Mapping[str, Any]
    because: str | None


class UndoResumed(OfUndoStep, frozen=True):
    """A killed server's undo is resumed."""

    command_id: str


class UndoDelayed(OfUndoStep, frozen=True):
    """The undo failed and is retried in `retry_in` seconds."""

    error: str | None
    attempt: int
    retry_in: float


class UndoDone(OfUndoStep, frozen=True):
    """The change is reverted."""

    output: Mapping[str, Any]


class UndoClosed(OfUndoStep, frozen=True):
    """A person dropped the pending undo."""

    note: str
    error: str | None


class LeaseLost(OfUndo, frozen=True):
    """A leased effect, or a drain, hold or reservation in Slurm, ended while it was needed."""

    step: str
    command_id: str
    place: str  # node or job
    why: str | None


class SetAgainStarted(OfUndo, frozen=True):
    """A lost effect is being reapplied."""

    step: str
    command_id: str


class SetAgainDone(OfUndo, frozen=True):
    """The effect was reapplied."""

    step: str
    command_id: str
    output: Mapping[str, Any]


class SetAgainHeld(OfUndo, frozen=True):
    """The effect is not reapplied."""

    why: str
    asked: bool  # True if reapplying was tried


class OfJob(EventKind, frozen=True):
    """Jobs and agents."""


class LifeEvent(OfJob, frozen=True):
    """A change of a job's state, with the content of its notice."""

    job: str
    reason: str = ""
    attempt: int | None = None
    node: str | None = None
    status: int | None = None
    rank: int | None = None
    restarts: bool | None = None
    pid: int | None = None
    error: str | None = None
    ranks: int | None = None


class JobEnded(LifeEvent, frozen=True):
    """The job ended normally, or, by another `actor` than `trainmedic`, a person stated that it was meant to end."""


class JobFailed(LifeEvent, frozen=True):
    """A process or attempt of the job failed."""


class JobRestarted(LifeEvent, frozen=True):
    """The launcher began another attempt."""


class JobGone(LifeEvent, frozen=True):
    """The job is silent, or its launcher reported it as gone."""


class JobReturned(LifeEvent, frozen=True):
    """The job recovered."""


class JobForgotten(OfJob, frozen=True):
    """The job stayed gone and no longer counts."""

    job: str


class JobEvaluated(OfJob, frozen=True):
    """Newest changed values, at most once a minute per job. `metrics` is a list of `metric`, `value` (`"NaN"` if not
    finite), `step` and `at`."""

    job: str
    metrics: Sequence[Mapping[str, Any]]


class JobKept(OfJob, frozen=True):
    """An operator [locked](../how-to/operate.md#findings-in-logs) the data of the job or an attempt."""

    job: str
    attempt: int | None = None
    note: str = ""


class JobReleased(OfJob, frozen=True):
    """An operator ended that lock."""

    job: str
    attempt: int | None = None


class AgentLost(OfJob, frozen=True):
    """A node's agent is silent."""

    node: str
    last_heard: datetime


class AgentReturned(OfJob, frozen=True):
    """The agent recovered."""

    node: str


class OfServer(EventKind, frozen=True):
    """The server."""


class ServerStarted(OfServer, frozen=True):
    """A server became the leader."""

    took_over_as: str | None = None  # name of this server; None if it is the only one


class OfPause(OfServer, frozen=True):
    """A pause, as it was ordered."""

    pause: str
    scope: str
    until: datetime | None = None
    starts_at: datetime | None = None
    every: str | None = None
    playbook: str | None = None
    node: str | None = None
    job: str | None = None
    labels: Mapping[str, str] = {}
    note: str = ""
    observe: bool = False


class PauseOrdered(OfPause, frozen=True):
    """An operator paused. `pause` is its ID."""


class Resumed(OfPause, frozen=True):
    """An operator ended a pause."""


class PauseBegan(OfPause, frozen=True):
    """A pause began at its scheduled time."""


class PauseEnded(OfPause, frozen=True):
    """A pause ended at its scheduled time."""


AS_WRITTEN = "as written"  # mode of a playbook that is no longer restricted to observing


class ModeChanged(OfPause, frozen=True):
    """An operator restricted a playbook to observing, or ended that."""

    mode: str | None = None  # `AS_WRITTEN`; None if it was restricted


class BreakerOpened(OfServer, frozen=True):
    """Runs would have touched too many nodes."""

    why: str
    run_id: str | None = None


class BreakerClosed(OfServer, frozen=True):
    """An operator closed the breaker."""


class ChannelTested(OfServer, frozen=True):
    """A person sent a test message to a channel."""

    channel: str
    sent: bool
    detail: str


class SignedIn(OfServer, frozen=True):
    """A browser session began. The actor is the user."""

    session: str
    address: str


class SignedOut(OfServer, frozen=True):
    """The actor ended the session of `name`."""

    session: str
    name: str


class ClockStepped(OfServer, frozen=True):
    """The machine's clock jumped by more than a minute."""

    kind: str
    seconds: int
