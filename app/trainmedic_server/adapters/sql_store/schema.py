"""Tables of the run store. Each index states its query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from trainmedic_server.adapters.sql_store import finding_tables as finding_tables  # so that they are in the registry
from trainmedic_server.adapters.sql_store import messages as messages
from trainmedic_server.adapters.sql_store import sessions as sessions
from trainmedic_server.adapters.sql_store import shown_questions as shown_questions
from trainmedic_server.adapters.sql_store.columns import JsonColumn, Serial, Text, partial_index
from trainmedic_server.adapters.sql_store.columns import TimeColumn as TimeColumn
from trainmedic_server.adapters.sql_store.columns import metadata as metadata
from trainmedic_server.domain.run import OPEN, OrderKind, Status, StepStatus, UndoStatus

HEAD = "0022"
READABLE_FROM = "0016"
"""Oldest revision whose code works on `HEAD`. It becomes `HEAD` if a migration removes or changes what that code uses.
"""

alerts = sa.Table(
    "alerts",
    metadata,
    sa.Column("fingerprint", Text, primary_key=True),
    sa.Column("starts_at", TimeColumn, primary_key=True),
    sa.Column("status", Text, nullable=False),
    sa.Column("labels", JsonColumn, nullable=False),
    sa.Column("annotations", JsonColumn, nullable=False),
    sa.Column("ends_at", TimeColumn),
    sa.Column("generator_url", Text, nullable=False),
    sa.Column("first_heard_at", TimeColumn, nullable=False),
    sa.Column("last_heard_at", TimeColumn, nullable=False),
    sa.Column("times_heard", sa.BigInteger, nullable=False),
    sa.Column("resolved_at", TimeColumn),
    sa.Column("resolved_because", Text),
    sa.Column("alert_name", Text),
    sa.Column("reactions", JsonColumn),
    sa.Column("reacted", sa.Boolean),
    sa.Column("original_name", Text),
    sa.Column("original_labels", JsonColumn),
)
"""`AlertRecord`s. ``reactions`` and ``reacted`` are null in rows of earlier releases, ``original_…`` if no alert map
changed the labels.
"""

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("id", Text, primary_key=True),
    sa.Column("playbook", Text, nullable=False),
    sa.Column("version", Text, nullable=False),
    sa.Column("target_kind", Text),
    sa.Column("node", Text),
    sa.Column("gpu", Text),
    sa.Column("job", Text),
    sa.Column("target_key", Text, nullable=False),  # "" without a target
    sa.Column("mode", Text, nullable=False),
    sa.Column("status", Text, nullable=False),
    sa.Column("decision", Text, nullable=False),
    sa.Column("alert_fingerprint", Text, nullable=False),
    sa.Column("alert_starts_at", TimeColumn, nullable=False),
    sa.Column("alert_name", Text, nullable=False),
    sa.Column("alert_labels", JsonColumn, nullable=False),
    sa.Column("created_at", TimeColumn, nullable=False),
    sa.Column("ended_at", TimeColumn),
    sa.Column("acted_at", TimeColumn),
    sa.Column("waiting_on", Text),
    sa.Column("message", Text, nullable=False),
    sa.Column("unfinished", sa.Boolean, nullable=False),
    sa.Column("started_by", Text),
    sa.Column("repeats", Text),
    sa.Column("request_key", Text),
    sa.Column("original_alert_name", Text),
    sa.Column("original_labels", JsonColumn),
    sa.Column("parent", Text),  # ID of the parent run of a member of a group, else null
    sa.Column("batch", sa.Integer),  # of a member
    sa.Column("also", JsonColumn),
    sa.Column("memory", JsonColumn),
    sa.Column("request_digest", Text),
)
"""`Run`s. ``unfinished`` ones are open, or have a pending undo or an unfinished member. ``original_…`` are null if no
alert map changed the alert. ``also`` are the keys of further targets, null without any.
"""

groups = sa.Table(
    "groups",
    metadata,
    sa.Column("run_id", Text, sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("members", JsonColumn, nullable=False),  # target keys, also of members without a run
    sqlite_with_rowid=False,
)

run_alerts = sa.Table(
    "run_alerts",
    metadata,
    sa.Column("seq", Serial, primary_key=True),
    sa.Column("run_id", Text, sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("fingerprint", Text, nullable=False),
    sa.Column("starts_at", TimeColumn, nullable=False),
    sa.ForeignKeyConstraint(["fingerprint", "starts_at"], ["alerts.fingerprint", "alerts.starts_at"]),
    sa.UniqueConstraint("run_id", "fingerprint", "starts_at"),
)

steps = sa.Table(
    "steps",
    metadata,
    sa.Column("run_id", Text, sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("phase", Text, primary_key=True),
    sa.Column("position", sa.Integer, primary_key=True),
    sa.Column("id", Text, nullable=False),
    sa.Column("kind", Text, nullable=False),
    sa.Column("action", Text),
    sa.Column("status", Text, nullable=False),
    sa.Column("params", JsonColumn, nullable=False),
    sa.Column("attempts", JsonColumn, nullable=False),
    sa.Column("output", JsonColumn, nullable=False),
    sa.Column("error", Text),
    sa.Column("message", Text),
    sa.Column("started_at", TimeColumn),
    sa.Column("ended_at", TimeColumn),
    sa.Column("deadline", TimeColumn),
    sa.Column("retry_at", TimeColumn),
    sa.Column("command_id", Text),
    sa.Column("undo_trigger", Text),
    sa.Column("undo_action", Text),
    sa.Column("undo_params", JsonColumn),
    sa.Column("undo_of", Text),
    sa.Column("undo_status", Text),
    sa.Column("undo_because", Text),
    sa.Column("undo_attempts", JsonColumn),
    sa.Column("undo_output", JsonColumn),
    sa.Column("undo_error", Text),
    sa.Column("undo_retry_at", TimeColumn),
    sa.Column("undo_command_id", Text),
    sa.Column("target", Text),
    sqlite_with_rowid=False,
)
"""`StepState`s. ``command_id`` is that of the last attempt, ``undo_command_id`` too until the undo is done.
``undo_status`` is null without an undo, ``target`` for the run's target.
"""

touched_nodes = sa.Table(
    "touched_nodes",
    metadata,
    sa.Column("run_id", Text, sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("node", Text, primary_key=True),
    sa.Column("at", TimeColumn, nullable=False),
    sqlite_with_rowid=False,
)
"""Persisted before the action. ``at`` is the last time."""

orders = sa.Table(
    "orders",
    metadata,
    sa.Column("seq", Serial, primary_key=True),
    sa.Column("id", Text, nullable=False, unique=True),
    sa.Column("run_id", Text, sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("kind", Text, nullable=False),
    sa.Column("actor", Text, nullable=False),
    sa.Column("at", TimeColumn, nullable=False),
    sa.Column("note", Text, nullable=False),
    sa.Column("step", Text),
    sa.Column("asked", sa.Integer),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("seq", Serial, primary_key=True),
    sa.Column("run_id", Text),  # null if the event concerns no run
    sa.Column("kind", Text, nullable=False),
    sa.Column("at", TimeColumn, nullable=False),
    sa.Column("actor", Text, nullable=False),
    sa.Column("data", JsonColumn, nullable=False),
    sqlite_autoincrement=True,
)
"""A ``seq`` is never reused, even after pruning: readers resume after one."""
# audit: actions of people
partial_index("ix_events_people", events.c.seq, where="actor <> 'trainmedic'")

controls = sa.Table(
    "controls",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("paused", sa.Boolean, nullable=False),
    sa.Column("paused_by", Text),
    sa.Column("paused_at", TimeColumn),
    sa.Column("breaker_open", sa.Boolean, nullable=False),
    sa.Column("breaker_opened_at", TimeColumn),
    sa.Column("breaker_reason", Text),
    sa.Column("alive_at", TimeColumn),  # the server's last heartbeat, to measure downtimes
    sa.Column("pauses", JsonColumn),
    sa.Column("breaker_closed_at", TimeColumn),
)
"""One row. ``paused``, ``paused_by`` and ``paused_at`` summarise ``pauses``, which earlier releases do not read."""

time_gaps = sa.Table(
    "time_gaps",
    metadata,
    sa.Column("seq", Serial, primary_key=True),
    sa.Column("ended_at", TimeColumn, nullable=False),
    sa.Column("microseconds", sa.BigInteger, nullable=False),  # length of the gap
    sa.Column("is_downtime", sa.Boolean, nullable=False),
)

job_lives = sa.Table(
    "job_lives",
    metadata,
    sa.Column("name", Text, primary_key=True),
    sa.Column("state", Text, nullable=False),
    sa.Column("since", TimeColumn, nullable=False),
    sa.Column("instance", Text, nullable=False),
    sa.Column("reason", Text, nullable=False),
    sa.Column("failures", sa.Integer, nullable=False),
    sa.Column("restarts", sa.Integer, nullable=False),
    sa.Column("numbers", JsonColumn, nullable=False),
)

agent_lives = sa.Table(
    "agent_lives",
    metadata,
    sa.Column("name", Text, primary_key=True),
    sa.Column("seen_at", TimeColumn, nullable=False),
    sa.Column("lost_at", TimeColumn),
)

nodes = sa.Table(
    "nodes",
    metadata,
    sa.Column("name", Text, primary_key=True),
    sa.Column("seen_at", TimeColumn, nullable=False),
)

playbook_versions = sa.Table(
    "playbook_versions",
    metadata,
    sa.Column("name", Text, primary_key=True),
    sa.Column("version", Text, primary_key=True),
    sa.Column("text", Text, nullable=False),
    sa.Column("kept_at", TimeColumn, nullable=False),  # creation of the first run with this version
)

identity = sa.Table(
    "identity",
    metadata,
    sa.Column("id", Text, primary_key=True),
    sa.Column("readable_from", Text),
    sa.Column("counted_from", sa.BigInteger),
)
"""One row. Copies of the database share ``id``. ``readable_from``: `READABLE_FROM` of the code that migrated the
schema, or `HEAD` after a run that older code cannot read. ``counted_from`` is the first day with all its runs
in ``playbook_days``; null: every day.
"""

playbook_days = sa.Table(
    "playbook_days",
    metadata,
    sa.Column("day", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("playbook", Text, primary_key=True),
    sa.Column("fact", Text, primary_key=True),
    sa.Column("count", sa.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
"""Runs by creation day (days since 1970, UTC) and fact (``run_facts``)."""

OPEN_STATUSES = tuple(status.value for status in Status if status in OPEN)
_IS_OPEN = "status IN ({})".format(", ".join(f"'{status}'" for status in OPEN_STATUSES))
_WAS_STARTED = f"status <> '{Status.NOT_STARTED.value}'"

_IS_NAMED = "node <> ''"
_IS_NO_MEMBER = "parent IS NULL"
_IS_UNCERTAIN = f"status <> '{StepStatus.SUCCEEDED.value}'"
_IS_NOT_UNDONE = f"undo_status <> '{UndoStatus.DONE.value}'"
_IS_UNDO = f"kind = '{OrderKind.UNDO.value}'"

# Conditions with the exact words of the partial indexes, without which databases do not use these.
is_open = sa.text(_IS_OPEN)
is_closed = sa.text(f"NOT ({_IS_OPEN})")
was_started = sa.text(_WAS_STARTED)
is_named = sa.text(_IS_NAMED)
is_no_member = sa.text(f"runs.{_IS_NO_MEMBER}")
is_uncertain = sa.text(f"steps.{_IS_UNCERTAIN}")
is_not_undone = sa.text(_IS_NOT_UNDONE)
is_undo = sa.text(f"orders.{_IS_UNDO}")


def _page_index(
    name: str, *equal: sa.Column[Any], further: Sequence[sa.Column[Any]] = (), where: str | None = None
) -> None:
    condition: dict[str, Any] = {} if where is None else {"sqlite_where": sa.text(where)}
    sa.Index(f"ix_runs_{name}", *equal, runs.c.created_at, *further, **condition)


# unresolved alerts: those of a fingerprint, or all
partial_index("ix_alerts_firing", alerts.c.fingerprint, alerts.c.starts_at, where="resolved_at IS NULL")
# one page of the alerts: all, by name, or without reaction (narrow, because each new alert pays for them; alerts of one
# moment are sorted when read)
sa.Index("ix_alerts_first_heard", alerts.c.first_heard_at)
sa.Index("ix_alerts_name", alerts.c.alert_name, alerts.c.first_heard_at)
_IS_MAPPED = "original_name IS NOT NULL"
partial_index("ix_alerts_original_name", alerts.c.original_name, alerts.c.first_heard_at, where=_IS_MAPPED)
partial_index("ix_alerts_not_reacted", alerts.c.first_heard_at, where="reacted = 0")
# pruning
sa.Index("ix_alerts_last_heard", alerts.c.last_heard_at)
sa.Index("ix_run_alerts_alert", run_alerts.c.fingerprint, run_alerts.c.starts_at)

# one page of the history for each filter: equality first, then the time. IDs are no keys, because they would be more
# than half of each index; runs of one moment are sorted when read. On PostgreSQL, migrations add IDs with INCLUDE: a
# search by several filters then reads only indexes, for which SQLite has row numbers.
# Most exclude members of groups, because a page shows a group as one run. Pruning and the breaker need members, in the
# indexes of the time and of the decision.
_page_index("created")
_page_index("alert_name", runs.c.alert_name, where=_IS_NO_MEMBER)
_page_index(
    "original_alert_name",
    runs.c.original_alert_name,
    where=f"original_alert_name IS NOT NULL AND {_IS_NO_MEMBER}",
)
# Counting by status reads only this index.
_page_index("playbook", runs.c.playbook, further=[runs.c.status], where=_IS_NO_MEMBER)
_page_index("status", runs.c.status, where=_IS_NO_MEMBER)
_page_index("decision", runs.c.decision)
_page_index("node", runs.c.node, where="node IS NOT NULL")
_page_index("gpu", runs.c.gpu, where="gpu IS NOT NULL")
_page_index("job", runs.c.job, where="job IS NOT NULL")
_page_index("also", where="also IS NOT NULL")

# history of a node: runs on jobs that touched it; history of a person: operator commands. The condition is always true
# and keeps the breaker's count off this index
partial_index("ix_touched_nodes_node", touched_nodes.c.node, touched_nodes.c.run_id, where=_IS_NAMED)
sa.Index("ix_orders_actor", orders.c.actor, orders.c.run_id)

# guards: cooldown of a target. The status is a column although the condition implies it: SQLite answers from the index
# alone only if that has all compared columns
partial_index(
    "ix_runs_cooldown", runs.c.playbook, runs.c.target_key, runs.c.ended_at, runs.c.status, where=_WAS_STARTED
)
# at most one open run for each playbook and target
partial_index("uq_runs_open", runs.c.playbook, runs.c.target_key, where=_IS_OPEN, unique=True)
# members of a group: at most one run each
partial_index("uq_runs_member", runs.c.parent, runs.c.target_key, where="parent IS NOT NULL", unique=True)
partial_index("ix_runs_unfinished_members", runs.c.parent, where="unfinished = 1 AND parent IS NOT NULL")
# one run for a repeated manual request
partial_index("uq_runs_request", runs.c.request_key, where="request_key IS NOT NULL", unique=True)
# work to resume after a start
partial_index("ix_runs_unfinished", runs.c.created_at, runs.c.id, where="unfinished = 1")

# run of a late reply; succeeded steps need none
partial_index("ix_steps_command", steps.c.command_id, where=f"command_id IS NOT NULL AND {_IS_UNCERTAIN}")
partial_index(
    "ix_steps_undo_command", steps.c.undo_command_id, where=f"undo_command_id IS NOT NULL AND {_IS_NOT_UNDONE}"
)

# the breaker's count
sa.Index("ix_touched_nodes_at", touched_nodes.c.at, touched_nodes.c.node)

sa.Index("ix_orders_run", orders.c.run_id)
partial_index("ix_orders_undo", orders.c.run_id, where=_IS_UNDO)
sa.Index("ix_events_run", events.c.run_id)
# pruning
partial_index("ix_events_of_no_run", events.c.at, where="run_id IS NULL")
