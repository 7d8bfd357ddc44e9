"""Memory of a run: its playbook's earlier runs on its target."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    text = 'TEXT COLLATE "C"' if connection.dialect.name == "postgresql" else "TEXT"
    connection.execute(sa.text(f"ALTER TABLE runs ADD COLUMN memory {text}"))
