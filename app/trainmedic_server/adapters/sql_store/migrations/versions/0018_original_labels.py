"""The names and labels that alerts had before an alert map changed them."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("alerts", sa.Column("original_name", Text))
    op.add_column("alerts", sa.Column("original_labels", Text))
    op.add_column("runs", sa.Column("original_alert_name", Text))
    op.add_column("runs", sa.Column("original_labels", Text))
    op.create_index(
        "ix_alerts_original_name", "alerts", ["original_name", "first_heard_at"], **_where("original_name IS NOT NULL")
    )
    op.create_index(
        "ix_runs_original_alert_name",
        "runs",
        ["original_alert_name", "created_at"],
        postgresql_include=["id"],
        **_where("original_alert_name IS NOT NULL"),
    )


def _where(condition: str) -> dict[str, Any]:
    return {"sqlite_where": sa.text(condition), "postgresql_where": sa.text(condition)}
