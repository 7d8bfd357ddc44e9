"""What playbooks made of each alert, and pages of the alerts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")

_PAGE = ["first_heard_at"]
# What is known of earlier alerts: the runs, and decisions not to start one, that they led to.
_OF_TIES = """
FROM run_alerts JOIN runs ON runs.id = run_alerts.run_id
WHERE run_alerts.fingerprint = alerts.fingerprint AND run_alerts.starts_at = alerts.starts_at
"""
_MEMBERS = "runs.playbook, runs.decision, CASE runs.status WHEN 'not_started' THEN runs.message ELSE '' END, runs.id"
_FILLED = """
UPDATE alerts SET alert_name = coalesce({name}, ''), reactions = (SELECT {list} {ties}),
reacted = EXISTS (SELECT 1 {ties} AND runs.decision NOT IN ('target_unknown', 'target_ambiguous'))
"""
_WORDS = {
    "sqlite": {
        "name": "json_extract(labels, '$.alertname')",
        "list": f"json_group_array(json_array({_MEMBERS}))",
    },
    "postgresql": {
        "name": "labels::json ->> 'alertname'",
        "list": f"coalesce(json_agg(json_build_array({_MEMBERS}))::text, '[]')",
    },
}


def upgrade() -> None:
    op.add_column("alerts", sa.Column("alert_name", Text))
    op.add_column("alerts", sa.Column("reactions", Text))
    op.add_column("alerts", sa.Column("reacted", sa.Boolean))
    op.execute(sa.text(_FILLED.format(ties=_OF_TIES, **_WORDS[op.get_bind().dialect.name]).replace(":", "\\:")))
    op.create_index("ix_alerts_first_heard", "alerts", _PAGE)
    op.create_index("ix_alerts_name", "alerts", ["alert_name", *_PAGE])
    op.create_index(
        "ix_alerts_not_reacted",
        "alerts",
        _PAGE,
        sqlite_where=sa.text("reacted = 0"),
        postgresql_where=sa.text("NOT reacted"),
    )
