"""Alembic's entry: runs migrations on the connection that ``revision`` hands in, in its transaction.

A new revision is a file in ``versions``, written by hand, and `schema.HEAD` names the last one.
The release before should run on the new schema, so columns are added nullable or with a default, and dropped a release
after their last use. Whether it does, `schema.READABLE_FROM` says.
"""

from __future__ import annotations

from alembic import context

from trainmedic_server.adapters.sql_store import schema

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=schema.metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
