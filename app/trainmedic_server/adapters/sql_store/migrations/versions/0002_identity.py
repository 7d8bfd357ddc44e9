"""Each run store has an identity, which a copy of it has too."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "identity", sa.Column("id", Text, nullable=False), sa.PrimaryKeyConstraint("id", name="pk_identity")
    )
