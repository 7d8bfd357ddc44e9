"""When the breaker was last closed, from which on its count begins again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("controls", sa.Column("breaker_closed_at", sa.BigInteger))
