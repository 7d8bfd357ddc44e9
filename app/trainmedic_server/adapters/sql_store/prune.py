"""Deletion of old data. Functions with a transaction delete a batch and return its size."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from trainmedic_server.adapters.sql_store import queries, run_facts, schema
from trainmedic_server.adapters.sql_store.effects import effects
from trainmedic_server.adapters.sql_store.finding_tables import (
    finding_episodes,
    finding_excerpts,
    findings,
    job_places,
    kept_jobs,
)
from trainmedic_server.adapters.sql_store.schema import (
    alerts,
    events,
    groups,
    nodes,
    orders,
    playbook_days,
    run_alerts,
    runs,
    steps,
    time_gaps,
    touched_nodes,
)
from trainmedic_server.adapters.sql_store.shown_questions import shown_questions
from trainmedic_server.adapters.sql_store.transaction import SqlTransaction
from trainmedic_server.adapters.sql_store.verdicts import verdicts

BATCH = 50
"""Runs with their rows, or other rows, per transaction, which delays others by a few milliseconds."""

PAUSE_FACTOR = 3
"""Pause after a deletion, as a multiple of its duration. A million runs take up to an hour."""

_BEFORE = sa.bindparam("before", type_=schema.TimeColumn)
_RUN_IDS: sa.BindParameter[Any] = sa.bindparam("runs", expanding=True)
_FINGERPRINTS: sa.BindParameter[Any] = sa.bindparam("fingerprints", expanding=True)

_others = runs.alias("others")
_HAS_MEMBERS = sa.exists().where(_others.c.parent == runs.c.id)
# Members of an open group stay: after a restart, their parent counts them again.
_IS_OF_OPEN_GROUP = sa.exists().where(_others.c.id == runs.c.parent, _others.c.unfinished)

_OLD_RUNS = (
    sa.select(runs.c.id)
    .where(runs.c.created_at < _BEFORE, sa.not_(runs.c.unfinished), ~_HAS_MEMBERS, ~_IS_OF_OPEN_GROUP)
    .order_by(runs.c.created_at, runs.c.id)
    .limit(sa.bindparam("limit"))
)
_DELETE_RUNS = (
    *(
        sa.delete(table).where(table.c.run_id.in_(_RUN_IDS))
        for table in (events, orders, steps, touched_nodes, effects, shown_questions, run_alerts, groups)
    ),
    sa.delete(runs).where(runs.c.id.in_(_RUN_IDS)),
)
MOST_ALERTS = 100_000  # Alerts without a reaction or run: one a second for a day, about 100 MB.

_HAS_RUN = sa.exists().where(queries.SAME_ALERT)
_OLD_ALERTS = (
    sa.select(alerts.c.fingerprint)
    .where(alerts.c.last_heard_at < _BEFORE, ~_HAS_RUN)
    .order_by(alerts.c.last_heard_at)
    .limit(BATCH)
)
_DELETE_ALERTS = sa.delete(alerts).where(
    alerts.c.fingerprint.in_(_FINGERPRINTS), alerts.c.last_heard_at < _BEFORE, ~_HAS_RUN
)
# The first condition nearly always implies the second, and has an index.
_IS_UNUSED = sa.and_(sa.not_(alerts.c.reacted), ~_HAS_RUN)
_COUNT_UNUSED_ALERTS = sa.select(sa.func.count()).select_from(alerts).where(_IS_UNUSED)
_OLDEST_UNUSED_ALERTS = (
    sa.select(alerts.c.fingerprint, alerts.c.starts_at)
    .where(_IS_UNUSED)
    .order_by(alerts.c.first_heard_at)
    .limit(sa.bindparam("limit"))
)
_DELETE_ALERT = sa.delete(alerts).where(
    alerts.c.fingerprint == sa.bindparam("of_fingerprint"),
    alerts.c.starts_at == sa.bindparam("of_beginning", type_=schema.TimeColumn),
)
_DELETE_EVENTS = sa.delete(events).where(
    events.c.seq.in_(
        sa.select(events.c.seq)
        .where(events.c.run_id.is_(None), events.c.at < _BEFORE)
        .order_by(events.c.at)
        .limit(BATCH)
    )
)
_FINDING_IDS: sa.BindParameter[Any] = sa.bindparam("findings", expanding=True)
_AFTER_JOB_MICROSECONDS = 3600 * 1_000_000  # Later findings on a node are not about its former job.


def _is_of_kept_job(table: sa.Table) -> sa.Exists:
    is_attempt = kept_jobs.c.attempt == table.c.attempt
    is_kept = sa.or_(kept_jobs.c.attempt == 0, table.c.attempt.is_(None), is_attempt)  # attempt 0 stands for all
    return sa.exists().where(kept_jobs.c.job == table.c.job, is_kept)


_IS_ON_NODE_OF_KEPT_JOB = sa.exists().where(
    job_places.c.job == kept_jobs.c.job,
    job_places.c.node == findings.c.node,
    sa.type_coerce(findings.c.first_at, sa.BigInteger)
    <= sa.type_coerce(job_places.c.seen_at, sa.BigInteger) + _AFTER_JOB_MICROSECONDS,
)
IS_KEPT = sa.or_(_is_of_kept_job(findings), _IS_ON_NODE_OF_KEPT_JOB)
"""A finding in the log of a retained job, or about its node or GPU."""
_OLD_FINDINGS = (
    sa.select(findings.c.id)
    .where(findings.c.heard_at < _BEFORE, findings.c.ended_at < _BEFORE, findings.c.tell_at.is_(None), ~IS_KEPT)
    .order_by(findings.c.heard_at)
    .limit(BATCH)
)
_DELETE_FINDINGS = (
    sa.delete(finding_excerpts).where(finding_excerpts.c.finding_id.in_(_FINDING_IDS)),
    sa.delete(finding_episodes).where(finding_episodes.c.finding_id.in_(_FINDING_IDS)),
    sa.delete(findings).where(findings.c.id.in_(_FINDING_IDS)),
)
_DELETE_VERDICTS = sa.delete(verdicts).where(
    verdicts.c.id.in_(
        sa.select(verdicts.c.id)
        .where(verdicts.c.began_at < _BEFORE, verdicts.c.tell_at.is_(None), ~_is_of_kept_job(verdicts))
        .order_by(verdicts.c.began_at)
        .limit(BATCH)
    )
)
_DELETE_PLACES = sa.delete(job_places).where(
    job_places.c.seen_at < _BEFORE, ~sa.exists().where(kept_jobs.c.job == job_places.c.job)
)
_DELETE_NODES = sa.delete(nodes).where(nodes.c.seen_at < _BEFORE)
_DELETE_DAYS = sa.delete(playbook_days).where(playbook_days.c.day < sa.bindparam("day"))
_DELETE_TIME_GAPS = sa.delete(time_gaps).where(time_gaps.c.ended_at < _BEFORE)


def delete_runs_before(transaction: SqlTransaction, before: datetime) -> int:
    connection = transaction.flushed_connection()
    run_ids = old_run_ids(connection, before, BATCH)
    delete_runs(connection, run_ids)
    return len(run_ids)


def old_run_ids(connection: sa.Connection, before: datetime, limit: int) -> list[str]:
    return [row.id for row in connection.execute(_OLD_RUNS, {"before": before, "limit": limit})]


def delete_runs(connection: sa.Connection, run_ids: Collection[str]) -> None:
    for statement in _DELETE_RUNS if run_ids else ():
        connection.execute(statement, {"runs": run_ids})


def delete_alerts_before(transaction: SqlTransaction, before: datetime) -> int:
    connection = transaction.flushed_connection()
    fingerprints = [row.fingerprint for row in connection.execute(_OLD_ALERTS, {"before": before})]
    if fingerprints:
        connection.execute(_DELETE_ALERTS, {"fingerprints": fingerprints, "before": before})
    return len(fingerprints)


def count_surplus_alerts(connection: sa.Connection) -> int:
    return int(connection.execute(_COUNT_UNUSED_ALERTS).scalar_one()) - MOST_ALERTS


def delete_surplus_alerts(transaction: SqlTransaction, most: int) -> int:
    connection = transaction.flushed_connection()
    identities = connection.execute(_OLDEST_UNUSED_ALERTS, {"limit": min(most, BATCH)}).all()
    if identities:
        keys = [{"of_fingerprint": fingerprint, "of_beginning": at} for fingerprint, at in identities]
        connection.execute(_DELETE_ALERT, keys)
    return len(identities)


def delete_events_before(transaction: SqlTransaction, before: datetime) -> int:
    return transaction.flushed_connection().execute(_DELETE_EVENTS, {"before": before}).rowcount


def delete_findings_before(transaction: SqlTransaction, before: datetime) -> int:
    connection = transaction.flushed_connection()
    ids = [row.id for row in connection.execute(_OLD_FINDINGS, {"before": before})]
    if ids:
        for statement in _DELETE_FINDINGS:
            connection.execute(statement, {"findings": ids})
    return len(ids)


def delete_verdicts_before(transaction: SqlTransaction, before: datetime) -> int:
    return transaction.flushed_connection().execute(_DELETE_VERDICTS, {"before": before}).rowcount


def delete_small_tables_before(transaction: SqlTransaction, before: datetime) -> int:
    """Delete old rows of small tables. Returns 0: no batch follows."""
    connection = transaction.flushed_connection(deletes_nodes=True)
    connection.execute(_DELETE_NODES, {"before": before})
    connection.execute(_DELETE_TIME_GAPS, {"before": before})
    connection.execute(_DELETE_PLACES, {"before": before})
    connection.execute(_DELETE_DAYS, {"day": run_facts.day_of(before)})
    return 0


OTHER_BATCHES = (
    delete_alerts_before,
    delete_events_before,
    delete_findings_before,
    delete_verdicts_before,
    delete_small_tables_before,
)
