"""What rules have found in logs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

Text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "findings",
        sa.Column("id", Text, nullable=False),
        sa.Column("key", Text, nullable=False),
        sa.Column("rule", Text, nullable=False),
        sa.Column("role", Text, nullable=False),
        sa.Column("cause", Text, nullable=False),
        sa.Column("target_kind", Text, nullable=False),
        sa.Column("node", Text),
        sa.Column("gpu", Text),
        sa.Column("job", Text),
        sa.Column("attempt", sa.Integer),
        sa.Column("origin", Text, nullable=False),
        sa.Column("line", Text, nullable=False),
        sa.Column("first_at", sa.BigInteger, nullable=False),
        sa.Column("last_at", sa.BigInteger, nullable=False),
        sa.Column("heard_first_at", sa.BigInteger, nullable=False),
        sa.Column("heard_at", sa.BigInteger, nullable=False),
        sa.Column("labels", Text, nullable=False),
        sa.Column("fields", Text, nullable=False),
        sa.Column("ranks", Text, nullable=False),
        sa.Column("nodes", Text, nullable=False),
        sa.Column("count", sa.BigInteger, nullable=False),
        sa.Column("time_source", Text, nullable=False),
        sa.Column("clock_error", sa.Float, nullable=False),
        sa.Column("shape", Text, nullable=False),
        sa.Column("is_printed", sa.Boolean, nullable=False),
        sa.Column("ended_at", sa.BigInteger),
        sa.Column("ended_because", Text),
        sa.Column("is_suspected", sa.Boolean, nullable=False),
        sa.Column("confirmed_by", Text, nullable=False),
        sa.Column("fingerprint", Text),
        sa.Column("alert", Text),
        sa.Column("no_alert_because", Text, nullable=False),
        sa.Column("tell_at", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name="pk_findings"),
    )
    _index("uq_findings_open", ["key"], "ended_at IS NULL", unique=True)
    _index("ix_findings_open", ["heard_first_at", "id"], "ended_at IS NULL")
    _index("ix_findings_tell", ["tell_at"], "tell_at IS NOT NULL")
    _index("ix_findings_job", ["job", "heard_first_at", "id"], "job IS NOT NULL")
    _index("ix_findings_alert", ["fingerprint"], "fingerprint IS NOT NULL")
    op.create_index("ix_findings_heard_first", "findings", ["heard_first_at", "id"])
    op.create_index("ix_findings_rule", "findings", ["rule", "heard_first_at", "id"])
    op.create_index("ix_findings_heard", "findings", ["heard_at"])
    op.create_table(
        "finding_episodes",
        sa.Column("node", Text, nullable=False),
        sa.Column("id", Text, nullable=False),
        sa.Column("finding_id", Text, nullable=False),
        sa.Column("count", sa.BigInteger, nullable=False),
        sa.Column("counted_before", sa.BigInteger, nullable=False),
        sa.Column("is_over", sa.Boolean, nullable=False),
        sa.Column("heard_at", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["finding_id"], ["findings.id"], name="fk_finding_episodes_finding_id_findings"),
        sa.PrimaryKeyConstraint("node", "id", name="pk_finding_episodes"),
    )
    op.create_index("ix_finding_episodes_finding", "finding_episodes", ["finding_id", "node"])
    op.create_table(
        "finding_excerpts",
        sa.Column("finding_id", Text, nullable=False),
        sa.Column("node", Text, nullable=False),
        sa.Column("id", Text, nullable=False),
        sa.Column("source", Text, nullable=False),
        sa.Column("stream", Text, nullable=False),
        sa.Column("rank", sa.Integer),
        sa.Column("first_at", sa.BigInteger, nullable=False),
        sa.Column("lines", Text, nullable=False),
        sa.Column("at", sa.Integer, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["finding_id"], ["findings.id"], name="fk_finding_excerpts_finding_id_findings"),
        sa.PrimaryKeyConstraint("finding_id", "node", "id", name="pk_finding_excerpts"),
    )
    op.create_table(
        "kept_jobs",
        sa.Column("job", Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("by", Text, nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("note", Text, nullable=False),
        sa.PrimaryKeyConstraint("job", "attempt", name="pk_kept_jobs"),
    )
    op.create_table(
        "job_places",
        sa.Column("job", Text, nullable=False),
        sa.Column("node", Text, nullable=False),
        sa.Column("seen_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("job", "node", name="pk_job_places"),
    )


def _index(name: str, columns: list[str], where: str, unique: bool = False) -> None:
    op.create_index(
        name, "findings", columns, unique=unique, sqlite_where=sa.text(where), postgresql_where=sa.text(where)
    )
