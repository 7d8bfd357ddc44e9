"""A run: one execution of a playbook for one target, its steps, attempts and undo duties.

Everything here is a frozen value; ``engine`` makes new ones, the store keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from trainmedic_server.domain.alert import Identity
from trainmedic_server.domain.modes import Mode, UndoTrigger
from trainmedic_server.domain.target import Target


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


PASSING = frozenset(
    {Decision.COOLDOWN, Decision.RATE_LIMITED, Decision.CONCURRENCY_LIMITED, Decision.BREAKER_OPEN, Decision.PAUSED}
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
    """Where an undo stands. ``armed`` and ``running`` are duties still owed.

    ``available`` is no duty: an operator can have it carried out. ``dropped`` means that there is
    nothing to take back, because the action was certainly not applied.
    """

    AVAILABLE = "available"
    ARMED = "armed"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    DROPPED = "dropped"

    @property
    def is_owed(self) -> bool:
        return self in (UndoStatus.ARMED, UndoStatus.RUNNING)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of an action. ``deadline`` is when it counts as timed out (and its command expires).

    ``status`` is ``running``, ``applied``, ``failed``, ``rejected``, ``unknown`` (no reply in time).
    ``order`` is the id of the operator's order that an attempt of an undo answers. ``in_part``: it did
    not succeed, and a part of it was applied all the same.
    """

    number: int
    command_id: str
    started_at: datetime
    deadline: datetime
    status: str = "running"
    ended_at: datetime | None = None
    error: str | None = None
    order: str | None = None
    in_part: bool = False


@dataclass(frozen=True, slots=True)
class Undo:
    """The recorded inverse of a step's action: a duty from before the act until it is carried out.

    ``undo_of`` is the id of the command that it takes back, so that a receiver which never applied
    that command changes nothing.
    """

    trigger: UndoTrigger
    action: str
    params: Mapping[str, Any]
    undo_of: str
    status: UndoStatus = UndoStatus.ARMED
    because: str | None = None
    attempts: tuple[Attempt, ...] = ()
    output: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    retry_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class StepState:
    """One step of a run. ``phase`` is ``approval`` (asked by mode approve before anything else),
    ``steps`` or ``on_failure``; ``index`` counts within it from 0. ``kind`` is ``action``,
    ``wait_for`` or ``approve``.

    ``deadline`` is when a wait or an approval ends by itself; ``retry_at`` when the next attempt is due.
    """

    phase: str
    index: int
    id: str
    kind: str
    action: str | None = None
    status: StepStatus = StepStatus.PENDING
    params: Mapping[str, Any] = field(default_factory=dict)
    attempts: tuple[Attempt, ...] = ()
    output: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    message: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    deadline: datetime | None = None
    retry_at: datetime | None = None
    undo: Undo | None = None

    @property
    def key(self) -> tuple[str, int]:
        return (self.phase, self.index)

    @property
    def undo_attempts(self) -> tuple[Attempt, ...]:
        return self.undo.attempts if self.undo else ()


@dataclass(frozen=True, slots=True)
class Run:
    """One item of the history: an execution of a playbook, or a decision not to start one.

    ``alert`` is the alert that it was admitted for; those that joined are kept by the store.
    ``target`` is None where the labels named none. ``waiting_on`` is ``target``, ``resolved``,
    ``retry``, ``approval`` or ``resume`` (paused) while the run is open and idle.
    ``acted_at`` is when its first attempt of a harmful action was recorded.
    """

    id: str
    playbook: str
    version: str
    target: Target | None
    mode: Mode
    status: Status
    decision: Decision
    alert: Identity
    alert_name: str
    alert_labels: Mapping[str, str]
    created_at: datetime
    steps: tuple[StepState, ...] = ()
    ended_at: datetime | None = None
    acted_at: datetime | None = None
    waiting_on: str | None = None
    message: str = ""

    def step(self, key: tuple[str, int]) -> StepState:
        return next(step for step in self.steps if step.key == key)

    def with_step(self, changed: StepState) -> Run:
        """This run with the step of the same key replaced."""
        return replace(self, steps=tuple(changed if step.key == changed.key else step for step in self.steps))

    @property
    def target_key(self) -> str:
        """The key of its target; empty where it has none."""
        return self.target.key if self.target else ""

    @property
    def is_open(self) -> bool:
        return self.status.is_open

    @property
    def owes_undo(self) -> bool:
        return any(step.undo and step.undo.status.is_owed for step in self.steps)

    @property
    def action_taken(self) -> str | None:
        """The actions that were applied, in order, or would have been in mode observe; None for none."""
        wanted = StepStatus.OBSERVED if self.status is Status.OBSERVED else StepStatus.SUCCEEDED
        names = [step.action for step in self.steps if step.action and step.status is wanted]
        return ", ".join(names) or None

    @property
    def success(self) -> bool | None:
        """True or False once a run that acted has closed; None while open, observed or not started."""
        if self.is_open or self.status in (Status.OBSERVED, Status.NOT_STARTED):
            return None
        return self.status is Status.SUCCEEDED


class OrderKind(StrEnum):
    """What an operator can tell a run."""

    APPROVE = "approve"
    REJECT = "reject"
    CANCEL = "cancel"
    UNDO = "undo"


@dataclass(frozen=True, slots=True)
class OperatorOrder:
    """An operator's decision about a run, by whom and when. ``step`` is the id of the step approved."""

    id: str
    run_id: str
    kind: OrderKind
    actor: str
    at: datetime
    note: str = ""
    step: str | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the append-only history. ``seq`` is given by the store.

    ``run_id`` is None for what concerns the server alone (paused, breaker opened, started).
    """

    kind: str
    at: datetime
    run_id: str | None = None
    actor: str = "trainmedic"
    data: Mapping[str, Any] = field(default_factory=dict)
    seq: int | None = None


@dataclass(frozen=True, slots=True)
class Controls:
    """The switches that outlive a restart.

    ``alive_at`` is the server's last heartbeat, from which a new start knows how long it was down.
    """

    paused: bool = False
    paused_by: str | None = None
    paused_at: datetime | None = None
    breaker_open: bool = False
    breaker_opened_at: datetime | None = None
    breaker_reason: str | None = None
    alive_at: datetime | None = None
