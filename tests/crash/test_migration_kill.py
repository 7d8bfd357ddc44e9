"""A server is killed in the middle of a migration: the next start finds the schema as it was, and begins again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from structlog.testing import capture_logs

from tests.support.opened_stores import leave_the_process_alone, open_store
from tests.support.postgres import PostgresServer
from tests.support.programs import PYTHON_PATH, eventually
from tests.support.releases import NEXT_REVISION, add_migration, next_release
from tests.support.run_store_tables import connected, rows
from trainmedic_server.adapters.sql_store import revision, schema
from trainmedic_server.adapters.sql_store.election import Election
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.domain.modes import Mode
from trainmedic_server.http.base_path import BasePath
from trainmedic_server.http.standby import Standby
from trainmedic_server.telemetry import Metrics

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


def fill(url: str) -> None:
    """The schema of this release, with runs that have ended well."""
    with connected(url) as connection:
        revision.bring_to_head(connection)
        connection.exec_driver_sql("INSERT INTO identity (id) VALUES ('of-the-test')")
        connection.execute(sa.text(_RUN), [{"id": str(n), "at": 0, "unfinished": False} for n in range(RUNS)])


@pytest.fixture
def outdated(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A filled store. This process needs a schema that is newer."""
    fill(url)
    migrations = tmp_path / "migrations"
    shutil.copytree(revision.MIGRATIONS, migrations)
    add_migration(migrations)
    monkeypatch.setattr(revision, "MIGRATIONS", migrations)
    monkeypatch.setattr(schema, "HEAD", NEXT_REVISION)
    return url


def killed_again_and_again(url: str, python_path: str, first: int, apart: int) -> int:
    """Have servers open the store and die, until one lives; return how many have died."""
    done = subprocess.run(
        [sys.executable, DOOMED, url, str(first), str(apart)],
        env={**os.environ, "PYTHONPATH": python_path}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


PACES = pytest.mark.parametrize(("first", "apart"), [(5, 9), pytest.param(1, 1, marks=pytest.mark.long)])


@PACES
def test_a_killed_creation_of_a_store_starts_again(url: str, first: int, apart: int) -> None:
    """Repeatedly killed after any of its statements: the one that survives creates the whole schema."""
    assert killed_again_and_again(url, PYTHON_PATH, first, apart) >= 80 // apart
    with connected(url) as connection:
        assert revision.current(connection) == schema.HEAD
        assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []


@PACES
def test_a_killed_migration_starts_again(url: str, tmp_path: Path, first: int, apart: int) -> None:
    """Repeatedly killed after any of its statements, it leaves nothing; the one that survives takes each run
    once."""
    fill(url)
    following = next_release(tmp_path)
    assert killed_again_and_again(url, following.python_path, first, apart) >= 10 // apart
    with connected(url) as connection:
        assert revision.current(connection) == NEXT_REVISION
        assert len(rows(connection)["moods"]) == RUNS


async def test_the_progress_of_a_migration_is_logged(outdated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has the number of runs, the progress and the end; a start without a migration logs none of it."""
    upgrade, going_on = revision._upgrade, "run store schema is still being migrated"

    def upgrade_slowly(connection: sa.Connection) -> None:
        upgrade(connection)
        eventually(lambda: any(entry["event"] == going_on for entry in logs), 60, "it is told", every=0.005)

    monkeypatch.setattr(revision, "_LOG_EVERY", 0.005)
    monkeypatch.setattr(revision, "_upgrade", upgrade_slowly)
    with capture_logs() as logs:
        await open_store(outdated).close()
    first, *others = [entry for entry in logs if "run store schema" in entry["event"]]
    assert (first["event"], first["runs"]) == ("run store schema is being migrated", RUNS)
    assert others[0]["event"] == going_on
    assert others[-1]["event"] == "run store schema migrated"
    with capture_logs() as logs:
        await open_store(outdated).close()
    assert not [entry for entry in logs if "run store schema" in entry["event"]]


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
async def test_readiness_reports_a_schema_upgrade(outdated: str) -> None:
    """A standby on PostgreSQL reports it; with an up-to-date schema it only reports the takeover."""
    for left in (f", and brings the schema of {RUNS} runs up to date", ""):
        election = Election(outdated)
        session = await election.win()
        assert Standby(election, Mode.OBSERVE, BasePath(), SystemClock(), Metrics())._ready().store.detail == (
            f"on standby: it is about to take over{left}"
        )
        await SqlStore.of_session(session, on_lost=leave_the_process_alone).close()
