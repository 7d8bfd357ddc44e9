"""Interfaces of the API to the server's other parts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from trainmedic_core.problems import FileProblem
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
    async def admit(self, delivery: Delivery) -> Admission:
        """Decide on every alert of a delivery. Return once all is durable. Raises Saturated, StoreUnavailable."""
        ...

    async def explain(self, alerts: Sequence[Alert], at: datetime | None = None) -> tuple[ExplainedAlert, ...]:
        """Return what would be done now, with the alerts' age as of `at`. Raises StoreUnavailable."""
        ...

    async def explain_for_a_test(self, alerts: Sequence[Alert]) -> tuple[ExplainedAlert, ...]:
        """Explain each alert by itself, as a playbook test does: at its start and in mode enforce."""
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
        """Execute an operator's command. `groups` are the operator's. `undo` reverts the run's changes now.

        Raises NotFound, Conflict, NotEntitled, StoreUnavailable.
        """
        ...

    async def start_run(self, order: StartOrder, by: ByHand) -> Started:
        """Start a run manually, or return what it would do.

        Raises NotFound, Conflict, NotEntitled, PayloadError, StoreUnavailable.
        """
        ...

    async def retry(self, run_id: str, by: ByHand) -> Started:
        """Start another run for the alert of an unsuccessful one. Raises like `start_run`."""
        ...

    async def pause(self, actor: str, order: PauseOrder = PauseOrder()) -> tuple[Controls, OperatorPause]:
        """Raises Conflict, StoreUnavailable."""
        ...

    async def resume(self, actor: str, pause_id: str | None = None, scope: Scope = EVERYTHING) -> Controls:
        """End one pause, those of a scope, or all active ones. Raises NotFound, StoreUnavailable."""
        ...

    async def close_breaker(self, actor: str) -> Controls: ...  # raises StoreUnavailable

    async def upcoming(
        self, run: Run, alerts: Sequence[AlertRecord], orders: Sequence[OperatorOrder] = ()
    ) -> Upcoming | None:
        """Return None if the run is over. Raises StoreUnavailable."""
        ...

    def leaves_change(self, action: str) -> bool:
        """Return whether the action changes something. True if unknown, False if it only reverts."""
        ...

    @property
    def controls(self) -> Controls: ...
    @property
    def mode(self) -> Mode: ...


class JobLivesPort(Protocol):
    async def end(self, job: str, actor: str, note: str) -> JobLife:
        """Record that a gone job ended intentionally. Raises NotFound, Conflict, StoreUnavailable."""
        ...


class CatalogPort(Protocol):
    def all(self) -> Sequence[CompiledPlaybook]: ...
    def get(self, name: str) -> CompiledPlaybook | None: ...
    @property
    def problems(self) -> Sequence[FileProblem]: ...
