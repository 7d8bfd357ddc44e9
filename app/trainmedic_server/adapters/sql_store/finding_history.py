"""Lists of findings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from functools import partial
from typing import Any

import sqlalchemy as sa

from trainmedic_logs.domain.finding import CLAIMED_JOB
from trainmedic_logs.domain.known_finding import KeptJob, KnownFinding
from trainmedic_logs.domain.known_verdict import KnownVerdict
from trainmedic_server.adapters.sql_store import finding_rows, history_cursor, verdicts
from trainmedic_server.adapters.sql_store.columns import Text, TimeColumn, encode_json
from trainmedic_server.adapters.sql_store.finding_tables import finding_episodes, finding_excerpts, findings
from trainmedic_server.adapters.sql_store.findings import KEPT_JOBS
from trainmedic_server.adapters.sql_store.present import SqlPresent
from trainmedic_server.adapters.sql_store.prune import IS_KEPT
from trainmedic_server.ports.findings import FindingFilter, FindingHistory, FindingRecord
from trainmedic_server.ports.verdicts import VerdictHistory, VerdictRecord

_MOST_FINDINGS = 200  # In `findings_of_alerts`: findings returned, and fingerprints searched.
_FINGERPRINTS_PER_QUERY = 500  # far below the 32,766 values that SQLite takes in a statement


class SqlFindingHistory(SqlPresent, FindingHistory, VerdictHistory):
    async def verdicts_of(self, job: str, limit: int, attempt: int | None = None) -> list[KnownVerdict]:
        return await self._read(lambda connection: verdicts.read(connection, verdicts.of_job(job, limit, attempt)))

    async def verdicts_on(self, node: str, since: datetime) -> list[KnownVerdict]:
        return await self._read(lambda connection: verdicts.read(connection, verdicts.of_node(node, since)))

    async def verdicts(self, since: datetime, until: datetime, job: str | None = None) -> list[VerdictRecord]:
        between = verdicts.between(since, until, job)
        return [verdicts.record_of(each) for each in await self._read(lambda db: verdicts.read(db, between))]

    async def findings_page(
        self, matching: FindingFilter, limit: int, cursor: str | None
    ) -> tuple[list[KnownFinding], str | None]:
        before = history_cursor.decode(cursor) if cursor is not None else None
        page = await self._read(lambda connection: _page(connection, matching, limit + 1, before))
        if len(page) <= limit:
            return page, None
        last = page[limit - 1]
        return page[:limit], history_cursor.encode(last.heard_first_at, last.id)

    async def finding(self, finding_id: str) -> FindingRecord | None:
        return await self._read(lambda connection: _record(connection, finding_id))

    async def findings_of_alerts(self, fingerprints: Collection[str]) -> list[KnownFinding]:
        statement = (
            sa.select(findings)
            .where(findings.c.fingerprint.in_(list(fingerprints)[:_MOST_FINDINGS]))
            .order_by(findings.c.heard_first_at.desc(), findings.c.id.desc())
            .limit(_MOST_FINDINGS)
        )
        newest_first = await self._read(lambda connection: _findings(connection, statement))
        return newest_first[::-1]

    async def alerts_raised(self, fingerprints: Collection[str]) -> list[Mapping[str, str]]:
        wanted = sorted(fingerprints)
        parts = [
            wanted[first : first + _FINGERPRINTS_PER_QUERY] for first in range(0, len(wanted), _FINGERPRINTS_PER_QUERY)
        ]
        return [labels for part in parts for labels in await self._read(partial(_raised, wanted=part))]

    async def kept_jobs(self) -> list[KeptJob]:
        return await self._read(
            lambda connection: [finding_rows.kept_job_of(row) for row in connection.execute(KEPT_JOBS)]
        )


def findings_select(matching: FindingFilter, limit: int, before: tuple[datetime, str] | None = None) -> sa.Select[Any]:
    columns = findings.c
    statement = sa.select(findings).order_by(columns.heard_first_at.desc(), columns.id.desc()).limit(limit)
    if matching.job is not None:
        statement = statement.where(columns.job == matching.job)
    if matching.rule is not None:
        statement = statement.where(columns.rule == matching.rule)
    if matching.role is not None:
        statement = statement.where(columns.role == matching.role.value)
    if matching.node is not None:
        was_read_there = sa.exists().where(
            finding_episodes.c.finding_id == columns.id, finding_episodes.c.node == matching.node
        )
        statement = statement.where(sa.or_(columns.node == matching.node, was_read_there))
    if matching.since is not None:
        statement = statement.where(sa.or_(columns.last_at >= matching.since, columns.heard_at >= matching.since))
    if matching.suspected is not None:
        statement = statement.where(columns.is_suspected if matching.suspected else sa.not_(columns.is_suspected))
    if matching.open is not None:
        statement = statement.where(columns.ended_at.is_(None) if matching.open else columns.ended_at.is_not(None))
    if matching.claimed_job is not None:
        # Labels are JSON as text, in the form of `encode_json`. Only a printed finding without a job has a claim.
        member = encode_json({CLAIMED_JOB: matching.claimed_job})[1:-1]
        labels = sa.type_coerce(columns.labels, Text)
        is_named = sa.func.replace(labels, member, "") != labels
        statement = statement.where(columns.job.is_(None), columns.is_printed, is_named)
    if before is not None:
        heard_first_at, finding_id = before
        last = sa.tuple_(sa.literal(heard_first_at, TimeColumn), sa.literal(finding_id))
        statement = statement.where(sa.tuple_(columns.heard_first_at, columns.id) < last)
    return statement


def _page(
    connection: sa.Connection, matching: FindingFilter, limit: int, before: tuple[datetime, str] | None
) -> list[KnownFinding]:
    return _findings(connection, findings_select(matching, limit, before))


def _raised(connection: sa.Connection, wanted: Collection[str]) -> list[Mapping[str, str]]:
    # Several findings can have raised an alert, with the same labels. One of each is enough.
    newest = sa.select(sa.func.max(findings.c.id)).where(findings.c.fingerprint.in_(wanted))
    one_each = sa.select(findings.c.alert).where(findings.c.id.in_(newest.group_by(findings.c.fingerprint)))
    return [alert["labels"] for alert in connection.execute(one_each).scalars()]


def _findings(connection: sa.Connection, statement: sa.Select[Any]) -> list[KnownFinding]:
    return [finding_rows.finding_of(row) for row in connection.execute(statement)]


def _record(connection: sa.Connection, finding_id: str) -> FindingRecord | None:
    known = next(iter(_findings(connection, sa.select(findings).where(findings.c.id == finding_id))), None)
    if known is None:
        return None
    excerpts = connection.execute(
        sa.select(finding_excerpts)
        .where(finding_excerpts.c.finding_id == finding_id)
        .order_by(finding_excerpts.c.first_at, finding_excerpts.c.node, finding_excerpts.c.id)
    )
    kept = connection.execute(sa.select(findings.c.id).where(findings.c.id == finding_id, IS_KEPT)).scalar()
    return FindingRecord(known, tuple(finding_rows.excerpt_of(row) for row in excerpts), kept is not None)
