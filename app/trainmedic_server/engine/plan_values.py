"""The values that planning works with: what goes in, and what comes out. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from trainmedic_server.domain.alert import AlertRecord
from trainmedic_server.domain.run import Controls, Decision, Event, OperatorOrder, OrderKind, Run, Status, StepState
from trainmedic_server.engine import scope
from trainmedic_server.ports.actions import Actions
from trainmedic_server.ports.playbooks import CompiledPlaybook, Scope


@dataclass(frozen=True, slots=True)
class OutsideState:
    """What is known from outside the run: its alerts, what operators said, and the switches.

    ``breaker`` is why the breaker is open, None while it is closed.
    """

    alerts: tuple[AlertRecord, ...]
    orders: tuple[OperatorOrder, ...] = ()
    paused: bool = False
    breaker: str | None = None

    def under(self, controls: Controls) -> OutsideState:
        """The same, with the switches as `controls` has them."""
        breaker = (controls.breaker_reason or "the breaker is open") if controls.breaker_open else None
        if (self.paused, self.breaker) == (controls.paused, breaker):
            return self
        return replace(self, paused=controls.paused, breaker=breaker)

    @property
    def resolved(self) -> bool:
        """Whether every alert of the run has resolved."""
        return bool(self.alerts) and all(record.is_resolved for record in self.alerts)

    @property
    def resolved_because(self) -> str:
        """For a person: how the last of the alerts is known to have resolved."""
        return ", ".join(sorted({record.resolved_because or "" for record in self.alerts}))

    def last(self, *kinds: OrderKind) -> OperatorOrder | None:
        """The newest order of these kinds."""
        return next((order for order in reversed(self.orders) if order.kind in kinds), None)


@dataclass(frozen=True, slots=True)
class PerformAttempt:
    """Perform the last attempt of this step, or of its undo. ``resumed``: a killed server may have."""

    key: tuple[str, int]
    undo: bool = False
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until then (None: until something changes)."""

    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Idle:
    """The run is closed and nothing is due."""


Instruction = PerformAttempt | Wait | Idle


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The run as it should stand, why, and what to do once that is durable."""

    run: Run
    events: tuple[Event, ...]
    then: Instruction


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """How an attempt ended.

    ``status`` is ``applied``, ``failed`` (not done, another attempt may succeed), ``rejected`` (not
    done, none will) or ``unknown`` (it may have been done).
    """

    status: str
    output: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    in_part: bool = False
    """Not done, and a part of it was all the same."""


@dataclass(frozen=True, slots=True)
class PlanningContext:
    """What planning needs besides the run: its playbook, the actions, where ids come from, the limit of age.

    ``book`` is None where the playbook cannot be read any more. Then the run is closed, and what
    it owes is still taken back: for that the playbook is not needed.
    """

    book: CompiledPlaybook | None
    actions: Actions
    new_id: Callable[[], str]
    max_age: timedelta


class RunDraft:
    """A run in the making: the functions of planning change it step by step and note why."""

    def __init__(self, run: Run, outside: OutsideState, context: PlanningContext, now: datetime) -> None:
        self.run = run
        self.outside = outside
        self.context = context
        self.now = now
        self.events: list[Event] = []
        self.refused: tuple[Decision, str] | None = None

    @property
    def book(self) -> CompiledPlaybook:
        """The playbook, which every open run has."""
        assert self.context.book is not None
        return self.context.book

    def note(self, kind: str, actor: str = "trainmedic", **data: Any) -> None:
        self.events.append(Event(kind, self.now, self.run.id, actor, data))

    def put(self, step: StepState) -> StepState:
        self.run = self.run.with_step(step)
        return step

    def stand(self, status: Status, waiting_on: str | None = None) -> None:
        """Set where the open run stands."""
        if (self.run.status, self.run.waiting_on) != (status, waiting_on):
            self.run = replace(self.run, status=status, waiting_on=waiting_on)

    def hold_for_resume(self) -> Wait:
        """The server is paused: the run stands still until somebody resumes it."""
        if self.run.waiting_on != "resume":
            self.note("waiting_for_resume")
        self.stand(Status.WAITING, "resume")
        return Wait()

    def refuse(self, decision: Decision, why: str) -> None:
        """The run must not begin to act: whoever plans it closes it."""
        self.refused = (decision, why)

    def scope(self) -> Scope:
        """The names for this run's expressions. Made when first looked at, which most steps never do."""
        run, book, alerts = self.run, self.book, [record.alert for record in self.outside.alerts]
        return scope.LazyScope(lambda: scope.build(run, book, alerts))
