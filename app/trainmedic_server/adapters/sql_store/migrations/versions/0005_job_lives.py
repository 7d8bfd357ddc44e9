"""Whether jobs live."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "job_lives",
        sa.Column("name", Text, nullable=False),
        sa.Column("state", Text, nullable=False),
        sa.Column("since", sa.BigInteger, nullable=False),
        sa.Column("instance", Text, nullable=False),
        sa.Column("reason", Text, nullable=False),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("restarts", sa.Integer, nullable=False),
        sa.Column("numbers", Text, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_job_lives"),
    )
