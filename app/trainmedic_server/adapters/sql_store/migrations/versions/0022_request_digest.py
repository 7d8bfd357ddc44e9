"""Digest of a manual start's request."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    text = 'TEXT COLLATE "C"' if connection.dialect.name == "postgresql" else "TEXT"
    connection.execute(sa.text(f"ALTER TABLE runs ADD COLUMN request_digest {text}"))
