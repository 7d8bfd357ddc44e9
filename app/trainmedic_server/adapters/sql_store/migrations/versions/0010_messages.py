"""Messages to people."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "messages",
        sa.Column("id", Text, nullable=False),
        sa.Column("channel", Text, nullable=False),
        sa.Column("kind", Text, nullable=False),
        sa.Column("severity", Text, nullable=False),
        sa.Column("topic", Text, nullable=False),
        sa.Column("title", Text, nullable=False),
        sa.Column("text", Text, nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("due_at", sa.BigInteger, nullable=False),
        sa.Column("run_id", Text),
        sa.Column("link", Text, nullable=False),
        sa.Column("sent_at", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name="pk_messages"),
    )
    _partial("ix_messages_waiting", ["channel", "at"], "sent_at IS NULL")
    _partial("ix_messages_run", ["run_id"], "run_id IS NOT NULL")
    _partial("ix_messages_sent", ["sent_at"], "sent_at IS NOT NULL")


def _partial(name: str, columns: list[str], where: str) -> None:
    op.create_index(name, "messages", columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))
