"""The messages of a chat that show questions of runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "shown_questions",
        sa.Column("run_id", Text, nullable=False),
        sa.Column("step", Text, nullable=False),
        sa.Column("channel", Text, nullable=False),
        sa.Column("message", Text, nullable=False),
        sa.Column("shown", Text, nullable=False),
        sa.PrimaryKeyConstraint("run_id", "step", name="pk_shown_questions"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_shown_questions_run_id_runs"),
    )
