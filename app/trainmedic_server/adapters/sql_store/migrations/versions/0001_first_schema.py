"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_WAS_STARTED = "status <> 'not_started'"
_IS_OPEN = "status IN ('running', 'waiting', 'awaiting_approval')"


def upgrade() -> None:
    _create_alerts()
    _create_runs()
    _create_indexes_of_runs()
    _create_run_alerts()
    _create_steps()
    _create_orders()
    _create_events()
    _create_controls()
    _create_nodes()
    _create_playbook_versions()


def _create_alerts() -> None:
    op.create_table(
        "alerts",
        sa.Column("fingerprint", Text, nullable=False),
        sa.Column("starts_at", sa.BigInteger, nullable=False),
        sa.Column("status", Text, nullable=False),
        sa.Column("labels", Text, nullable=False),
        sa.Column("annotations", Text, nullable=False),
        sa.Column("ends_at", sa.BigInteger),
        sa.Column("generator_url", Text, nullable=False),
        sa.Column("first_heard_at", sa.BigInteger, nullable=False),
        sa.Column("last_heard_at", sa.BigInteger, nullable=False),
        sa.Column("times_heard", sa.BigInteger, nullable=False),
        sa.Column("resolved_at", sa.BigInteger),
        sa.Column("resolved_because", Text),
        sa.PrimaryKeyConstraint("fingerprint", "starts_at", name="pk_alerts"),
    )
    _partial_index("ix_alerts_firing", "alerts", ["fingerprint", "starts_at"], where="resolved_at IS NULL")
    op.create_index("ix_alerts_last_heard", "alerts", ["last_heard_at"])


def _create_runs() -> None:
    op.create_table(
        "runs",
        sa.Column("id", Text, nullable=False),
        sa.Column("playbook", Text, nullable=False),
        sa.Column("version", Text, nullable=False),
        sa.Column("target_kind", Text),
        sa.Column("node", Text),
        sa.Column("gpu", Text),
        sa.Column("job", Text),
        sa.Column("target_key", Text, nullable=False),
        sa.Column("mode", Text, nullable=False),
        sa.Column("status", Text, nullable=False),
        sa.Column("decision", Text, nullable=False),
        sa.Column("alert_fingerprint", Text, nullable=False),
        sa.Column("alert_starts_at", sa.BigInteger, nullable=False),
        sa.Column("alert_name", Text, nullable=False),
        sa.Column("alert_labels", Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("ended_at", sa.BigInteger),
        sa.Column("acted_at", sa.BigInteger),
        sa.Column("waiting_on", Text),
        sa.Column("message", Text, nullable=False),
        sa.Column("unfinished", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
    )


def _create_indexes_of_runs() -> None:
    op.create_index("ix_runs_alert_name", "runs", ["alert_name", "created_at", "id"])
    _partial_index("ix_runs_cooldown", "runs", ["playbook", "target_key", "ended_at", "status"], where=_WAS_STARTED)
    op.create_index("ix_runs_created", "runs", ["created_at", "id"])
    op.create_index("ix_runs_decision", "runs", ["decision", "created_at", "id"])
    _partial_index("ix_runs_gpu", "runs", ["gpu", "created_at", "id"], where="gpu IS NOT NULL")
    _partial_index("ix_runs_job", "runs", ["job", "created_at", "id"], where="job IS NOT NULL")
    _partial_index("ix_runs_node", "runs", ["node", "created_at", "id"], where="node IS NOT NULL")
    op.create_index("ix_runs_playbook", "runs", ["playbook", "created_at", "id", "status"])
    _partial_index("ix_runs_started", "runs", ["playbook", "created_at", "status"], where=_WAS_STARTED)
    op.create_index("ix_runs_status", "runs", ["status", "created_at", "id"])
    _partial_index("ix_runs_unfinished", "runs", ["created_at", "id"], where="unfinished = 1", postgresql="unfinished")
    _partial_index("uq_runs_open", "runs", ["playbook", "target_key"], where=_IS_OPEN, unique=True)


def _create_run_alerts() -> None:
    op.create_table(
        "run_alerts",
        sa.Column("seq", SERIAL, nullable=False),
        sa.Column("run_id", Text, nullable=False),
        sa.Column("fingerprint", Text, nullable=False),
        sa.Column("starts_at", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("run_id", "fingerprint", "starts_at", name="uq_run_alerts_run_id_fingerprint_starts_at"),
        sa.ForeignKeyConstraint(
            ["fingerprint", "starts_at"],
            ["alerts.fingerprint", "alerts.starts_at"],
            name="fk_run_alerts_fingerprint_starts_at_alerts",
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_run_alerts_run_id_runs"),
        sa.PrimaryKeyConstraint("seq", name="pk_run_alerts"),
    )
    op.create_index("ix_run_alerts_alert", "run_alerts", ["fingerprint", "starts_at"])


def _create_steps() -> None:
    op.create_table(
        "steps",
        sa.Column("run_id", Text, nullable=False),
        sa.Column("phase", Text, nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("id", Text, nullable=False),
        sa.Column("kind", Text, nullable=False),
        sa.Column("action", Text),
        sa.Column("status", Text, nullable=False),
        sa.Column("params", Text, nullable=False),
        sa.Column("attempts", Text, nullable=False),
        sa.Column("output", Text, nullable=False),
        sa.Column("error", Text),
        sa.Column("message", Text),
        sa.Column("started_at", sa.BigInteger),
        sa.Column("ended_at", sa.BigInteger),
        sa.Column("deadline", sa.BigInteger),
        sa.Column("retry_at", sa.BigInteger),
        sa.Column("command_id", Text),
        sa.Column("undo_trigger", Text),
        sa.Column("undo_action", Text),
        sa.Column("undo_params", Text),
        sa.Column("undo_of", Text),
        sa.Column("undo_status", Text),
        sa.Column("undo_because", Text),
        sa.Column("undo_attempts", Text),
        sa.Column("undo_output", Text),
        sa.Column("undo_error", Text),
        sa.Column("undo_retry_at", sa.BigInteger),
        sa.Column("undo_command_id", Text),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_steps_run_id_runs"),
        sa.PrimaryKeyConstraint("run_id", "phase", "position", name="pk_steps"),
        sqlite_with_rowid=False,
    )
    _partial_index("ix_steps_command", "steps", ["command_id"], where="command_id IS NOT NULL")
    _partial_index("ix_steps_undo_command", "steps", ["undo_command_id"], where="undo_command_id IS NOT NULL")


def _create_orders() -> None:
    op.create_table(
        "orders",
        sa.Column("seq", SERIAL, nullable=False),
        sa.Column("id", Text, nullable=False),
        sa.Column("run_id", Text, nullable=False),
        sa.Column("kind", Text, nullable=False),
        sa.Column("actor", Text, nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("note", Text, nullable=False),
        sa.Column("step", Text),
        sa.UniqueConstraint("id", name="uq_orders_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_orders_run_id_runs"),
        sa.PrimaryKeyConstraint("seq", name="pk_orders"),
    )
    op.create_index("ix_orders_run", "orders", ["run_id"])


def _create_events() -> None:
    op.create_table(
        "events",
        sa.Column("seq", SERIAL, nullable=False),
        sa.Column("run_id", Text),
        sa.Column("kind", Text, nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("actor", Text, nullable=False),
        sa.Column("data", Text, nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_events"),
        sqlite_autoincrement=True,
    )
    _partial_index("ix_events_of_no_run", "events", ["at"], where="run_id IS NULL")
    op.create_index("ix_events_run", "events", ["run_id", "seq"])


def _create_controls() -> None:
    op.create_table(
        "controls",
        sa.Column("id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("paused", sa.Boolean, nullable=False),
        sa.Column("paused_by", Text),
        sa.Column("paused_at", sa.BigInteger),
        sa.Column("breaker_open", sa.Boolean, nullable=False),
        sa.Column("breaker_opened_at", sa.BigInteger),
        sa.Column("breaker_reason", Text),
        sa.Column("alive_at", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name="pk_controls"),
    )


def _create_nodes() -> None:
    op.create_table(
        "nodes",
        sa.Column("name", Text, nullable=False),
        sa.Column("seen_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_nodes"),
    )


def _create_playbook_versions() -> None:
    op.create_table(
        "playbook_versions",
        sa.Column("name", Text, nullable=False),
        sa.Column("version", Text, nullable=False),
        sa.Column("text", Text, nullable=False),
        sa.Column("kept_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", "version", name="pk_playbook_versions"),
    )


def _partial_index(
    name: str, table: str, columns: list[str], *, where: str, postgresql: str | None = None, unique: bool = False
) -> None:
    """An index of the rows for which `where` holds; `postgresql` is the same in that database's words."""
    op.create_index(
        name,
        table,
        columns,
        unique=unique,
        sqlite_where=sa.text(where),
        postgresql_where=sa.text(postgresql or where),
    )
