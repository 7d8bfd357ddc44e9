"""A server is killed in the middle of a migration: the next start finds the schema as it was, and begins again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from structlog.testing import capture_logs

from tests.support.postgres import PostgresServer
from tests.support.programs import PYTHON_PATH
from trainmedic_server.adapters.sql_store import database, postgresql, revision, schema
from trainmedic_server.adapters.sql_store.election import Election
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.domain.modes import Mode
from trainmedic_server.server.base_path import BasePath
from trainmedic_server.server.standby import Standby
from trainmedic_server.telemetry import Metrics

BEFORE = "0015"
RUNS = 30
DOOMED = Path(__file__).with_name("doomed_migration.py")
_RUN = """
INSERT INTO runs (id, playbook, version, target_key, mode, status, decision, alert_fingerprint, alert_starts_at,
alert_name, alert_labels, created_at, ended_at, message, unfinished) VALUES (:id, 'cool', 'v1', 'node:n', 'enforce',
'succeeded', 'started', 'f', :at, 'Hot', '{}', :at, :at, '', :unfinished)
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/trainmedic.db"
    server: PostgresServer = request.getfixturevalue("shared_postgres")
    return server.database()


@contextlib.contextmanager
def connected(url: str) -> Iterator[sa.Connection]:
    with contextlib.ExitStack() as stack:
        if postgresql.names_postgresql(url):
            session = postgresql.LockSession.open(url)
            stack.callback(session.close)
            engine = session.engine
        else:
            engine = database.writer_engine(sa.make_url(url), timedelta(seconds=5))
        with engine.begin() as connection:
            yield connection


def fill(connection: sa.Connection) -> None:
    """The schema as it was before, with runs of today that have ended well."""
    config = Config()
    config.set_main_option("script_location", str(revision.MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, BEFORE)
    connection.exec_driver_sql("INSERT INTO identity (id) VALUES ('of-the-test')")
    now = int(time.time() * 1e6)
    connection.execute(sa.text(_RUN), [{"id": str(n), "at": now, "unfinished": False} for n in range(RUNS)])


@pytest.mark.parametrize(("first", "apart"), [(5, 9), pytest.param(1, 1, marks=pytest.mark.long)])
def test_a_migration_that_is_killed_begins_again(url: str, first: int, apart: int) -> None:
    """After any of its statements, and again and again: nothing of it stays, and the one that lives counts each run
    once."""
    with connected(url) as connection:
        fill(connection)
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    done = subprocess.run(
        [sys.executable, DOOMED, url, str(first), str(apart)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) >= 30 // apart
    with connected(url) as connection:
        assert revision.current(connection) == schema.HEAD
        counted = sa.select(schema.playbook_days.c.count).where(schema.playbook_days.c.fact == "status:succeeded")
        assert connection.execute(counted).scalars().all() == [RUNS]


async def test_what_a_migration_goes_through_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has how many runs there are, that it goes on, and its end; a start with nothing to do has none of it."""
    monkeypatch.setattr(revision, "_TELL_EVERY", 0.005)
    with connected(url) as connection:
        fill(connection)
    with capture_logs() as logs:
        await SqlStore.open(url).close()
    first, *others = [entry for entry in logs if "run store schema" in entry["event"]]
    assert (first["event"], first["runs"]) == ("run store schema is being migrated", RUNS)
    assert others[0]["event"] == "run store schema is still being migrated"
    assert others[-1]["event"] == "run store schema migrated"
    with capture_logs() as logs:
        await SqlStore.open(url).close()
    assert not [entry for entry in logs if "run store schema" in entry["event"]]


async def test_readiness_says_that_the_schema_is_brought_up_to_date(shared_postgres: PostgresServer) -> None:
    """Of a server on PostgreSQL, which answers meanwhile; one that finds the schema up to date is about to work."""
    url = shared_postgres.database()
    with connected(url) as connection:
        fill(connection)
    for left in (f", and brings the schema of {RUNS} runs up to date", ""):
        election = Election(url)
        session = await election.win()
        assert Standby(election, Mode.OBSERVE, BasePath(), SystemClock(), Metrics())._ready().store.detail == (
            f"stands by: it is about to take over{left}"
        )
        await SqlStore.of_session(session).close()
