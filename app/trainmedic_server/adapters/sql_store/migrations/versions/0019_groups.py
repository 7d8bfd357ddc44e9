"""Groups: the frozen list of a parent run, and its members, which the pages of the history leave out."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

_PAGES = {
    "alert_name": ("alert_name, created_at", ""),
    "original_alert_name": ("original_alert_name, created_at", "original_alert_name IS NOT NULL AND "),
    "playbook": ("playbook, created_at, status", ""),
    "status": ("status, created_at", ""),
}


def upgrade() -> None:
    connection = op.get_bind()
    is_postgresql = connection.dialect.name == "postgresql"
    text, with_id, keyed = (
        ('TEXT COLLATE "C"', " INCLUDE (id)", "") if is_postgresql else ("TEXT", "", " WITHOUT ROWID")
    )
    statements = [
        f"ALTER TABLE runs ADD COLUMN parent {text}",
        "ALTER TABLE runs ADD COLUMN batch INTEGER",
        f"CREATE TABLE groups ( run_id {text} NOT NULL, members {text} NOT NULL, "
        "CONSTRAINT pk_groups PRIMARY KEY (run_id), "
        f"CONSTRAINT fk_groups_run_id_runs FOREIGN KEY(run_id) REFERENCES runs (id) ){keyed}",
        "CREATE UNIQUE INDEX uq_runs_member ON runs (parent, target_key) WHERE parent IS NOT NULL",
    ]
    unfinished = "unfinished" if is_postgresql else "unfinished = 1"
    statements.append(
        f"CREATE INDEX ix_runs_unfinished_members ON runs (parent) WHERE {unfinished} AND parent IS NOT NULL"
    )
    for name, (columns, condition) in _PAGES.items():
        statements += [
            f"DROP INDEX ix_runs_{name}",
            f"CREATE INDEX ix_runs_{name} ON runs ({columns}){with_id} WHERE {condition}parent IS NULL",
        ]
    for statement in statements:
        connection.execute(sa.text(statement))
