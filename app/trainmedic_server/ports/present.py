"""Bounded queries of the current state, for ``GET /now`` and ``status``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from msgspec import Struct

from trainmedic_server.domain.agent_life import AgentLife
from trainmedic_server.domain.alert import AlertRecord
from trainmedic_server.domain.job_life import JobLife
from trainmedic_server.domain.run import Event, OperatorOrder


class OpenCounts(Struct, frozen=True):
    # Without members of groups.
    by_status: Mapping[str, int]
    owing: int  # Closed runs with a pending undo, or of a group with an unfinished member.


class StoredAgentLives(Protocol):
    def all(self) -> list[AgentLife]: ...
    def save(self, lives: Sequence[AgentLife]) -> None: ...

    def forget(self, names: Collection[str]) -> None: ...


class Present(Protocol):
    """All methods raise StoreUnavailable."""

    async def open_counts(self) -> OpenCounts: ...
    async def decided_since(self, since: datetime) -> dict[tuple[str, str], int]:
        """Return the number of runs and decisions not to start since `since`, by (decision, status)."""
        ...

    async def alerts_of_runs(self, run_ids: Collection[str]) -> dict[str, list[AlertRecord]]:
        """Return alerts in order of linking, without runs that have none."""
        ...

    async def orders_of_runs(self, run_ids: Collection[str]) -> dict[str, list[OperatorOrder]]: ...

    async def losses_of_runs(self, run_ids: Collection[str]) -> dict[str, list[Event]]:
        """Return events of `changes.LOSS_KINDS` in order."""
        ...

    async def runs_named(self, part: str, limit: int) -> list[str]:
        """Return up to `limit` IDs that begin or end with `part`, newest first."""
        ...

    async def lost(self, since: datetime) -> tuple[list[AgentLife], list[JobLife]]:
        """Return agents and jobs that have disappeared since `since` and not returned."""
        ...
