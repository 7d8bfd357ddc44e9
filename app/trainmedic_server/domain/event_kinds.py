"""The kinds of events that the history can have, each with what it says.

A kind is a struct: its tag, by default its name in snake case, is `Event.kind`; its fields are the members of
`Event.data`, in this order. A field without a default is always written, as null where it is None. A field with a
default is written only where it differs from it. The classes between `EventKind` and the kinds are the sections of
``docs/reference/events.md``, whose tables are made from these docstrings and fields
(``python -m tests.support.event_tables``).

Not here: `Event` itself (``domain.run``), and how one is made of a kind and read (``domain.event_codec``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from trainmedic_server.domain.approval import Unanswered
from trainmedic_server.domain.run import Decision, Status


class EventKind(Struct, frozen=True, tag_field="event", tag=lambda name: re.sub(r"\B([A-Z])", r"_\1", name).lower()):
    """What an event says."""


class OfDecision(EventKind, frozen=True):
    """What becomes of an alert."""

    alert: str


class Joined(OfDecision, frozen=True):
    """An open run of the same playbook and target takes the alert in."""

    fingerprint: str


class Decided(OfDecision, frozen=True):
    """A decision on an alert or a manual start. The members after `why` are those of a manual start."""

    playbook: str | None = None
    target: str | None = None
    why: str | None = None
    by_hand: bool = False
    repeats: str | UnsetType | None = UNSET
    note: str | None = None


class RunStarted(Decided, frozen=True, tag="started"):
    """The playbook acts."""


class ObserveOnly(Decided, frozen=True):
    """In mode `observe`: what would be done is recorded."""


class Cooldown(Decided, frozen=True):
    """The playbook's guard `cooldown` blocks it."""


class RateLimited(Decided, frozen=True):
    """The playbook's guard `max_runs` blocks it."""


class ConcurrencyLimited(Decided, frozen=True):
    """The playbook's guard `max_concurrent` blocks it."""


class BreakerOpen(Decided, frozen=True):
    """The breaker is open."""


class Paused(Decided, frozen=True):
    """A pause blocks it. That a person has paused is [`pause_ordered`](#the-server)."""


class Stale(Decided, frozen=True):
    """The alert is too old, or had resolved before."""


class NotAccepted(Decided, frozen=True):
    """`accept` of the [alert map](alert-map.md) refuses the alert, such as one of another cluster."""


class TargetUnknown(Decided, frozen=True):
    """The alert's labels name no target, or an unknown node."""


class TargetAmbiguous(Decided, frozen=True):
    """The alert's labels name several targets, or too little is known to say which one is meant."""


class TargetBusy(Decided, frozen=True):
    """The target was held by another run until the alert was over."""


class OfAlert(EventKind, frozen=True):
    """Alerts."""


class AlertRepeated(OfAlert, frozen=True):
    """The alert was reported again."""

    alert: str
    count: int


class AlertResolved(OfAlert, frozen=True):
    """The alert is over."""

    alert: str
    because: str | None


class AlertRejected(OfAlert, frozen=True, kw_only=True):
    """The alert is malformed: nothing was decided on it, but its end is accepted if it can be read. `alert` is its
    name, or null, and `index` its place in the delivery. The first 20 of a delivery are listed, and one more event
    counts the others."""

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
    """A person has had the run tried again, as the run `run_id`."""

    run_id: str


class StartedLater(OfRun, frozen=True):
    """The run `run_id` has started for an alert that a guard had refused, when it was reported again."""

    run_id: str


class WaitingForTarget(OfRun, frozen=True):
    """Another run holds the target."""

    holder: str | None


class WaitingForResume(OfRun, frozen=True):
    """A pause holds the run."""

    pause: str
    why: str


class OfStep(OfRun, frozen=True):
    """A step that acts."""

    step: str
    action: str | None


class StepStarted(OfStep, frozen=True):
    """An attempt begins."""

    params: Mapping[str, Any]
    attempt: int
    command_id: str


class StepLocated(OfStep, frozen=True):
    """It is known on which nodes the step works."""

    params: Mapping[str, Any]


class AttemptWaits(OfRun, frozen=True):
    """Nobody answers yet."""

    step: str
    why: str


class AttemptCalledOff(OfRun, frozen=True):
    """The attempt was on record and is not made, for a reason that the next event says."""

    step: str
    attempt: int
    command_id: str


class AttemptFailed(OfRun, frozen=True):
    """The attempt is followed by another one, in `retry_in` seconds."""

    step: str
    attempt: int
    error: str | None
    retry_in: float


class StepResumed(OfStep, frozen=True):
    """An attempt that a killed server had begun is taken up."""

    command_id: str


class StepSucceeded(OfStep, frozen=True):
    """The action was applied."""

    output: Mapping[str, Any]


class StepFailed(OfStep, frozen=True):
    """The action was not applied, and is not tried again."""

    error: str | None


class StepSkipped(OfRun, frozen=True):
    """The step's `when` was false, the alert resolved before it began, or the server is not set up for its action, such
    as a `notify` without a notification channel."""

    step: str
    when: str | None = None
    action: str | None = None
    why: str | UnsetType | None = UNSET


class StepStopped(OfStep, frozen=True):
    """The alert resolved after the step had begun: it is stopped, or not tried again."""

    error: str | None
    output: Mapping[str, Any]


class StepUnknown(OfStep, frozen=True):
    """Nobody knows whether the action was applied. Its undo is owed."""

    error: str | None


class LateReply(OfRun, frozen=True):
    """An answer to a step of unknown outcome came later."""

    command_id: str
    status: str
    rank: int | None
    output: Mapping[str, Any]


class WaitStarted(OfRun, frozen=True):
    """The step waits for the alert to resolve."""

    step: str
    wait_for: str
    deadline: datetime | None


class WaitEnded(OfRun, frozen=True):
    """The wait is over: `resolved`, with the reason, or `timed_out`."""

    step: str
    outcome: Literal["resolved", "timed_out"]
    because: str | UnsetType | None = UNSET


class QuestionEvent(OfRun, frozen=True):
    """A question, asked for the `asked`-th time, and how many nodes and GPUs it concerns."""

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
    """People are asked: `count` of those in `by`, on the channel `to`. It is the `asked`-th time, and about so many
    `nodes` and `gpus`."""


class ApprovalReminded(QuestionEvent, frozen=True):
    """Nobody has answered yet."""


class ApprovalEscalated(QuestionEvent, frozen=True):
    """Nobody has answered in time: those are asked whom the playbook names next."""


class ApprovalEnded(OfRun, frozen=True):
    """The question ended without an answer: `resolved`, `timed_out`, `rejected_by_timeout`, `approved_by_timeout`, or
    `unanswered` with `asked_again_at`."""

    step: str
    outcome: Unanswered
    asked_again_at: datetime | None = None


class Closed(OfRun, frozen=True):
    """The run is over. `decision` is why it did not act, where it was refused before it could."""

    status: Status
    message: str
    decision: Decision | None = None


class Ordered(EventKind, frozen=True):
    """What operators tell a run. The actor is the operator."""

    note: str
    step: str | None


class RunApproved(Ordered, frozen=True, tag="approved"):
    """The answer to a question."""


class RunRejected(Ordered, frozen=True, tag="rejected"):
    """The answer to a question."""


class CancelOrdered(Ordered, frozen=True):
    """The run is to end."""


class UndoOrdered(Ordered, frozen=True):
    """What the run did is to be taken back."""


class UndoCloseOrdered(Ordered, frozen=True):
    """The duty to take something back is to end."""


class OfUndo(EventKind, frozen=True):
    """Undos and leases."""


class OfUndoStep(OfUndo, frozen=True):
    """The undo of a step."""

    step: str
    action: str


class UndoStarted(OfUndoStep, frozen=True):
    """An undo begins."""

    params: Mapping[str, Any]
    because: str | None


class UndoResumed(OfUndoStep, frozen=True):
    """An undo that a killed server had begun is taken up."""

    command_id: str


class UndoDelayed(OfUndoStep, frozen=True):
    """An attempt did not succeed, and another one follows in `retry_in` seconds."""

    error: str | None
    attempt: int
    retry_in: float


class UndoDone(OfUndoStep, frozen=True):
    """It is taken back."""

    output: Mapping[str, Any]


class UndoClosed(OfUndoStep, frozen=True):
    """A person has ended the duty."""

    note: str
    error: str | None


class LeaseLost(OfUndo, frozen=True):
    """A lease ran out while it was wanted."""

    step: str
    command_id: str
    place: str
    why: str | None


class SetAgainStarted(OfUndo, frozen=True):
    """The effect of a lost lease is being brought about again."""

    step: str
    command_id: str


class SetAgainDone(OfUndo, frozen=True):
    """The effect of a lost lease is brought about again."""

    step: str
    command_id: str
    output: Mapping[str, Any]


class SetAgainHeld(OfUndo, frozen=True):
    """Something speaks against bringing it about again."""

    why: str
    asked: bool


class OfJob(EventKind, frozen=True):
    """Jobs and agents."""


class LifeEvent(OfJob, frozen=True):
    """A change of whether a job lives, with what its notice says."""

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
    """The job ended as it should, as it or its launcher has said. With another `actor` than `trainmedic`: a person has
    said of a job that was gone that it was meant to end."""


class JobFailed(LifeEvent, frozen=True):
    """A process or an attempt of the job failed, as the job or its launcher has said."""


class JobRestarted(LifeEvent, frozen=True):
    """The job's launcher has started another attempt, as it has said."""


class JobGone(LifeEvent, frozen=True):
    """Nothing is heard of the job any more, or its launcher has said so."""


class JobReturned(LifeEvent, frozen=True):
    """The job is back."""


class JobForgotten(OfJob, frozen=True):
    """The job stayed gone, and does not count any more."""

    job: str


class JobEvaluated(OfJob, frozen=True):
    """The job reported an evaluation. `metrics` is a list of `metric`, `value` (`"NaN"` where it was not a finite
    number), `step` and `at`. There is at most one event a minute for each job, with the newest values that changed.
    After a restart of the server the newest values of each job are recorded again, with the same `at`."""

    job: str
    metrics: Sequence[Mapping[str, Any]]


class JobKept(OfJob, frozen=True):
    """An operator [locked](../how-to/monitoring.md#findings-in-logs) what is known of the job, or of an attempt."""

    job: str
    attempt: int | None = None
    note: str = ""


class JobReleased(OfJob, frozen=True):
    """An operator has ended that lock."""

    job: str
    attempt: int | None = None


class AgentLost(OfJob, frozen=True):
    """Nothing is heard of a node's agent any more."""

    node: str
    last_heard: datetime


class AgentReturned(OfJob, frozen=True):
    """The agent is back."""

    node: str


class OfServer(EventKind, frozen=True):
    """The server."""


class ServerStarted(OfServer, frozen=True):
    """A server works from now on. `took_over_as` is its name, where there are several."""

    took_over_as: str | None = None


class OfPause(OfServer, frozen=True):
    """A pause, as far as it is given."""

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
    """An operator pauses. `pause` is the pause's ID. Older histories have `paused` without a run instead."""


class Resumed(OfPause, frozen=True):
    """An operator has ended a pause."""


class PauseBegan(OfPause, frozen=True):
    """A pause has begun by itself, when its time had come; noticed within 10 s. One that begins as it is ordered is
    `pause_ordered` the first time."""


class PauseEnded(OfPause, frozen=True):
    """A pause has ended by itself, when its time had come; noticed within 10 s."""


AS_WRITTEN = "as written"
"""The mode of a playbook that is not kept to observing any more."""


class ModeChanged(OfPause, frozen=True):
    """An operator has a playbook only observe, or ends that (`mode`: `as written`)."""

    mode: str | None = None


class BreakerOpened(OfServer, frozen=True):
    """Runs would have touched too many nodes."""

    why: str
    run_id: str | None = None


class BreakerClosed(OfServer, frozen=True):
    """An operator has closed the breaker. It counts only acts after this."""


class ChannelTested(OfServer, frozen=True):
    """A person has sent a test message to a channel."""

    channel: str
    sent: bool
    detail: str


class SignedIn(OfServer, frozen=True):
    """A browser's session began. The actor is whose it is."""

    session: str
    address: str


class SignedOut(OfServer, frozen=True):
    """A person, the actor, has ended the session of `name`."""

    session: str
    name: str


class ClockStepped(OfServer, frozen=True):
    """The machine's clock jumped by more than a minute."""

    kind: str
    seconds: int
