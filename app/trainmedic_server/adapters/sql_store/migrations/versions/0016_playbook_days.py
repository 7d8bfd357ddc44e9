"""Counts by playbook and day; which releases work on the schema; smaller indexes."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")

_DAY = 86_400_000_000
_COUNTED_DAYS = 31
"""The last ones, which the list of playbooks shows; what is older is counted when it is asked for."""
_HOUR = 3_600_000_000
_PAGES = {
    "created": ([], [], None),
    "alert_name": (["alert_name"], [], None),
    "playbook": (["playbook"], ["status"], None),
    "status": (["status"], [], None),
    "decision": (["decision"], [], None),
    "node": (["node"], [], "node IS NOT NULL"),
    "gpu": (["gpu"], [], "gpu IS NOT NULL"),
    "job": (["job"], [], "job IS NOT NULL"),
}
_GIVE_IDENTITY = """
INSERT INTO identity (id) SELECT :id WHERE EXISTS (SELECT 1 FROM runs) AND NOT EXISTS (SELECT 1 FROM identity)
"""
"""A store of before there were identities gets its own at its next start; what is counted has to be told before."""
_RUNS = "SELECT playbook, status, created_at, ended_at FROM runs WHERE created_at >= :since"
_IS_TIMED_OUT = """
SELECT playbook, created_at FROM runs WHERE created_at >= :since AND status NOT IN ({open}, 'not_started', 'observed')
AND EXISTS (SELECT 1 FROM steps WHERE steps.run_id = runs.id AND steps.status = 'timed_out')
"""
_IS_REPEATED = """
SELECT playbook, created_at FROM runs WHERE created_at >= :since AND status NOT IN ('not_started', 'observed')
AND EXISTS (
    SELECT 1 FROM runs AS earlier WHERE earlier.playbook = runs.playbook AND earlier.target_key = runs.target_key
    AND earlier.ended_at <= runs.created_at AND earlier.ended_at >= runs.created_at - {hour}
    AND earlier.status <> 'not_started' AND earlier.status <> 'observed'
)
"""
_ANSWERED = """
SELECT runs.playbook, runs.created_at, steps.started_at, steps.ended_at FROM runs JOIN steps ON steps.run_id = runs.id
WHERE runs.created_at >= :since AND runs.status NOT IN ({open}, 'not_started') AND steps.kind = 'approve'
AND steps.status IN ('succeeded', 'rejected') AND steps.started_at IS NOT NULL AND steps.ended_at IS NOT NULL
"""
_EFFECTS = "SELECT playbook, verdict, acted_at FROM effects WHERE acted_at >= :since"
_OPEN = "'running', 'waiting', 'awaiting_approval'"


def upgrade() -> None:
    op.add_column("identity", sa.Column("readable_from", Text))
    op.add_column("identity", sa.Column("counted_from", sa.BigInteger))
    table = op.create_table(
        "playbook_days",
        sa.Column("day", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("playbook", Text, nullable=False),
        sa.Column("fact", Text, nullable=False),
        sa.Column("count", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("day", "playbook", "fact", name="pk_playbook_days"),
        sqlite_with_rowid=False,
    )
    first = int(time.time() * 1e6) // _DAY - _COUNTED_DAYS
    connection = op.get_bind()
    connection.execute(sa.text(_GIVE_IDENTITY), {"id": uuid.uuid4().hex})
    connection.execute(sa.text("UPDATE identity SET counted_from = :first"), {"first": first})
    counts = Counter(_facts(connection, first * _DAY))
    rows = [{"day": day, "playbook": name, "fact": fact, "count": n} for (day, name, fact), n in counts.items()]
    op.bulk_insert(table, rows)
    _make_smaller()


def _facts(connection: sa.Connection, since: int) -> Iterator[tuple[int, str, str]]:
    """A day, a playbook and a fact for each time that it is to be counted."""

    def rows(text: str) -> Iterator[Any]:
        statement = sa.text(text.format(open=_OPEN, hour=_HOUR)).execution_options(stream_results=True)
        return iter(connection.execute(statement, {"since": since}))

    for playbook, status, created_at, ended_at in rows(_RUNS):
        yield created_at // _DAY, playbook, f"status:{status}"
        if status == "succeeded" and ended_at is not None:
            yield created_at // _DAY, playbook, f"repair_seconds:{_rounded(ended_at - created_at)}"
    for playbook, created_at in rows(_IS_TIMED_OUT):
        yield created_at // _DAY, playbook, "timed_out"
    for playbook, created_at in rows(_IS_REPEATED):
        yield created_at // _DAY, playbook, "repeated"
    for playbook, created_at, started_at, ended_at in rows(_ANSWERED):
        yield created_at // _DAY, playbook, f"person_seconds:{_rounded(ended_at - started_at)}"
    for playbook, verdict, acted_at in rows(_EFFECTS):
        yield acted_at // _DAY, playbook, f"effect:{verdict}"


def _rounded(microseconds: int) -> float:
    return float(f"{microseconds / 1e6:.2g}")


def _make_smaller() -> None:
    """Indexes without what makes up most of them, the ids of runs, which are read from the rows of one page instead;
    and without what nothing asks for."""
    op.drop_index("ix_runs_started", "runs")
    for name, (equal, beside, where) in _PAGES.items():
        op.drop_index(f"ix_runs_{name}", "runs")
        condition = _where(where) if where is not None else {}
        columns = [*equal, "created_at", *beside]
        op.create_index(f"ix_runs_{name}", "runs", columns, postgresql_include=["id"], **condition)
    op.drop_index("ix_events_run", "events")
    op.create_index("ix_events_run", "events", ["run_id"])
    op.drop_index("ix_steps_command", "steps")
    uncertain = _where("command_id IS NOT NULL AND status <> 'succeeded'")
    op.create_index("ix_steps_command", "steps", ["command_id"], **uncertain)
    op.drop_index("ix_steps_undo_command", "steps")
    not_undone = _where("undo_command_id IS NOT NULL AND undo_status <> 'done'")
    op.create_index("ix_steps_undo_command", "steps", ["undo_command_id"], **not_undone)
    op.create_index("ix_orders_undo", "orders", ["run_id"], **_where("kind = 'undo'"))


def _where(condition: str) -> dict[str, Any]:
    return {"sqlite_where": sa.text(condition), "postgresql_where": sa.text(condition)}
