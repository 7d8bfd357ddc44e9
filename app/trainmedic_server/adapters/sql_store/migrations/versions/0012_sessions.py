"""Sessions of the console, and the index by which people's own acts are found."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", Text, nullable=False),
        sa.Column("digest", Text, nullable=False),
        sa.Column("name", Text, nullable=False),
        sa.Column("token", Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("ends_at", sa.BigInteger, nullable=False),
        sa.Column("address", Text, nullable=False),
        sa.Column("browser", Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_sessions"),
    )
    where = sa.text("actor <> 'trainmedic'")
    op.create_index("ix_events_people", "events", ["seq"], sqlite_where=where, postgresql_where=where)
