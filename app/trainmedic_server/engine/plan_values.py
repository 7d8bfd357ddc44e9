"""Inputs and outputs of planning."""

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
from trainmedic_server.engine.looking import Look, Sight
from trainmedic_server.engine.rollout import GroupProgress, StartMembers
from trainmedic_server.ports.actions import Actions
from trainmedic_server.ports.playbooks import CompiledPlaybook, Scope


class OutsideState(Struct, frozen=True):
    alerts: tuple[AlertRecord, ...]  # the initial one first
    orders: tuple[OperatorOrder, ...] = ()
    pause: OperatorPause | None = None  # the one that holds the run now
    breaker: str | None = None  # reason of the open breaker

    @property
    def paused(self) -> bool:
        return self.pause is not None

    def with_switches(self, controls: Controls, pause: OperatorPause | None) -> OutsideState:
        breaker = (controls.breaker_reason or "the breaker is open") if controls.breaker_open else None
        if (self.pause, self.breaker) == (pause, breaker):
            return self
        return replace(self, pause=pause, breaker=breaker)

    @property
    def resolved(self) -> bool:
        return bool(self.alerts) and all(record.is_resolved for record in decisive(self.alerts))

    @property
    def is_over(self) -> bool:
        """True if its alerts resolved. The end of a stand-in, which is only assumed, does not count."""
        return self.resolved and not all(record.is_stand_in for record in self.alerts)

    @property
    def resolved_because(self) -> str:
        return ", ".join(sorted({record.resolved_because or "" for record in decisive(self.alerts)}))

    def last(self, *kinds: OrderKind) -> OperatorOrder | None:
        """Return the newest operator command of these kinds."""
        return next((order for order in reversed(self.orders) if order.kind in kinds), None)


class PerformAttempt(Struct, frozen=True):
    """Make the last attempt of a step, or of its undo."""

    key: tuple[str, int]  # `StepState.key`
    undo: bool = False
    resumed: bool = False  # True if an earlier server may have made it


class Wait(Struct, frozen=True):
    """Wait for an external change, until this time at most."""

    until: datetime | None = None


class TakeTarget(Struct, frozen=True):
    """Lock the target, waiting until this time at most; None for no limit."""

    until: datetime | None = None


class Idle(Struct, frozen=True):
    """The run is closed and nothing is due."""


Instruction = PerformAttempt | Wait | Look | TakeTarget | Idle | StartMembers


class RunPlan(Struct, frozen=True):
    run: Run
    events: tuple[Event, ...]
    then: Instruction


class AttemptOutcome(Struct, frozen=True):
    status: str
    """- ``applied``
    - ``failed``: not applied; another attempt may succeed
    - ``rejected``: not applied; no attempt will succeed
    - ``skipped``: the server is not set up for it; fails no run
    - ``unknown``: possibly applied
    - ``stopped``: ended early because the alert resolved
    - ``called_off``: cancelled before start
    """
    output: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    in_part: bool = False  # True if it may have been applied in part
    may_be_repeated: bool = True  # False if a retry would apply it twice
    barred_by: Decision | None = None  # guard that refused the attempt


CALLED_OFF = AttemptOutcome("called_off")


class PlanningContext(Struct, frozen=True):
    playbook: CompiledPlaybook | None
    """None if unreadable. The run is then closed; undos do not need it."""
    actions: Actions
    new_id: Callable[[], str]
    max_age: timedelta
    set_forward_since: Callable[[datetime], timedelta] = lambda _: timedelta(0)
    """Returns the time that forward clock steps skipped since a moment."""
    idle_since: Callable[[datetime], timedelta] = lambda _: timedelta(0)  # returns that time plus downtimes
    external_url: str = ""
    topology: Callable[[], Topology] = Topology


class RunDraft:
    """A run during planning, with its new events."""

    def __init__(
        self,
        run: Run,
        outside: OutsideState,
        context: PlanningContext,
        now: datetime,
        group: GroupProgress | None = None,
        *,
        has_target: bool = True,
        look_once: bool = False,
        sight: Sight | None = None,
    ) -> None:
        self.run = run
        self.outside = outside
        self.context = context
        self.now = now
        self.group = group  # None unless the run is a group's parent
        self.has_target = has_target  # the lock is held, or not needed
        self.look_once = look_once  # after a wait without lock: one look under the lock decides
        self.sight = sight  # result of a polled wait since the last plan
        self.events: list[Event] = []
        self.refused: tuple[Decision, str] | None = None

    @property
    def playbook(self) -> CompiledPlaybook:
        assert self.context.playbook is not None
        return self.context.playbook

    def plan(self, then: Instruction) -> RunPlan:
        return RunPlan(self.run, tuple(self.events), then)

    def add_event(self, content: EventKind, actor: str = "trainmedic") -> None:
        self.events.append(recorded(content, self.now, self.run.id, actor))

    def put(self, step: StepState, **changes: Any) -> StepState:
        self.run = self.run.with_step(step, **changes)
        return step

    def end(self, step: StepState, status: StepStatus, **changes: Any) -> None:
        self.put(replace(step, status=status, ended_at=self.now, **changes))

    def timely(self, step: StepState, *, is_question: bool = False) -> StepState:
        """Return the step with its deadline adjusted for clock steps.

        Time without a working server does not count for a question. If the clock was set back to before the start, the
        wait restarts.
        """
        if step.deadline is None or step.started_at is None:
            return step
        if step.started_at > self.now:
            return self.put(replace(step, started_at=self.now, deadline=self.now + (step.deadline - step.started_at)))
        uncounted = self.context.idle_since if is_question else self.context.set_forward_since
        later = uncounted(step.started_at)
        return replace(step, deadline=step.deadline + later) if later else step

    def set_status(self, status: Status, waiting_on: str | None = None) -> None:
        if (self.run.status, self.run.waiting_on) != (status, waiting_on):
            self.run = replace(self.run, status=status, waiting_on=waiting_on)

    def suspend_until_resumed(self) -> Wait:
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
        """Block the run before its first act. ``plan`` closes it."""
        self.refused = (decision, reason)

    def scope(self) -> Scope:
        run, playbook, alerts, now = self.run, self.playbook, [record.alert for record in self.outside.alerts], self.now
        url, topology = self.context.external_url, self.context.topology
        return scope.LazyScope(
            lambda: scope.build(
                run, playbook, alerts, external_url=url, verdicts=topology().verdicts, group=self._group_data(), now=now
            )
        )

    def _group_data(self) -> Mapping[str, Any] | None:
        return None if self.group is None else self.group.counts.as_data()
