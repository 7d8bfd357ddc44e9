"""The state of things now, as ``GET /now`` and ``status`` need it: bounded questions to the run store."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from msgspec import Struct

from trainmedic_server.domain.agent_life import AgentLife
from trainmedic_server.domain.alert import AlertRecord
from trainmedic_server.domain.job_life import JobLife
from trainmedic_server.domain.run import OperatorOrder


class OpenCounts(Struct, frozen=True):
    """How many runs are unfinished."""

    by_status: Mapping[str, int]
    """The open runs by status."""
    owing: int
    """The closed runs that still owe an undo."""


class StoredAgentLives(Protocol):
    """The records of agents, within one transaction of the run store."""

    def all(self) -> list[AgentLife]: ...
    def save(self, lives: Sequence[AgentLife]) -> None:
        """Insert or replace, by name."""
        ...

    def forget(self, names: Collection[str]) -> None: ...


class Present(Protocol):
    """Reads how things stand, and never waits for a writer. All raise StoreUnavailable."""

    async def open_counts(self) -> OpenCounts: ...
    async def decided_since(self, since: datetime) -> dict[tuple[str, str], int]:
        """Return how many runs and decisions not to start one there were since then, by decision and status."""
        ...

    async def alerts_of_runs(self, run_ids: Collection[str]) -> dict[str, list[AlertRecord]]:
        """Return the alerts tied to each run that has any, in the order of tying."""
        ...

    async def orders_of_runs(self, run_ids: Collection[str]) -> dict[str, list[OperatorOrder]]:
        """Return what people have told each run that was told anything, in the order of telling."""
        ...

    async def runs_named(self, part: str, limit: int) -> list[str]:
        """Return the ids of runs that begin or end with `part`, the newest first, at most `limit`."""
        ...

    async def lost(self, since: datetime) -> tuple[list[AgentLife], list[JobLife]]:
        """Return the agents and the jobs that were lost after then and have not come back."""
        ...
