"""A run: one execution of a playbook for one target, its steps, attempts and undo duties.

Everything here is a frozen value; ``engine`` makes new ones, the store keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from trainmedic_core.target import Target
from trainmedic_server.domain.alert import BY_HAND, Identity
from trainmedic_server.domain.modes import Mode, UndoTrigger
from trainmedic_server.domain.pause import OperatorPause


class Status(StrEnum):
    """Where a run stands. The first three are open, the others closed."""

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
    """Why a playbook acted on an alert, or did not."""

    STARTED = "started"
    JOINED = "joined"
    DUPLICATE = "duplicate"
    COOLDOWN = "cooldown"
    RATE_LIMITED = "rate_limited"
    CONCURRENCY_LIMITED = "concurrency_limited"
    BREAKER_OPEN = "breaker_open"
    PAUSED = "paused"
    OBSERVE_ONLY = "observe_only"
    STALE = "stale"
    TARGET_UNKNOWN = "target_unknown"
    TARGET_AMBIGUOUS = "target_ambiguous"
    TARGET_BUSY = "target_busy"
    NOT_ACCEPTED = "not_accepted"


PASSING = frozenset(
    {
        Decision.COOLDOWN,
        Decision.RATE_LIMITED,
        Decision.CONCURRENCY_LIMITED,
        Decision.BREAKER_OPEN,
        Decision.PAUSED,
        Decision.NOT_ACCEPTED,
    }
)
"""Reasons not to start that may have passed when the same alert is reported again."""


class StepStatus(StrEnum):
    """Where a step stands."""

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
    """The status of an undo.

    ``armed`` and ``running`` are duties that are still owed. ``available`` is none: an operator can order it.
    ``dropped``: the action was certainly not applied. ``closed``: a person has ended the duty, with a note why.
    ``failed``: an earlier release gave it up; this one gives none up.
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
    """One try of an action, or of its undo. Times are aware UTC datetimes."""

    number: int
    """Counted from 1, within the step or its undo."""
    command_id: str
    """The id that whoever carries the action out knows the command by; a UUIDv7. An attempt that follows one of
    unknown outcome has the same id, so that nothing is applied twice."""
    started_at: datetime
    """When it was put on record, which is before anybody was asked to act."""
    deadline: datetime
    """When it counts as timed out, and when its command expires."""
    status: str = "running"
    """``running``, ``applied``, ``failed``, ``rejected``, ``stopped`` (the alert resolved), or ``unknown``: it may have
    been applied."""
    ended_at: datetime | None = None
    """When its outcome was known; None while it runs."""
    error: str | None = None
    """For a person: why it was not applied; None where it was."""
    order: str | None = None
    """The id of the operator's order that an attempt of an undo answers."""
    in_part: bool = False
    """Whether a part of it was applied although it did not succeed."""


class Undo(Struct, frozen=True):
    """The recorded inverse of a step's action: a duty from before the act until it is carried out."""

    trigger: UndoTrigger
    """When it becomes due by itself."""
    action: str
    """The name of the action that takes the step's action back."""
    params: Mapping[str, Any]
    """The parameters of that action."""
    undo_of: str
    """The id of the command that it takes back. A receiver that never applied that command changes nothing."""
    status: UndoStatus = UndoStatus.ARMED
    """Its current status."""
    because: str | None = None
    """For a person: why it was begun, dropped or closed; None before."""
    attempts: tuple[Attempt, ...] = ()
    """The tries so far, oldest first: all of them, or the first and the last where there were very many."""
    output: Mapping[str, Any] = field(default_factory=dict)
    """What the last attempt returned."""
    error: str | None = None
    """For a person: why the last attempt failed; None where none has."""
    retry_at: datetime | None = None
    """When the next attempt is due, an aware UTC datetime; None where none waits."""


class StepState(Struct, frozen=True):
    """One step of a run. Times are aware UTC datetimes."""

    phase: str
    """``approval`` (asked by mode approve before anything else), ``steps``, ``on_success`` or ``on_failure``."""
    index: int
    """Its place within the phase, counted from 0."""
    id: str
    """Its name in the playbook, or ``step-<n>``; by this name operators and expressions speak of it."""
    kind: str
    """``action``, ``wait_for`` or ``approve``."""
    action: str | None = None
    """The name of its action; None for the other kinds."""
    status: StepStatus = StepStatus.PENDING
    """Its current status."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """The rendered and checked parameters of its action, as plain data."""
    attempts: tuple[Attempt, ...] = ()
    """Every try of its action so far, oldest first."""
    output: Mapping[str, Any] = field(default_factory=dict)
    """What the last attempt returned; of an approval who gave it, and their note."""
    error: str | None = None
    """For a person: why it did not succeed."""
    message: str | None = None
    """For a person: what an approval asks, or why the step was skipped or would be."""
    started_at: datetime | None = None
    """When it began to act or to wait."""
    ended_at: datetime | None = None
    """When it became final."""
    deadline: datetime | None = None
    """When a wait or an approval ends by itself; None where it waits for ever."""
    retry_at: datetime | None = None
    """When the next attempt is due; None where none waits."""
    undo: Undo | None = None
    """What takes its action back; None where nothing does, or before the first attempt."""

    @property
    def key(self) -> tuple[str, int]:
        return (self.phase, self.index)

    @property
    def undo_attempts(self) -> tuple[Attempt, ...]:
        return self.undo.attempts if self.undo else ()


class Run(Struct, frozen=True):
    """One item of the history: an execution of a playbook, or a decision not to start one.

    Times are aware UTC datetimes.
    """

    id: str
    """A UUIDv7, so that ids sort by time."""
    playbook: str
    """The playbook's name."""
    version: str
    """The hash of the playbook's text, by which the store keeps that text."""
    target: Target | None
    """What it works on; None where the labels named no target."""
    mode: Mode
    """The stricter of the server's and the playbook's mode, when the run was admitted."""
    status: Status
    """Its current status."""
    decision: Decision
    """Why it was started, or was not."""
    alert: Identity
    """The alert that it was admitted for; those that joined it are kept by the store."""
    alert_name: str
    """The ``alertname`` of that alert."""
    alert_labels: Mapping[str, str]
    """All labels of that alert, as the alert map made them."""
    created_at: datetime
    """When it was admitted."""
    steps: tuple[StepState, ...] = ()
    """In the order of the playbook: the question of mode approve, ``steps``, ``on_success``, ``on_failure``."""
    ended_at: datetime | None = None
    """When it closed; None while it is open."""
    acted_at: datetime | None = None
    """When its first attempt of a harmful action was put on record; None where it has changed nothing."""
    waiting_on: str | None = None
    """``target``, ``resolved``, ``retry``, ``approval`` or ``resume`` (the server is paused) while the run is open
    and idle; else None."""
    message: str = ""
    """For a person: while it is open what it waits for or has last met with, then how it ended."""
    touched: tuple[str, ...] = ()
    """The nodes on which it has changed something, or was about to, sorted by name. Only the history reads them."""
    started_by: str | None = None
    """The operator who started it by hand; None where an alert did."""
    repeats: str | None = None
    """The id of the run that it repeats, by an operator's order."""
    request_key: str | None = None
    """What the client that started it by hand named its request, so that a repeated one starts nothing again."""
    original_labels: Mapping[str, str] | None = None
    """Labels of its alert as Alertmanager sent them. None if no alert map changed them."""

    def step(self, key: tuple[str, int]) -> StepState:
        for step in self.steps:
            if step.key == key:
                return step
        raise KeyError(key)

    def with_step(self, changed: StepState, **changes: Any) -> Run:
        """This run with the step of the same key replaced, and with `changes` of its own."""
        steps = tuple([changed if step.key == changed.key else step for step in self.steps])
        return replace(self, steps=steps, **changes)

    @property
    def sent_labels(self) -> Mapping[str, str]:
        """Labels of its alert as Prometheus and Alertmanager know them."""
        return self.alert_labels if self.original_labels is None else self.original_labels

    @property
    def every_label(self) -> Mapping[str, str]:
        """Labels of its alert, with those that an alert map dropped."""
        return self.alert_labels if self.original_labels is None else {**self.original_labels, **self.alert_labels}

    @property
    def original_alert_name(self) -> str | None:
        """The ``alertname`` as it was sent. None if no alert map changed the alert's labels."""
        return None if self.original_labels is None else self.original_labels.get("alertname", "")

    @property
    def target_key(self) -> str:
        """The key of its target; empty where it has none."""
        return self.target.key if self.target else ""

    @property
    def has_alert(self) -> bool:
        """False where a person started it and no alert fires that could resolve."""
        return not self.alert.fingerprint.startswith(BY_HAND)

    @property
    def is_open(self) -> bool:
        return self.status in OPEN

    @property
    def owes_undo(self) -> bool:
        return any(step.undo and step.undo.status.is_owed for step in self.steps)

    @property
    def undone_at(self) -> datetime | None:
        """When the last of its undos was carried out. None where none was, or one is still owed."""
        done = [step.undo.attempts[-1] for step in self.steps if step.undo and step.undo.status is UndoStatus.DONE]
        return None if self.owes_undo else max((last.ended_at for last in done if last.ended_at), default=None)

    @property
    def delayed_undo(self) -> Undo | None:
        """An undo that was tried, did not succeed and is still owed; None where there is none."""
        begun = (step.undo for step in self.steps if step.undo and step.undo.status is UndoStatus.RUNNING)
        return next((undo for undo in begun if undo.error is not None), None)

    @property
    def action_taken(self) -> str | None:
        """The actions that were applied, in order, or would have been in mode observe; None for none."""
        applied = StepStatus.OBSERVED if self.status is Status.OBSERVED else StepStatus.SUCCEEDED
        names = [step.action for step in self.steps if step.action and step.status is applied]
        return ", ".join(names) or None

    @property
    def success(self) -> bool | None:
        """True or False once a run that acted has closed; None while open, observed or not started."""
        if self.is_open or self.status in (Status.OBSERVED, Status.NOT_STARTED):
            return None
        return self.status is Status.SUCCEEDED


class OrderKind(StrEnum):
    """What an operator can order a run to do."""

    APPROVE = "approve"
    REJECT = "reject"
    CANCEL = "cancel"
    UNDO = "undo"
    CLOSE_UNDO = "close_undo"


class OperatorOrder(Struct, frozen=True):
    """An operator's decision about a run."""

    id: str
    """A UUIDv7."""
    run_id: str
    """The run that it is about."""
    kind: OrderKind
    """What is to be done."""
    actor: str
    """Who gave it: the name that belongs to the token."""
    at: datetime
    """When it was given, an aware UTC datetime."""
    note: str = ""
    """What the operator wrote beside it."""
    step: str | None = None
    """The id of the step that is approved or rejected; None for the other kinds."""
    asked: int | None = None
    """How often that step had asked by then: the round that is answered. None for the other kinds, and of an earlier
    release."""


class Event(Struct, frozen=True):
    """One line of the append-only history."""

    kind: str
    """What happened, such as ``step_started``; ``docs/reference/events.md`` lists all."""
    at: datetime
    """When it happened, an aware UTC datetime."""
    run_id: str | None = None
    """The run that it is about; None for what concerns the server alone (paused, breaker opened, started)."""
    actor: str = "trainmedic"
    """Who did it: an operator's name, or the server itself."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What else is to be told, as plain data; its members depend on the kind."""
    seq: int | None = None
    """Its place in the history, counted from 1 and given by the store; None before it is stored."""


class Controls(Struct, frozen=True):
    """The switches that outlive a restart. Times are aware UTC datetimes."""

    paused: bool = False
    """Whether everything was paused when the switches were last looked at: the server starts nothing and does no new
    harm; undos go on. ``pauses`` are what counts."""
    paused_by: str | None = None
    paused_at: datetime | None = None
    breaker_open: bool = False
    """Whether too many nodes were acted on, so that no run starts until an operator closes the breaker."""
    breaker_opened_at: datetime | None = None
    breaker_reason: str | None = None
    """For a person: how many nodes of how many."""
    alive_at: datetime | None = None
    """The server's last heartbeat, by which a new start knows for how long it was down."""
    pauses: tuple[OperatorPause, ...] = ()
    """The pauses that are not over, those to come included, in the order in which they were ordered."""
    breaker_closed_at: datetime | None = None
    """When a person last closed the breaker; only acts after this count. None if no one has, or if the clock was set
    back to before it."""

    def breaker_counts_from(self, window_start: datetime) -> datetime:
        """Return the moment after which acts count for the breaker: the start of its window, or its last closing."""
        closed_at = self.breaker_closed_at
        return window_start if closed_at is None else max(window_start, closed_at)
