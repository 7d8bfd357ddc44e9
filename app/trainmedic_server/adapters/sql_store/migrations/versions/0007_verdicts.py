"""Verdicts on the failures of jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "verdicts",
        sa.Column("id", Text, nullable=False),
        sa.Column("job", Text, nullable=False),
        sa.Column("attempt", sa.Integer),
        sa.Column("began_at", sa.BigInteger, nullable=False),
        sa.Column("made_at", sa.BigInteger, nullable=False),
        sa.Column("cause", Text, nullable=False),
        sa.Column("confidence", Text, nullable=False),
        sa.Column("node", Text),
        sa.Column("fingerprint", Text, nullable=False),
        sa.Column("plain", Text, nullable=False),
        sa.Column("labels", Text),
        sa.Column("tell_at", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name="pk_verdicts"),
    )
    op.create_index("ix_verdicts_job", "verdicts", ["job", "began_at"])
    op.create_index("ix_verdicts_began", "verdicts", ["began_at"])
    _partial("ix_verdicts_node", ["node", "began_at"], "node IS NOT NULL")
    _partial("ix_verdicts_tell", ["tell_at"], "tell_at IS NOT NULL")


def _partial(name: str, columns: list[str], where: str) -> None:
    op.create_index(name, "verdicts", columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))
