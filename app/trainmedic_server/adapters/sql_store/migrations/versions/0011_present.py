"""When agents were heard of last; runs by a node that they touched, and by who ordered something of them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "agent_lives",
        sa.Column("name", Text, nullable=False),
        sa.Column("seen_at", sa.BigInteger, nullable=False),
        sa.Column("lost_at", sa.BigInteger),
        sa.PrimaryKeyConstraint("name", name="pk_agent_lives"),
    )
    where = sa.text("node <> ''")
    op.create_index(
        "ix_touched_nodes_node", "touched_nodes", ["node", "run_id"], sqlite_where=where, postgresql_where=where
    )
    op.create_index("ix_orders_actor", "orders", ["actor", "run_id"])
