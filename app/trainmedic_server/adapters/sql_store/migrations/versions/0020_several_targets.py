"""Several targets in a run: the jobs on its node, and which steps work on them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    is_postgresql = connection.dialect.name == "postgresql"
    text, with_id = ('TEXT COLLATE "C"', " INCLUDE (id)") if is_postgresql else ("TEXT", "")
    for statement in (
        f"ALTER TABLE runs ADD COLUMN also {text}",
        f"ALTER TABLE steps ADD COLUMN target {text}",
        f"CREATE INDEX ix_runs_also ON runs (created_at){with_id} WHERE also IS NOT NULL",
    ):
        connection.execute(sa.text(statement))
