"""The API's interfaces to the engine and to the playbooks.

``engine.service.Engine``, ``engine.job_watch.JobWatch``, ``engine.kept_jobs.KeptJobs``, ``catalog.library.Library`` and
``trainmedic_logs.rules.log_rule_library.LogRuleLibrary`` and ``catalog.alert_map_library.AlertMapLibrary`` satisfy
them. The server imports none of them, so that its tests run on an engine and a catalog of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from trainmedic_core.problems import FileProblem
from trainmedic_logs.domain.known_finding import KeptJob
from trainmedic_logs.lines.rule import RuleSet
from trainmedic_server.domain.admission import Admission
from trainmedic_server.domain.alert import Alert, AlertRecord, Delivery
from trainmedic_server.domain.job_life import JobLife
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.pause import EVERYTHING, OperatorPause, PauseOrder, Scope
from trainmedic_server.domain.run import Controls, OperatorOrder, OrderKind, Run
from trainmedic_server.domain.upcoming import Upcoming
from trainmedic_server.engine.admission_changes import ByHand
from trainmedic_server.engine.explanation import ExplainedAlert
from trainmedic_server.engine.manual_runs import Started, StartOrder
from trainmedic_server.ports.playbooks import CompiledPlaybook


class EnginePort(Protocol):
    """Admits deliveries, and carries out operators' orders."""

    async def admit(self, delivery: Delivery) -> Admission:
        """Decide on every alert of a delivery; return once all is durable. Raises Saturated, StoreUnavailable."""
        ...

    async def explain(self, alerts: Sequence[Alert], at: datetime | None = None) -> tuple[ExplainedAlert, ...]:
        """Say what would be done about these alerts now, and change nothing. Raises StoreUnavailable."""
        ...

    async def explain_for_a_test(self, alerts: Sequence[Alert]) -> tuple[ExplainedAlert, ...]:
        """Say what a test of the playbooks would see of each alert."""
        ...

    async def order(
        self,
        run_id: str,
        kind: OrderKind,
        actor: str,
        note: str,
        groups: frozenset[str] = frozenset(),
        *,
        undo: bool = False,
    ) -> Run:
        """Return the run after the order of an operator, who is in `groups`. With `undo`, what it has changed is
        reverted now. Raises NotFound, Conflict, NotEntitled, StoreUnavailable."""
        ...

    async def start_run(self, order: StartOrder, by: ByHand) -> Started:
        """Start a run by hand, or say what that would come to. Raises NotFound, Conflict, StoreUnavailable."""
        ...

    async def retry(self, run_id: str, by: ByHand) -> Started:
        """Start another run for the alert of one that ended without success. Raises as `start_run`."""
        ...

    async def pause(self, actor: str, order: PauseOrder = PauseOrder()) -> tuple[Controls, OperatorPause]:
        """The switches, and the pause. Raises Conflict, StoreUnavailable."""
        ...

    async def resume(self, actor: str, pause_id: str | None = None, scope: Scope = EVERYTHING) -> Controls:
        """End one pause, those of a scope, or all that hold now. Raises NotFound, StoreUnavailable."""
        ...

    async def close_breaker(self, actor: str) -> Controls: ...

    async def upcoming(
        self, run: Run, alerts: Sequence[AlertRecord], orders: Sequence[OperatorOrder] = ()
    ) -> Upcoming | None:
        """What the run does next; None where it is over. Raises StoreUnavailable."""
        ...

    def leaves_change(self, action: str) -> bool:
        """Return whether an action of this name changes something, and does more than revert another action."""
        ...

    @property
    def controls(self) -> Controls: ...
    @property
    def mode(self) -> Mode: ...


class JobLivesPort(Protocol):
    """What is known of whether jobs live."""

    async def end(self, job: str, actor: str, note: str) -> JobLife:
        """A person says that a job which is gone was meant to end. Raises NotFound, Conflict, StoreUnavailable."""
        ...


class CatalogPort(Protocol):
    """The playbooks that are loaded, and the files that could not be."""

    def all(self) -> Sequence[CompiledPlaybook]: ...
    def get(self, name: str) -> CompiledPlaybook | None: ...
    @property
    def problems(self) -> Sequence[FileProblem]: ...


class LogRulesPort(Protocol):
    """The log rules that are loaded, and the files that could not be."""

    @property
    def rule_set(self) -> RuleSet: ...
    @property
    def problems(self) -> Sequence[FileProblem]: ...


class AlertMapState(Protocol):
    """The active alert map."""

    @property
    def accept(self) -> Sequence[object]:
        """Conditions that an alert must meet."""
        ...

    @property
    def names(self) -> int:
        """Number of renamed alertnames."""
        ...

    @property
    def unusable(self) -> str:
        """Why no alert is accepted. Empty if the map was loaded."""
        ...


class AlertMapPort(Protocol):
    """The alert map, and those of its files that could not be loaded."""

    @property
    def is_used(self) -> bool:
        """True if there is one."""
        ...

    @property
    def current(self) -> AlertMapState: ...
    @property
    def problems(self) -> Sequence[FileProblem]: ...


class KeptJobsPort(Protocol):
    """The jobs of which nothing is deleted."""

    async def keep(self, job: str, attempt: int | None, actor: str, note: str) -> KeptJob:
        """Keep a job, or one attempt of it. Raises Conflict, StoreUnavailable."""
        ...

    async def release(self, job: str, attempt: int | None, actor: str) -> None:
        """Take the lock back. Raises NotFound, StoreUnavailable."""
        ...

    async def all(self) -> Sequence[KeptJob]: ...
