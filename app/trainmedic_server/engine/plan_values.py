"""The values that planning takes and returns: `OutsideState` and `PlanningContext` go in, a `RunPlan` comes out,
and the outcome of the attempt that it asked for goes into the next. Pure.

Who calls it: ``plan``, ``steps`` and ``undoing`` work on a `RunDraft`; ``driver`` carries out a `RunPlan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from trainmedic_server.domain.alert import AlertRecord, decisive
from trainmedic_server.domain.event_codec import recorded
from trainmedic_server.domain.event_kinds import EventKind, WaitingForResume
from trainmedic_server.domain.pause import OperatorPause
from trainmedic_server.domain.run import (
    Controls,
    Decision,
    Event,
    OperatorOrder,
    OrderKind,
    Run,
    Status,
    StepState,
    StepStatus,
)
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import scope
from trainmedic_server.ports.actions import Actions
from trainmedic_server.ports.playbooks import CompiledPlaybook, Scope


class OutsideState(Struct, frozen=True):
    """What has come from outside the run: its alerts, the operators' orders, and the switches."""

    alerts: tuple[AlertRecord, ...]
    """Those tied to the run: the one that it was started for, then those that joined."""
    orders: tuple[OperatorOrder, ...] = ()
    """Oldest first."""
    pause: OperatorPause | None = None
    """The pause that holds the run; None where none does."""
    breaker: str | None = None
    """Why the breaker is open; None while it is closed."""

    @property
    def paused(self) -> bool:
        return self.pause is not None

    def under(self, controls: Controls, pause: OperatorPause | None) -> OutsideState:
        """This state, with the switches as `controls` has them, and the pause that holds the run."""
        breaker = (controls.breaker_reason or "the breaker is open") if controls.breaker_open else None
        if (self.pause, self.breaker) == (pause, breaker):
            return self
        return replace(self, pause=pause, breaker=breaker)

    @property
    def resolved(self) -> bool:
        """Whether every alert of the run has resolved."""
        return bool(self.alerts) and all(record.is_resolved for record in decisive(self.alerts))

    @property
    def resolved_because(self) -> str:
        """For a person: how the last of the alerts is known to have resolved."""
        return ", ".join(sorted({record.resolved_because or "" for record in decisive(self.alerts)}))

    def last(self, *kinds: OrderKind) -> OperatorOrder | None:
        """The newest order of these kinds."""
        return next((order for order in reversed(self.orders) if order.kind in kinds), None)


class PerformAttempt(Struct, frozen=True):
    """Make the last attempt of this step, or of its undo."""

    key: tuple[str, int]
    """The key of the step (`StepState.key`)."""
    undo: bool = False
    resumed: bool = False
    """Whether a server that was killed may have made the attempt already."""


class Wait(Struct, frozen=True):
    """Do nothing until this moment, or, with None, until something outside changes."""

    until: datetime | None = None


class Idle(Struct, frozen=True):
    """The run is closed and nothing is due."""


Instruction = PerformAttempt | Wait | Idle


class RunPlan(Struct, frozen=True):
    """The run as it should be stored, the events that say why, and what to do once both are durable."""

    run: Run
    events: tuple[Event, ...]
    then: Instruction


class AttemptOutcome(Struct, frozen=True):
    """How an attempt ended."""

    status: str
    """Outcome of the attempt:

    - ``applied``;
    - ``failed``: not applied, and another attempt may succeed;
    - ``rejected``: not applied, and no attempt will succeed;
    - ``skipped``: not applied, because the server is not set up for it, which fails no run;
    - ``unknown``: it may have been applied;
    - ``stopped``: it ended early because the alert resolved;
    - ``called_off``: it was not begun, because of an order or a report that came after it was persisted.
    """
    output: Mapping[str, Any] = field(default_factory=dict)
    """What the action returned, or what it knew when it failed."""
    error: str | None = None
    """For a person: why it was not applied."""
    in_part: bool = False
    """Whether a part of it was applied although it did not succeed."""
    may_be_repeated: bool = True
    """False for one that was carried out and not as asked: another attempt would carry it out once more."""
    barred_by: Decision | None = None
    """The guard that kept it from being made; None where it was made."""


CALLED_OFF = AttemptOutcome("called_off")


class PlanningContext(Struct, frozen=True):
    """What planning needs besides the run."""

    playbook: CompiledPlaybook | None
    """The run's playbook; None where it cannot be read any more. Then the run is closed, and what it owes is still
    taken back: for that the playbook is not needed."""
    actions: Actions
    new_id: Callable[[], str]
    """Where the ids of commands come from."""
    max_age: timedelta
    """How old an alert may be that a run still begins to act on."""
    set_forward_since: Callable[[datetime], timedelta] = lambda _: timedelta(0)
    """By how much the clock was set forward after a moment."""
    idle_since: Callable[[datetime], timedelta] = lambda _: timedelta(0)
    """How much of the time of day after a moment went by with no server at work, or as the clock was set forward."""
    external_url: str = ""
    """Where people reach the server; empty where that is not set."""
    topology: Callable[[], Topology] = Topology
    """Returns what is known of nodes, jobs and GPUs, for saying what an approval would reach."""


class RunDraft:
    """A run while it is planned: the functions of planning change it step by step, and note the events that say why."""

    def __init__(self, run: Run, outside: OutsideState, context: PlanningContext, now: datetime) -> None:
        self.run = run
        self.outside = outside
        self.context = context
        self.now = now
        self.events: list[Event] = []
        self.refused: tuple[Decision, str] | None = None

    @property
    def playbook(self) -> CompiledPlaybook:
        """The playbook, which every open run has."""
        assert self.context.playbook is not None
        return self.context.playbook

    def plan(self, then: Instruction) -> RunPlan:
        """The run as it is drafted, with its events, and what to do then."""
        return RunPlan(self.run, tuple(self.events), then)

    def add_event(self, content: EventKind, actor: str = "trainmedic") -> None:
        self.events.append(recorded(content, self.now, self.run.id, actor))

    def put(self, step: StepState, **changes: Any) -> StepState:
        """Replace the step of the same key, and with it what else of the run has changed."""
        self.run = self.run.with_step(step, **changes)
        return step

    def end(self, step: StepState, status: StepStatus, **changes: Any) -> None:
        """Make the step final."""
        self.put(replace(step, status=status, ended_at=self.now, **changes))

    def timely(self, step: StepState, *, is_question: bool = False) -> StepState:
        """The step, with its deadline where it is by the clock as it is now; that of a question without the time in
        which no server was at work that could have taken an answer.

        A clock that was set back meanwhile would hold the deadline off for as long; then the step begins to wait anew.
        """
        if step.deadline is None or step.started_at is None:
            return step
        if step.started_at > self.now:
            return self.put(replace(step, started_at=self.now, deadline=self.now + (step.deadline - step.started_at)))
        uncounted = self.context.idle_since if is_question else self.context.set_forward_since
        later = uncounted(step.started_at)
        return replace(step, deadline=step.deadline + later) if later else step

    def set_status(self, status: Status, waiting_on: str | None = None) -> None:
        """Set the status of the open run, and what it waits for."""
        if (self.run.status, self.run.waiting_on) != (status, waiting_on):
            self.run = replace(self.run, status=status, waiting_on=waiting_on)

    def suspend_until_resumed(self) -> Wait:
        """Suspend the run until the pause that holds it ends."""
        pause = self.outside.pause
        assert pause is not None
        why = pause.why(self.now)
        if self.run.waiting_on != "resume":
            self.add_event(WaitingForResume(pause.id, why))
        self.set_status(Status.WAITING, "resume")
        if self.run.message != why:
            self.run = replace(self.run, message=why)
        return Wait(pause.until(self.now))

    def refuse(self, decision: Decision, reason: str) -> None:
        """Refuse the run: it must not begin to act. ``plan`` then closes it."""
        self.refused = (decision, reason)

    def scope(self) -> Scope:
        """The names for this run's expressions. They are built on first access, because most steps have no
        expression."""
        run, playbook, alerts = self.run, self.playbook, [record.alert for record in self.outside.alerts]
        url, topology = self.context.external_url, self.context.topology
        return scope.LazyScope(
            lambda: scope.build(run, playbook, alerts, external_url=url, verdicts=topology().verdicts)
        )
