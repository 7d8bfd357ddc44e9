"""Open runs, and agents' lives."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from functools import partial

import sqlalchemy as sa

from trainmedic_server.adapters.sql_store import mapping, queries
from trainmedic_server.adapters.sql_store.bulk import UnitRecords
from trainmedic_server.adapters.sql_store.history import SqlHistory
from trainmedic_server.adapters.sql_store.schema import OPEN_STATUSES, agent_lives, is_no_member, job_lives, runs
from trainmedic_server.domain.agent_life import AgentLife
from trainmedic_server.domain.alert import AlertRecord
from trainmedic_server.domain.job_life import JobLife, LifeState
from trainmedic_server.domain.run import Event, OperatorOrder
from trainmedic_server.ports.present import OpenCounts, Present, StoredAgentLives

_UNFINISHED = sa.select(runs.c.status, sa.func.count()).where(runs.c.unfinished, is_no_member).group_by(runs.c.status)


class SqlPresent(SqlHistory, Present):
    async def open_counts(self) -> OpenCounts:
        def read(connection: sa.Connection) -> OpenCounts:
            counts = {row[0]: row[1] for row in connection.execute(_UNFINISHED)}
            owing = sum(count for status, count in counts.items() if status not in OPEN_STATUSES)
            return OpenCounts({status: counts.get(status, 0) for status in OPEN_STATUSES}, owing)

        return await self._read(read)

    async def decided_since(self, since: datetime) -> dict[tuple[str, str], int]:
        statement = (
            sa.select(runs.c.decision, runs.c.status, sa.func.count())
            .where(runs.c.created_at >= since, is_no_member)
            .group_by(runs.c.decision, runs.c.status)
        )
        rows = await self._read(lambda connection: connection.execute(statement).all())
        return {(decision, status): count for decision, status, count in rows}

    async def alerts_of_runs(self, run_ids: Collection[str]) -> dict[str, list[AlertRecord]]:
        return await self._read(partial(queries.alerts_of, run_ids=run_ids))

    async def orders_of_runs(self, run_ids: Collection[str]) -> dict[str, list[OperatorOrder]]:
        return await self._read(partial(queries.orders_of, run_ids=run_ids))

    async def losses_of_runs(self, run_ids: Collection[str]) -> dict[str, list[Event]]:
        return await self._read(partial(queries.losses_of, run_ids=run_ids))

    async def runs_named(self, part: str, limit: int) -> list[str]:
        statement = (
            sa.select(runs.c.id)
            .where(sa.or_(runs.c.id.startswith(part, autoescape=True), runs.c.id.endswith(part, autoescape=True)))
            .order_by(runs.c.id.desc())
            .limit(limit)
        )
        return await self._read(lambda connection: list(connection.execute(statement).scalars()))

    async def lost(self, since: datetime) -> tuple[list[AgentLife], list[JobLife]]:
        agents = sa.select(agent_lives).where(agent_lives.c.lost_at >= since)
        jobs = sa.select(job_lives).where(job_lives.c.state == LifeState.GONE.value, job_lives.c.since >= since)

        def read(connection: sa.Connection) -> tuple[list[AgentLife], list[JobLife]]:
            lost_jobs = [mapping.job_life_of(row) for row in connection.execute(jobs)]
            return [AgentLife(*row) for row in connection.execute(agents)], lost_jobs

        return await self._read(read)


class SqlAgentLives(UnitRecords, StoredAgentLives):
    def all(self) -> list[AgentLife]:
        return [AgentLife(*row) for row in self._connection().execute(sa.select(agent_lives))]

    def save(self, lives: Sequence[AgentLife]) -> None:
        self._write(agent_lives, [(life.name, life.seen_at, life.lost_at) for life in lives])

    def forget(self, names: Collection[str]) -> None:
        if names:
            statement = sa.delete(agent_lives).where(agent_lives.c.name == sa.bindparam("agent"))
            self._connection().execute(statement, [{"agent": name} for name in names])
