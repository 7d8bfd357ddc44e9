"""Pauses with a scope and an end, and who has started a run by hand."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("controls", sa.Column("pauses", Text))
    for name in ("started_by", "repeats", "request_key"):
        op.add_column("runs", sa.Column(name, Text))
    given = sa.text("request_key IS NOT NULL")
    op.create_index("uq_runs_request", "runs", ["request_key"], unique=True, sqlite_where=given, postgresql_where=given)
