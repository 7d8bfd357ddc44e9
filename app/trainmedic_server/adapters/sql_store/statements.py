"""SQL statements of `SqlTransaction`, built once at import."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from trainmedic_server.adapters.sql_store import queries, schema
from trainmedic_server.adapters.sql_store.columns import Text, encode_json
from trainmedic_server.adapters.sql_store.lookup import KEYS, WANTED, Lookup
from trainmedic_server.adapters.sql_store.schema import alerts, run_alerts, runs, steps, touched_nodes
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.playbook import ON_LIMITED
from trainmedic_server.domain.run import Decision, Status

ALERTS = Lookup(sa.select(alerts).where(alerts.c.fingerprint.in_(KEYS), queries.within(alerts.c.starts_at)))
FIRING_ALERTS = Lookup(
    sa.select(alerts)
    .where(alerts.c.fingerprint.in_(KEYS), alerts.c.resolved_at.is_(None))
    .order_by(alerts.c.fingerprint, alerts.c.starts_at)
)
_LATER = alerts.alias("later")
NEWEST_ALERTS = Lookup(
    sa.select(alerts).where(
        alerts.c.fingerprint.in_(KEYS),
        ~sa.exists().where(_LATER.c.fingerprint == alerts.c.fingerprint, _LATER.c.starts_at > alerts.c.starts_at),
    )
)
_FIRING = sa.select(alerts).where(alerts.c.resolved_at.is_(None)).limit(sa.bindparam("limit"))
SILENT_ALERTS = (
    sa.select(alerts)
    .where(
        alerts.c.resolved_at.is_(None),
        alerts.c.last_heard_at < sa.bindparam("moment", type_=schema.TimeColumn),
        sa.exists().where(queries.SAME_ALERT, runs.c.id == run_alerts.c.run_id, runs.c.unfinished),
    )
    .order_by(alerts.c.last_heard_at, alerts.c.fingerprint, alerts.c.starts_at)
)
LINKED_RUNS = Lookup(
    sa.select(
        run_alerts.c.fingerprint,
        run_alerts.c.starts_at,
        runs.c.id,
        runs.c.playbook,
        runs.c.target_key,
        runs.c.status,
        runs.c.decision,
        runs.c.ended_at,
        sa.and_(runs.c.repeats.is_not(None), runs.c.started_by.is_(None)),  # `LinkedRun.is_again`: no person started it
    )
    .join(runs, runs.c.id == run_alerts.c.run_id)
    .where(run_alerts.c.fingerprint.in_(KEYS), queries.within(run_alerts.c.starts_at))
    .order_by(run_alerts.c.seq)
)
OPEN_RUNS = sa.select(runs.c.id, runs.c.playbook, runs.c.target_key, runs.c.parent).where(schema.is_open)


def _for_each_key(answer: sa.Select[Any]) -> Lookup:
    """Query each key separately: for a list, PostgreSQL may read all rows of a table without statistics."""
    return Lookup(sa.select(WANTED.c.key, answer.scalar_subquery().label("answer")))


def _last_ended(*conditions: sa.ColumnElement[bool]) -> Lookup:
    of_target = runs.c.playbook == sa.bindparam("playbook"), runs.c.target_key == WANTED.c.key, schema.was_started
    return _for_each_key(sa.select(sa.func.max(runs.c.ended_at)).where(*of_target, *conditions))


LAST_ENDED = _last_ended()
LAST_ENDED_UNOBSERVED = _last_ended(runs.c.status != Status.OBSERVED.value)
COUNT_STARTED = (
    sa.select(sa.func.count())
    .select_from(runs)
    .where(
        runs.c.playbook == sa.bindparam("playbook"),
        schema.was_started,
        schema.is_no_member,
        runs.c.created_at > sa.bindparam("since", type_=schema.TimeColumn),
    )
)
_SINCE = sa.bindparam("since", type_=schema.TimeColumn)
COUNT_STARTED_BY_TARGET = _for_each_key(
    sa.select(sa.func.count())
    .select_from(runs)
    .where(
        runs.c.playbook == sa.bindparam("playbook"),
        runs.c.target_key == WANTED.c.key,
        schema.was_started,
        schema.is_no_member,
        runs.c.created_at > _SINCE,
    )
)
LIMITED_TARGETS = (
    sa.select(runs.c.target_key)
    .where(
        runs.c.playbook == sa.bindparam("playbook"),
        runs.c.decision == Decision.RATE_LIMITED.value,
        runs.c.created_at > _SINCE,
        schema.is_no_member,
        sa.exists().where(steps.c.run_id == runs.c.id, steps.c.phase == ON_LIMITED),
    )
    .distinct()
)
_HAS_ACTED = (
    runs.c.playbook == sa.bindparam("playbook"),
    runs.c.target_key == WANTED.c.key,
    schema.was_started,
    runs.c.acted_at.is_not(None),
)
COUNT_ACTED_BY_TARGET = _for_each_key(
    sa.select(sa.func.count()).select_from(runs).where(*_HAS_ACTED, runs.c.acted_at > _SINCE)
)
LAST_ACTED_BY_TARGET = _for_each_key(
    sa.select(runs.c.id).where(*_HAS_ACTED).order_by(runs.c.acted_at.desc(), runs.c.id.desc()).limit(1)
)
# `Run.is_vouched_for`: a person approved the group's list
_IS_VOUCHED_FOR = sa.and_(runs.c.parent.is_not(None), runs.c.mode == Mode.APPROVE.value)
NODES_OF_STARTED_RUNS = (
    sa.select(runs.c.node, sa.func.max(runs.c.created_at).label("latest"))
    .where(
        runs.c.decision == Decision.STARTED.value,
        runs.c.created_at > _SINCE,
        runs.c.node.is_not(None),
        sa.not_(_IS_VOUCHED_FOR),
    )
    .group_by(runs.c.node)
)
NODES_TOUCHED = (
    sa.select(touched_nodes.c.node, sa.func.max(touched_nodes.c.at).label("latest"))
    .where(touched_nodes.c.at > _SINCE, ~sa.exists().where(runs.c.id == touched_nodes.c.run_id, _IS_VOUCHED_FOR))
    .group_by(touched_nodes.c.node)
)
_IS_AT_WORK = sa.and_(runs.c.unfinished, runs.c.status.in_(schema.OPEN_STATUSES), runs.c.acted_at.is_not(None))
NODES_AT_WORK = (
    sa.select(runs.c.node)
    .where(_IS_AT_WORK, runs.c.node.is_not(None))
    .union(sa.select(touched_nodes.c.node).join(runs, runs.c.id == touched_nodes.c.run_id).where(_IS_AT_WORK))
)
TOUCHED_BY = sa.select(touched_nodes.c.node).where(touched_nodes.c.run_id == sa.bindparam("run"))
COUNT_ALERTS = _for_each_key(sa.select(sa.func.count()).where(run_alerts.c.run_id == WANTED.c.key))
UNFINISHED_RUNS = sa.select(runs).where(runs.c.unfinished).order_by(runs.c.created_at, runs.c.id)
_RUNS_OF_FIRING = (
    sa.select(run_alerts.c.run_id)
    .join(alerts, queries.SAME_ALERT)
    .where(
        # The condition is repeated so that SQLite begins with the few firing alerts, not with all links.
        run_alerts.c.fingerprint.in_(sa.select(alerts.c.fingerprint).where(alerts.c.resolved_at.is_(None))),
        alerts.c.resolved_at.is_(None),
    )
)
_OF_FIRING = _RUNS_OF_FIRING.subquery()
_MEMBERS_OF_FIRING = sa.select(runs.c.id).where(runs.c.parent.in_(sa.select(_OF_FIRING.c.run_id)))
RUNS_IN_EFFECT = (
    sa.select(steps.c.run_id)
    .where(
        steps.c.run_id.in_(sa.select(runs.c.id).where(runs.c.unfinished).union(_RUNS_OF_FIRING, _MEMBERS_OF_FIRING)),
        steps.c.action.in_(sa.bindparam("actions", expanding=True)),
        steps.c.command_id.is_not(None),
    )
    .distinct()
)
_PARENT: sa.BindParameter[str] = sa.bindparam("parent")
_members = runs.alias("members")
UPDATE_PARENT = (
    sa.update(runs)
    .where(runs.c.id == sa.bindparam("group"))
    .values(
        unfinished=sa.or_(
            runs.c.status.in_(schema.OPEN_STATUSES),
            sa.exists().where(_members.c.parent == runs.c.id, _members.c.unfinished, _members.c.parent.is_not(None)),
        )
    )
)
"""A parent is unfinished while a member is, so that its alert is followed to the end and the history shows it."""
REQUIRE_NEWER_READER = (
    sa.update(schema.identity).where(schema.identity.c.readable_from < schema.HEAD).values(readable_from=schema.HEAD)
)
"""After a run that earlier releases cannot read, they must refuse the store instead of failing on each page."""
GROUP_LIST = sa.select(schema.groups.c.members).where(schema.groups.c.run_id == _PARENT)
MEMBERS = sa.select(
    *(runs.c.target_key, runs.c.id, runs.c.batch, runs.c.status, runs.c.decision, runs.c.unfinished, runs.c.acted_at),
    runs.c.message,
).where(runs.c.parent == _PARENT)
UNFINISHED_MEMBERS = sa.select(runs.c.id).where(runs.c.parent == _PARENT, runs.c.unfinished).order_by(runs.c.id)
_HAS_UNDO = sa.exists().where(
    steps.c.run_id == runs.c.id, steps.c.undo_status.in_(sa.bindparam("undos", expanding=True))
)
MEMBERS_WITH_UNDO = sa.select(runs.c.id).where(runs.c.parent == _PARENT, _HAS_UNDO).order_by(runs.c.id)
_COMMAND: sa.BindParameter[str] = sa.bindparam("command")
RUN_OF_COMMAND = (
    sa.select(steps.c.run_id)
    .where(steps.c.command_id == _COMMAND, schema.is_uncertain)
    .union_all(sa.select(steps.c.run_id).where(steps.c.undo_command_id == _COMMAND, schema.is_not_undone))
    .limit(1)
)
RUN_OF_REQUEST = sa.select(runs.c.id).where(runs.c.request_key == sa.bindparam("key"))
EVENTS_OF_KIND = (
    sa.select(*schema.events.columns)
    .where(schema.events.c.run_id == sa.bindparam("run"), schema.events.c.kind == sa.bindparam("kind"))
    .order_by(schema.events.c.seq)
)
NODES = sa.select(schema.nodes)
CONTROLS = sa.select(schema.controls)
TIME_GAPS = sa.select(schema.time_gaps).order_by(schema.time_gaps.c.seq)
JOB_LIVES = sa.select(schema.job_lives)
ADD_JOB_LIVES = sa.insert(schema.job_lives)
FORGET_JOB_LIVES = sa.delete(schema.job_lives).where(schema.job_lives.c.name == sa.bindparam("job"))
LIMIT_LAST_REPORTS = (
    sa.update(alerts)
    .where(alerts.c.resolved_at.is_(None), alerts.c.last_heard_at > sa.bindparam("moment", type_=schema.TimeColumn))
    .values(last_heard_at=sa.bindparam("moment", type_=schema.TimeColumn))
)
PLAYBOOK_TEXT = sa.select(schema.playbook_versions.c.text).where(
    schema.playbook_versions.c.name == sa.bindparam("name"),
    schema.playbook_versions.c.version == sa.bindparam("version"),
)


# Finds only a member of this name: inside a text, JSON puts a backslash before quotes.
_NAME_IN_JSON = r'[{,]"alertname":"((?:[^"\\]|\\.)*)"'


def firing(names: Collection[str] | None, dialect: sa.Dialect) -> sa.Select[Any]:
    """Select unresolved alerts. Names are compared with labels: ``alert_name`` is that of the first report."""
    if names is None:
        return _FIRING
    return _firing_of(tuple(sorted(names)), dialect.name)


@lru_cache(maxsize=64)  # each look at playbooks and rules asks for the same names
def _firing_of(names: tuple[str, ...], dialect: str) -> sa.Select[Any]:
    labels = sa.type_coerce(alerts.c.labels, Text)
    # One list: a condition for each name costs seconds for a few hundred, and SQLite takes no more than a thousand.
    if dialect == "sqlite":
        return _FIRING.where(sa.func.json_extract(labels, "$.alertname").in_(names))
    # As JSON text: PostgreSQL reads no JSON with a NUL, which an alert map may have set in any label.
    stated = [encode_json(name)[1:-1] for name in names]
    return _FIRING.where(sa.func.substring(labels, _NAME_IN_JSON).in_(stated))
