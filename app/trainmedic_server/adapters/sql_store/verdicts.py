"""Stored verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from trainmedic_logs.domain.known_verdict import SLOW, KnownVerdict
from trainmedic_server.adapters.sql_store.bulk import UnitRecords
from trainmedic_server.adapters.sql_store.columns import JsonColumn, Text, TimeColumn, metadata, partial_index
from trainmedic_server.ports.verdicts import StoredVerdicts, VerdictRecord

_MOST_OF_NODE = 100  # jobs, of which three make a node suspect

verdicts = sa.Table(
    "verdicts",
    metadata,
    sa.Column("id", Text, primary_key=True),
    sa.Column("job", Text, nullable=False),
    sa.Column("attempt", sa.Integer),
    sa.Column("began_at", TimeColumn, nullable=False),
    sa.Column("made_at", TimeColumn, nullable=False),
    sa.Column("cause", Text, nullable=False),
    sa.Column("confidence", Text, nullable=False),
    sa.Column("node", Text),
    sa.Column("fingerprint", Text, nullable=False),
    sa.Column("plain", JsonColumn, nullable=False),
    sa.Column("labels", JsonColumn),
    sa.Column("tell_at", TimeColumn),
)
"""`KnownVerdict`s. ``plain`` is the whole verdict."""

sa.Index("ix_verdicts_job", verdicts.c.job, verdicts.c.began_at)
# pruning
sa.Index("ix_verdicts_began", verdicts.c.began_at)
partial_index("ix_verdicts_node", verdicts.c.node, verdicts.c.began_at, where="node IS NOT NULL")
partial_index("ix_verdicts_tell", verdicts.c.tell_at, where="tell_at IS NOT NULL")


def of_job(job: str, limit: int, attempt: int | None = None) -> sa.Select[Any]:
    statement = sa.select(verdicts).where(verdicts.c.job == job)
    if attempt is not None:
        statement = statement.where(verdicts.c.attempt == attempt)
    return statement.order_by(verdicts.c.began_at.desc()).limit(limit)


def of_node(node: str, since: datetime) -> sa.Select[Any]:
    on_node = sa.and_(verdicts.c.node == node, verdicts.c.began_at >= since)
    # One of each job: a slow job has a hundred within days, which would hide the other jobs.
    newest = sa.select(verdicts.c.job, sa.func.max(verdicts.c.began_at)).where(on_node).group_by(verdicts.c.job)
    chosen = sa.select(verdicts).where(on_node, sa.tuple_(verdicts.c.job, verdicts.c.began_at).in_(newest))
    return chosen.order_by(verdicts.c.began_at.desc()).limit(_MOST_OF_NODE)


def read(connection: sa.Connection, statement: sa.Select[Any]) -> list[KnownVerdict]:
    return [KnownVerdict(**row) for row in connection.execute(statement).mappings()]


def between(since: datetime, until: datetime, job: str | None) -> sa.Select[Any]:
    """Sort oldest first. `until` is excluded."""
    statement = sa.select(verdicts).where(verdicts.c.began_at >= since, verdicts.c.began_at < until)
    if job is not None:
        statement = statement.where(verdicts.c.job == job)
    return statement.order_by(verdicts.c.began_at)


def record_of(known: KnownVerdict) -> VerdictRecord:
    plain = known.plain
    return VerdictRecord(
        job=known.job,
        at=known.began_at,
        cause=known.cause,
        confidence=known.confidence,
        node=known.node,
        gpu=plain.get("gpu"),
        summary=str(plain.get("summary", "")),
        advice=str(plain.get("advice", "")),
        ranks=tuple(plain.get("ranks") or ()),
        is_slow=known.is_slow,
    )


class SqlVerdicts(UnitRecords, StoredVerdicts):
    def of_job(self, job: str, limit: int, *, is_slow: bool) -> list[KnownVerdict]:
        begins_slow = sa.func.substr(verdicts.c.fingerprint, 1, len(SLOW)) == SLOW
        return read(self._connection(), of_job(job, limit).where(begins_slow if is_slow else ~begins_slow))

    def on_node(self, node: str, since: datetime) -> list[KnownVerdict]:
        return read(self._connection(), of_node(node, since))

    def to_tell(self, moment: datetime, limit: int) -> list[KnownVerdict]:
        due = sa.select(verdicts).where(verdicts.c.tell_at.is_not(None), verdicts.c.tell_at <= moment)
        return read(self._connection(), due.order_by(verdicts.c.tell_at, verdicts.c.id).limit(limit))

    def save(self, made: Sequence[KnownVerdict]) -> None:
        self._write(verdicts, [tuple(getattr(verdict, column.name) for column in verdicts.c) for verdict in made])
