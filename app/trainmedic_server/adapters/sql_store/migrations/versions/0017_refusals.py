"""Time of the breaker's last closing, after which acts count, and message kinds that were added later."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("controls", sa.Column("breaker_closed_at", sa.BigInteger))
    op.add_column("messages", sa.Column("newer_kind", Text))
