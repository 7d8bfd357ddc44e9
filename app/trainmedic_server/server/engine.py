"""The API's interfaces to the engine and to the playbooks.

``engine.service.Engine``, ``engine.job_watch.JobWatch`` and ``catalog.library.Library`` satisfy them. The server
imports none of them, so that its tests run on an engine and a catalog of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trainmedic_server.domain.admission import Admission
from trainmedic_server.domain.alert import Delivery
from trainmedic_server.domain.job_life import JobLife
from trainmedic_server.domain.problems import FileProblem
from trainmedic_server.domain.run import Controls, OrderKind, Run
from trainmedic_server.ports.playbooks import CompiledPlaybook


class EnginePort(Protocol):
    """Admits deliveries, and carries out operators' orders."""

    async def admit(self, delivery: Delivery) -> Admission:
        """Decide on every alert of a delivery; return once all is durable. Raises Saturated, StoreUnavailable."""
        ...

    async def order(self, run_id: str, kind: OrderKind, actor: str, note: str) -> Run:
        """The run after the order. Raises NotFound, Conflict, StoreUnavailable."""
        ...

    async def pause(self, actor: str) -> Controls: ...
    async def resume(self, actor: str) -> Controls: ...
    async def close_breaker(self, actor: str) -> Controls: ...

    @property
    def controls(self) -> Controls: ...


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
