"""Migration of the database to this code's revision. Alembic is slow to import, so only a migration imports it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

from trainmedic_server import errors, telemetry
from trainmedic_server.adapters.sql_store import schema

log = telemetry.logger(__name__)

MIGRATIONS = Path(__file__).with_name("migrations")
FIRST = "0018"  # Oldest revision that this release migrates.
EARLIER_RELEASE = "trainmedic-server 0.1.0 of commit 005226a75fe5"
_VERSION = sa.text("SELECT version_num FROM alembic_version")
_LOG_EVERY = 10.0  # seconds


def current(connection: sa.Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):
        return None  # The database is empty.
    revision: str | None = connection.execute(_VERSION).scalar()
    return revision


def runs_to_migrate(connection: sa.Connection) -> int | None:
    at = current(connection)
    if at in (None, schema.HEAD) or at not in _known_revisions():
        return None  # Nothing needs a migration.
    return int(connection.execute(sa.select(sa.func.count()).select_from(schema.runs)).scalar_one())


def require_not_older(connection: sa.Connection) -> None:
    """Raise ConfigurationError for a schema before `FIRST`."""
    at = current(connection)
    if at is not None and at < FIRST:
        raise errors.ConfigurationError(
            f"the run store's schema is at revision {at!r}; this release needs {FIRST!r} or later. "
            f"First start {EARLIER_RELEASE} on it, which brings it to {FIRST!r} (docs/how-to/upgrade.md)"
        )


def bring_to_head(connection: sa.Connection) -> None:
    """Run the missing migrations in the current transaction.

    A newer release's schema stays if that release permits this one; else raises ConfigurationError.
    """
    at = current(connection)
    if at == schema.HEAD:
        return
    require_not_older(connection)
    if at is not None and at not in _known_revisions():
        _require_readable(connection, at)
        return
    with _progress_logged(at, runs_to_migrate(connection)):
        _upgrade(connection)
        connection.execute(sa.update(schema.identity).values(readable_from=schema.READABLE_FROM))


@contextlib.contextmanager
def _progress_logged(at: str | None, runs: int | None) -> Iterator[None]:
    began, is_over = time.monotonic(), threading.Event()

    def seconds() -> float:
        return round(time.monotonic() - began, 1)

    def log_progress() -> None:
        while not is_over.wait(_LOG_EVERY):
            log.info("run store schema is still being migrated", runs=runs, seconds=seconds())

    if runs is not None:
        log.info("run store schema is being migrated", before=at, after=schema.HEAD, runs=runs)
    logger_thread = threading.Thread(target=log_progress, name="migration-log", daemon=True)
    logger_thread.start()
    try:
        yield
    finally:
        is_over.set()
        logger_thread.join()
    log.info("run store schema migrated", before=at, after=schema.HEAD, seconds=seconds())


def _known_revisions() -> set[str]:
    return {path.name.partition("_")[0] for path in (MIGRATIONS / "versions").glob("[0-9]*.py")}


def _require_readable(connection: sa.Connection, at: str) -> None:
    columns = {column["name"] for column in sa.inspect(connection).get_columns("identity")}
    readable_from = sa.select(schema.identity.c.readable_from)
    oldest = connection.execute(readable_from).scalar() if "readable_from" in columns else None
    if oldest is None or oldest > schema.HEAD:
        raise errors.ConfigurationError(
            f"the run store's schema is at revision {at!r}, which this release does not know and does not work on: "
            "a newer release has written it; run that one, or restore a backup from before"
        )
    log.warning("run store schema is of a newer release that this one supports", at=at, known=schema.HEAD)


def _upgrade(connection: sa.Connection) -> None:
    import alembic.command
    import alembic.config

    config = alembic.config.Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    alembic.command.upgrade(config, schema.HEAD)
