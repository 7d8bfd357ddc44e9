"""Runs: one execution of a playbook for one target. Times are aware UTC."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain.alert import STAND_INS, Identity
from trainmedic_server.domain.group_counts import GroupCounts
from trainmedic_server.domain.memory import RunMemory
from trainmedic_server.domain.modes import Mode, UndoTrigger
from trainmedic_server.domain.pause import OperatorPause


class Status(StrEnum):
    """State of a run. The first three are open."""

    RUNNING = "running"
    WAITING = "waiting"
    AWAITING_APPROVAL = "awaiting_approval"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    OBSERVED = "observed"
    NOT_STARTED = "not_started"

    @property
    def is_open(self) -> bool:
        return self in OPEN


OPEN = frozenset({Status.RUNNING, Status.WAITING, Status.AWAITING_APPROVAL})


class Decision(StrEnum):
    """What a playbook did about an alert, or why it did nothing."""

    STARTED = "started"
    JOINED = "joined"
    DUPLICATE = "duplicate"  # an earlier decision of the playbook on the alert holds
    COOLDOWN = "cooldown"
    RATE_LIMITED = "rate_limited"
    CONCURRENCY_LIMITED = "concurrency_limited"
    BREAKER_OPEN = "breaker_open"
    PAUSED = "paused"
    OBSERVE_ONLY = "observe_only"
    STALE = "stale"  # the alert was too old or had resolved, or a schedule's time was missed
    TARGET_UNKNOWN = "target_unknown"
    TARGET_AMBIGUOUS = "target_ambiguous"
    TARGET_BUSY = "target_busy"  # locked by another run until the alert was stale; or a member has an open run
    NOT_ACCEPTED = "not_accepted"  # the alert map's ``accept`` refuses the alert
    OUTSIDE_WINDOW = "outside_window"  # ``only_during``
    CAPACITY_LIMITED = "capacity_limited"  # ``guards.min_available``


# No item of the history has these decisions: events of the joined run record them.
_NEVER_RUNS = (Decision.JOINED, Decision.DUPLICATE)
FindableDecision = StrEnum("FindableDecision", {each.name: each.value for each in Decision if each not in _NEVER_RUNS})  # type: ignore[misc]

PASSING = frozenset(
    {
        Decision.COOLDOWN,
        Decision.RATE_LIMITED,
        Decision.CONCURRENCY_LIMITED,
        Decision.BREAKER_OPEN,
        Decision.PAUSED,
        Decision.NOT_ACCEPTED,
        Decision.OUTSIDE_WINDOW,
        Decision.CAPACITY_LIMITED,
    }
)
"""Refusals that may no longer apply at the alert's next report."""


class StepStatus(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    WAITING = "waiting"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    SKIPPED = "skipped"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    OBSERVED = "observed"

    @property
    def is_final(self) -> bool:
        return self not in (StepStatus.PENDING, StepStatus.RUNNING, StepStatus.WAITING)


class UndoStatus(StrEnum):
    """State of an undo.

    - ``available``: not pending; an operator can order it
    - ``armed``, ``running``: pending
    - ``dropped``: the action was certainly not applied, or how to revert it is not known
    - ``closed``: a person dropped it, with a note
    - ``failed``: an earlier release gave up; this one never does
    """

    AVAILABLE = "available"
    ARMED = "armed"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    DROPPED = "dropped"
    CLOSED = "closed"

    @property
    def is_owed(self) -> bool:
        return self in (UndoStatus.ARMED, UndoStatus.RUNNING)


class Attempt(Struct, frozen=True):
    number: int
    command_id: str
    """UUIDv7, kept after an unknown outcome, so that nothing is applied twice."""
    started_at: datetime  # Time of persisting, before acting
    deadline: datetime
    status: str = "running"
    """``running``, ``applied``, ``failed``, ``rejected``, ``stopped`` (the alert resolved), or ``unknown`` (it may have
    been applied).
    """
    ended_at: datetime | None = None
    error: str | None = None
    order: str | None = None  # Operator command that this undo attempt executes
    in_part: bool = False
    """True if it did not succeed, but a part was applied, which the undo must revert."""


class Undo(Struct, frozen=True):
    """Inverse of a step's action, pending from before the action until carried out."""

    trigger: UndoTrigger
    action: str
    params: Mapping[str, Any]
    undo_of: str
    """ID of the command to revert. A receiver that never applied it changes nothing."""
    status: UndoStatus = UndoStatus.ARMED
    because: str | None = None  # Why it was begun, dropped or closed; None before
    attempts: tuple[Attempt, ...] = ()
    """Oldest first; only the first and last of very many."""
    output: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    retry_at: datetime | None = None  # Time of the next attempt (aware UTC)


class StepState(Struct, frozen=True):
    phase: str  # ``approval`` (mode approve's first question), or one of `playbook.EVERY_PHASE`
    index: int  # from 0, in its phase
    id: str  # ID in the playbook, or ``step-<n>``
    kind: str  # action, wait_for (the alert's end), wait (for a time or condition) or approve
    action: str | None = None
    status: StepStatus = StepStatus.PENDING
    params: Mapping[str, Any] = field(default_factory=dict)
    attempts: tuple[Attempt, ...] = ()
    output: Mapping[str, Any] = field(default_factory=dict)  # for an approval, the approvers and their notes
    error: str | None = None
    message: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    deadline: datetime | None = None  # when a wait or approval times out; None for never
    retry_at: datetime | None = None  # next attempt, poll, reminder or repetition of a question
    undo: Undo | None = None  # None for an irreversible action, and before the first attempt
    target: str | None = None  # ``jobs`` if it works on the run's further targets. None for the run's target.

    @property
    def key(self) -> tuple[str, int]:
        return (self.phase, self.index)

    @property
    def changed_nothing(self) -> bool:
        """Return whether the action found the wanted state, such as a drained node."""
        return self.status is StepStatus.SUCCEEDED and self.output.get("changed") is False

    @property
    def why_not(self) -> str:
        """Why the step did not succeed; never empty."""
        message = None if self.kind == "approve" else self.message  # a question is no reason
        reasons = (self.error, message, *(attempt.error for attempt in reversed(self.attempts)))
        known = next((text for text in reasons if text and text.strip()), None)
        return known or f"it ended as {self.status.replace('_', ' ')} without a reason"

    @property
    def undo_attempts(self) -> tuple[Attempt, ...]:
        return self.undo.attempts if self.undo else ()


class Run(Struct, frozen=True):
    """An execution of a playbook, or a decision against one."""

    id: str
    """UUIDv7, sortable by time."""
    playbook: str
    version: str  # Hash of the playbook's text
    target: Target | None  # None if the labels named no target
    mode: Mode
    """Strictest of the server's, the playbook's and the operators' at admission. For members, see `is_vouched_for`."""
    status: Status
    decision: Decision
    alert: Identity
    alert_name: str
    alert_labels: Mapping[str, str]
    created_at: datetime
    steps: tuple[StepState, ...] = ()
    ended_at: datetime | None = None
    acted_at: datetime | None = None
    """When its first harmful attempt was persisted; None if it changed nothing."""
    waiting_on: str | None = None
    """While open and idle: ``target``, ``resolved``, ``retry``, ``approval``, ``resume`` (paused), ``members`` (of a
    group), ``window`` (``only_during``), ``turn`` (``queue``) or ``wait`` (for a time or condition). Otherwise None.
    """
    message: str = ""
    touched: tuple[str, ...] = ()
    """Nodes that it changed or was about to change, sorted. Filled only on reading the history."""
    started_by: str | None = None  # Operator of a manual start; None for an alert
    repeats: str | None = None  # ID of the run that this one repeats
    request_key: str | None = None  # Idempotency key of a manual start
    request_digest: str | None = None
    """Digest of the start that used the key. None for retries and older runs."""
    parent: str | None = None
    """Parent run of a member, whose alerts and orders count for it too."""
    batch: int | None = None
    """A member's batch, or the one that a parent checks, from 0; None before."""
    group: GroupCounts | None = None
    """Filled only for a parent run on reading the history."""
    members_owe: bool = False
    """True for a closed parent run if a member owed an undo."""
    original_labels: Mapping[str, str] | None = None  # Labels before the alert map; None if unchanged
    also: tuple[Target, ...] = ()
    """Further targets, as of the lock: jobs on the target's node, or other names of the target job."""
    memory: RunMemory | None = None  # Earlier runs, if the playbook uses them

    def step(self, key: tuple[str, int]) -> StepState:
        for step in self.steps:
            if step.key == key:
                return step
        raise KeyError(key)

    def with_step(self, changed: StepState, **changes: Any) -> Run:
        steps = tuple([changed if step.key == changed.key else step for step in self.steps])
        return replace(self, steps=steps, **changes)

    @property
    def sent_labels(self) -> Mapping[str, str]:  # as Alertmanager sent them
        return self.alert_labels if self.original_labels is None else self.original_labels

    @property
    def every_label(self) -> Mapping[str, str]:  # the sent labels and, with precedence, those of the alert map
        return self.alert_labels if self.original_labels is None else {**self.original_labels, **self.alert_labels}

    @property
    def original_alert_name(self) -> str | None:  # None if no alert map changed the alert
        return None if self.original_labels is None else self.original_labels.get("alertname", "")

    @property
    def target_key(self) -> str:
        return self.target.key if self.target else ""

    @property
    def targets(self) -> tuple[Target, ...]:
        return self.also if self.target is None else (self.target, *self.also)

    def targets_of(self, step: StepState) -> tuple[Target, ...]:
        """Return what a step works on. Empty if no job runs on the node."""
        if step.target is not None:
            return self.also
        return () if self.target is None else (self.target,)

    @property
    def is_group(self) -> bool:
        return self.target is not None and self.target.kind is TargetKind.GROUP

    @property
    def is_limited(self) -> bool:
        """True for a refusal by ``max_runs``, also while its ``on_limited`` steps run."""
        return self.decision is Decision.RATE_LIMITED

    @property
    def alerts_run_id(self) -> str:
        """ID of the run whose alerts count: a member's parent, or itself."""
        return self.parent or self.id

    @property
    def is_vouched_for(self) -> bool:
        """True for a member whose list a person approved: the breaker does not count it."""
        return self.parent is not None and self.mode is Mode.APPROVE

    @property
    def has_alert(self) -> bool:  # False for a stand-in (`domain.beginnings`, or a manual start)
        return not self.alert.fingerprint.startswith(STAND_INS)

    @property
    def is_open(self) -> bool:
        return self.status in OPEN

    @property
    def owes_undo(self) -> bool:
        return self.members_owe or any(step.undo and step.undo.status.is_owed for step in self.steps)

    @property
    def undone_at(self) -> datetime | None:
        """End of the last undo; None without one, or if one is pending."""
        done = [step.undo.attempts[-1] for step in self.steps if step.undo and step.undo.status is UndoStatus.DONE]
        return None if self.owes_undo else max((last.ended_at for last in done if last.ended_at), default=None)

    @property
    def delayed_undo(self) -> Undo | None:
        """The undo whose last attempt failed."""
        begun = (step.undo for step in self.steps if step.undo and step.undo.status is UndoStatus.RUNNING)
        return next((undo for undo in begun if undo.error is not None), None)

    @property
    def action_taken(self) -> str | None:
        applied = StepStatus.OBSERVED if self.status is Status.OBSERVED else StepStatus.SUCCEEDED
        steps = (step for step in self.steps if step.status is applied and not step.changed_nothing)
        names = [step.action for step in steps if step.action]
        return ", ".join(names) or None

    @property
    def success(self) -> bool | None:
        """None if open, observed or not started."""
        if self.is_open or self.status in (Status.OBSERVED, Status.NOT_STARTED):
            return None
        return self.status is Status.SUCCEEDED


class OrderKind(StrEnum):
    APPROVE = "approve"
    REJECT = "reject"
    CANCEL = "cancel"
    UNDO = "undo"
    CLOSE_UNDO = "close_undo"


class OperatorOrder(Struct, frozen=True):
    id: str
    run_id: str
    kind: OrderKind
    actor: str
    at: datetime
    note: str = ""
    step: str | None = None  # Approval step; None for other kinds
    asked: int | None = None
    """Round of the answered question. None for other kinds and from earlier releases."""


class Event(Struct, frozen=True):
    """One entry of the append-only history."""

    kind: str
    at: datetime
    run_id: str | None = None
    actor: str = "trainmedic"
    data: Mapping[str, Any] = field(default_factory=dict)
    seq: int | None = None
    """Position in the history, from 1; None before it is stored."""


class Controls(Struct, frozen=True):
    """Switches that survive restarts."""

    paused: bool = False  # True if everything was paused at the last check; the ``pauses`` decide
    paused_by: str | None = None
    paused_at: datetime | None = None
    breaker_open: bool = False
    """True after runs would have acted on too many nodes: none starts until an operator closes the breaker."""
    breaker_opened_at: datetime | None = None
    breaker_reason: str | None = None
    alive_at: datetime | None = None  # last heartbeat of a server; None before the first
    pauses: tuple[OperatorPause, ...] = ()
    breaker_closed_at: datetime | None = None  # by a person. None if never, or if the clock was set back to before it.

    def breaker_counts_from(self, window_start: datetime) -> datetime:
        """Return the later of the window's start and the last closing."""
        closed_at = self.breaker_closed_at
        return window_start if closed_at is None else max(window_start, closed_at)
