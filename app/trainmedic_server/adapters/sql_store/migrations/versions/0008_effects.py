"""The measured effects of runs, and how far each listener to the events has come."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "effects",
        sa.Column("run_id", Text, nullable=False),
        sa.Column("playbook", Text, nullable=False),
        sa.Column("acted_at", sa.BigInteger, nullable=False),
        sa.Column("due_at", sa.BigInteger),
        sa.Column("verdict", Text, nullable=False),
        sa.Column("plain", Text, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_effects_run_id_runs"),
        sa.PrimaryKeyConstraint("run_id", name="pk_effects"),
    )
    due = sa.text("due_at IS NOT NULL")
    op.create_index("ix_effects_due", "effects", ["due_at"], sqlite_where=due, postgresql_where=due)
    op.create_index("ix_effects_acted", "effects", ["acted_at", "playbook", "verdict"])
    op.create_table(
        "event_positions",
        sa.Column("listener", Text, nullable=False),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("listener", name="pk_event_positions"),
    )
