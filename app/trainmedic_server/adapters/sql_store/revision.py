"""Bringing the database's schema to the revision that this code needs.

Who calls it: ``store``, once at start. Alembic is imported only where there is something to do:
it costs a good part of the time in which a server is to be ready.
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from trainmedic_server import errors, telemetry
from trainmedic_server.adapters.sql_store import schema

log = telemetry.logger(__name__)

MIGRATIONS = Path(__file__).with_name("migrations")
_VERSION = sa.text("SELECT version_num FROM alembic_version")


def current(connection: sa.Connection) -> str | None:
    """Return the revision that the database is at; None where it is empty."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.execute(_VERSION).scalar()
    return revision


def bring_to_head(connection: sa.Connection) -> None:
    """Run the migrations that the database lacks, all in the transaction that `connection` is in.

    Raises ConfigurationError where the database was written by a newer release.
    """
    at = current(connection)
    if at != schema.HEAD:
        _upgrade(connection, at)
        log.info("run store schema migrated", before=at, after=schema.HEAD)


def _upgrade(connection: sa.Connection, at: str | None) -> None:
    import alembic.command
    import alembic.config
    from alembic.script import ScriptDirectory

    config = alembic.config.Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    revisions = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if at is not None and at not in revisions:
        raise errors.ConfigurationError(
            f"the run store's schema is at revision {at!r}, which this release does not know: "
            "a newer release has written it; run that one, or restore a backup from before"
        )
    config.attributes["connection"] = connection
    alembic.command.upgrade(config, schema.HEAD)
