"""The gaps in the time of day."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "time_gaps",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), nullable=False),
        sa.Column("ended_at", sa.BigInteger, nullable=False),
        sa.Column("microseconds", sa.BigInteger, nullable=False),
        sa.Column("is_downtime", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_time_gaps"),
    )
