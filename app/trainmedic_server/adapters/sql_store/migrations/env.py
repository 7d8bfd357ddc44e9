"""Alembic's entry: runs migrations on the connection from ``revision``, in its transaction.

A new revision is a handwritten file in ``versions``. The previous release should run on the new schema (see
`schema.READABLE_FROM`): add columns nullable or with a default, and drop them a release after their last use.
"""

from __future__ import annotations

from alembic import context

from trainmedic_server.adapters.sql_store import schema

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=schema.metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
