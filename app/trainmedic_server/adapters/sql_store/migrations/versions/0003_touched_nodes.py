"""The nodes that runs touch."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "touched_nodes",
        sa.Column("run_id", Text, nullable=False),
        sa.Column("node", Text, nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_touched_nodes_run_id_runs"),
        sa.PrimaryKeyConstraint("run_id", "node", name="pk_touched_nodes"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_touched_nodes_at", "touched_nodes", ["at", "node"])
