"""The run store's schema: how it comes about, and what it makes fast."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from msgspec.structs import replace

from tests.contract import run_store_values as values
from tests.contract.run_store_values import at, closed, heard, run
from tests.support.programs import PYTHON_PATH
from tests.support.run_store_tables import rows
from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.domain.known_finding import EpisodeKey
from trainmedic_server import errors
from trainmedic_server.adapters.sql_store import database, mapping, revision, schema
from trainmedic_server.adapters.sql_store.columns import encode_json
from trainmedic_server.adapters.sql_store.history_cursor import microseconds_of
from trainmedic_server.adapters.sql_store.history_page import page_select
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.domain.run import Decision, OperatorOrder, OrderKind, Status
from trainmedic_server.ports.store import HistoryFilter, Transaction

ROOT = Path(__file__).parents[2]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/trainmedic.db"


@pytest.fixture
def migrated(url: str) -> Iterator[sa.Connection]:
    """A connection to a database that the migrations made."""
    engine = database.writer_engine(sa.make_url(url), timedelta(seconds=1))
    with engine.connect() as connection:
        with connection.begin():
            revision.bring_to_head(connection)
        yield connection


def definitions(connection: sa.Connection) -> dict[str, list[str]]:
    """The SQL of every table and index, whitespace, quotes and the order of columns and constraints aside."""
    found = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return {
        name: sorted(" ".join(sql.replace('"', "").split()).removesuffix(")").strip().split(", "))
        for name, sql in found
        if not name.startswith(("alembic", "sqlite_"))
    }


def test_the_migrations_create_exactly_the_schema(migrated: sa.Connection) -> None:
    """Alembic finds no difference, and a comparison of the SQL of all tables and indexes finds none."""
    assert compare_metadata(MigrationContext.configure(migrated, opts={"compare_type": True}), schema.metadata) == []
    with sa.create_engine("sqlite://").connect() as fresh:
        schema.metadata.create_all(fresh)
        assert definitions(migrated) == definitions(fresh)


def test_head_is_the_last_migration(migrated: sa.Connection) -> None:
    """The revision that the code requires is the last of the migrations, which have one head."""
    config = Config()
    config.set_main_option("script_location", str(revision.MIGRATIONS))
    assert ScriptDirectory.from_config(config).get_heads() == [schema.HEAD]
    assert revision.current(migrated) == schema.HEAD


def test_a_database_of_a_newer_release_is_rejected(url: str, migrated: sa.Connection) -> None:
    """The server reports it and does not change the database."""
    with migrated.begin():
        migrated.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(errors.ConfigurationError, match=r"'9999'.*a newer release"):
        SqlStore.open(url)
    assert revision.current(migrated) == "9999"


def test_a_database_of_an_older_release_is_rejected(url: str, migrated: sa.Connection) -> None:
    """The server reports the found and required revisions and the release to go through; it changes
    nothing."""
    with migrated.begin():
        migrated.exec_driver_sql("UPDATE alembic_version SET version_num = '0017'")
        before = rows(migrated)
    with pytest.raises(errors.ConfigurationError, match=f"'0017'.*'{revision.FIRST}'.*{revision.EARLIER_RELEASE}"):
        SqlStore.open(url)
    with migrated.begin():
        assert rows(migrated) == before


async def test_a_store_of_the_first_schema_is_upgraded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs stay unchanged and are not group members, and new groups can be added."""
    kept = closed()
    engine = database.writer_engine(sa.make_url(url), timedelta(seconds=1))
    with engine.connect() as connection, connection.begin():
        monkeypatch.setattr(schema, "HEAD", revision.FIRST)
        revision.bring_to_head(connection)
        monkeypatch.undo()
        columns = [column["name"] for column in sa.inspect(connection).get_columns("runs")]
        old = dict(zip(columns, mapping.run_row(kept), strict=False))
        before = {name: _plain(value) for name, value in old.items()}
        connection.execute(sa.text(f"INSERT INTO runs ({', '.join(before)}) VALUES (:{', :'.join(before)})"), before)
        assert "parent" not in columns
        revision.bring_to_head(connection)
        assert revision.current(connection) == schema.HEAD
    engine.dispose()
    store = SqlStore.open(url)
    target = Target.of_key("nodes:rack=r1")
    parent = replace(kept, id="parent", target=target)
    member = replace(kept, id="member", target=Target.of_key("node:n9"), parent="parent", batch=0)
    await store.transact(lambda tx: tx.add_runs([parent, member]))
    await store.transact(lambda tx: tx.add_group_list("parent", ["node:n9", "node:n10"]))
    page, _ = await store.page(HistoryFilter(), 9, None)
    assert {(each.id, each.parent) for each in page} == {("parent", None), (kept.id, None)}
    counts = next(each.group for each in page if each.id == "parent")
    assert counts is not None
    assert (counts.total, counts.not_begun) == (2, 1)
    await store.close()


def _plain(value: Any) -> Any:
    """The value as SQLite has it."""
    if isinstance(value, datetime):
        return microseconds_of(value)
    return encode_json(value) if isinstance(value, (dict, list)) else value


@pytest.fixture
async def newer(url: str) -> sa.Engine:
    """A store that a later release has added to, and that says from which revision on code still works on it."""
    await SqlStore.open(url).close()
    engine = database.writer_engine(sa.make_url(url), timedelta(seconds=1))
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE runs ADD COLUMN mood TEXT")
        connection.exec_driver_sql("CREATE TABLE moods (name TEXT PRIMARY KEY)")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    return engine


async def test_a_newer_schema_that_only_adds_is_usable(url: str, newer: sa.Engine) -> None:
    """Servers of this release continue during an upgrade; the schema is not changed."""
    store = SqlStore.open(url)
    one = closed()
    await store.transact(lambda tx: tx.save_alerts([heard()]))
    await store.transact(lambda tx: tx.add_runs([one]))
    assert [each.id for each in (await store.page(HistoryFilter(), 9, None))[0]] == [one.id]
    await store.close()
    with newer.connect() as connection:
        assert revision.current(connection) == "9999"


async def test_a_newer_schema_that_is_incompatible_is_rejected(url: str, newer: sa.Engine) -> None:
    """The error names the releases that still support it."""
    with newer.begin() as connection:
        connection.exec_driver_sql("UPDATE identity SET readable_from = '9998'")
    with pytest.raises(errors.ConfigurationError, match=r"'9999'.*does not work on"):
        SqlStore.open(url)


async def test_an_interrupted_migration_leaves_an_empty_database(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Migrations are one transaction: the next start finds the database unchanged and starts again."""
    with monkeypatch.context() as broken:
        broken.setattr(revision, "_upgrade", _half_an_upgrade)
        with pytest.raises(RuntimeError):
            SqlStore.open(url)
    store = SqlStore.open(url)
    await store.check()
    await store.close()


def _half_an_upgrade(connection: sa.Connection) -> None:
    schema.alerts.create(connection)
    raise RuntimeError("killed here")


def test_a_start_with_nothing_to_migrate_does_not_import_alembic(url: str, migrated: sa.Connection) -> None:
    """The import would cost a good part of the second in which the server should be ready."""
    code = (
        "import sys, asyncio\n"
        "from trainmedic_server.adapters.sql_store.store import SqlStore\n"
        f"asyncio.run(SqlStore.open({url!r}).close())\n"
        "assert 'alembic' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


async def test_the_directory_is_accessible_only_to_its_owner(tmp_path: Path) -> None:
    """Alerts and parameters are confidential."""
    store = SqlStore.open(f"sqlite:///{tmp_path}/a/state/trainmedic.db")
    await store.close()
    assert (tmp_path / "a" / "state").stat().st_mode & 0o777 == 0o700


async def test_a_second_server_on_the_same_file_is_rejected(url: str) -> None:
    """The error names the owner of the file; once it is gone, the file can be opened again."""
    store = SqlStore.open(url)
    with pytest.raises(errors.ConfigurationError, match=f"in use by the server with process id {os.getpid()}"):
        SqlStore.open(url)
    await store.close()
    again = SqlStore.open(url)
    await again.close()


def test_a_state_directory_that_cannot_be_created_is_named_with_its_settings(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(errors.ConfigurationError, match=r"state: File exists; set --state-dir or --database so that"):
        SqlStore.open(f"sqlite:///{tmp_path}/state/trainmedic.db")


@pytest.mark.parametrize(
    "wrong", ["", "nonsense", "sqlite://", "sqlite:///:memory:", "mysql://host/db", "sqlite:////proc/none/x.db"]
)
def test_an_unusable_url_is_rejected(wrong: str) -> None:
    """The error is a ConfigurationError, not one of the library."""
    with pytest.raises(errors.ConfigurationError):
        SqlStore.open(wrong)


def test_a_rejected_url_does_not_show_its_password() -> None:
    """A URL can contain one, and messages end up in logs."""
    with pytest.raises(errors.ConfigurationError) as refused:
        SqlStore.open("mysql://user:hunter2@host/db")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "sqlite+aiosqlite:///{}/a.db",
        "sqlite+unheard-of:///{}/a.db",
        "sqlite:///{}/a.db?timeout=soon",
        "sqlite://host/{}/a.db",
        "sqlite:///{}/a\0b.db",
    ],
)
def test_a_url_that_no_engine_accepts_is_a_configuration_error(tmp_path: Path, url: str) -> None:
    """It is not an unexpected one."""
    with pytest.raises(errors.ConfigurationError, match=r"^the (run store|database)"):
        SqlStore.open(url.format(tmp_path))


# --- plans ------------------------------------------------------------------------------------------


def plan(connection: sa.Connection, statement: str, parameters: Any) -> list[str]:
    return [row[3] for row in connection.exec_driver_sql("EXPLAIN QUERY PLAN " + statement, parameters)]


FILTERS = {
    "nothing": {},
    "alertname": {"alertname": "a"},
    "playbook": {"playbook": "a"},
    "status": {"status": "failed"},
    "decision": {"decision": "started"},
    "gpu": {"gpu": "a"},
    "since": {"since": at(0)},
    "until": {"until": at(0)},
    "playbook since": {"playbook": "a", "since": at(0), "until": at(9)},
    "open": {"is_open": True},
    "owes undo": {"owes_undo": True},
}


def page_plan(migrated: sa.Connection, wanted: HistoryFilter, before: Any) -> list[str]:
    compiled = page_select(wanted, 100, before).compile(dialect=migrated.dialect)
    parameters = compiled.construct_params()
    types = {key: bound.type.bind_processor(migrated.dialect) for key, bound in compiled.binds.items()}
    given = tuple((types[key] or (lambda value: value))(parameters[key]) for key in compiled.positiontup or ())
    return plan(migrated, str(compiled), given)


@pytest.mark.parametrize("before", [None, (at(5), "id")], ids=["first", "next"])
@pytest.mark.parametrize("name", FILTERS)
def test_a_page_of_the_history_is_read_from_an_index_in_order(migrated: sa.Connection, name: str, before: Any) -> None:
    """With any one filter only runs of the same moment are sorted, and only the page's rows are read."""
    step, *ties = page_plan(migrated, HistoryFilter(**FILTERS[name]), before)
    assert "USING INDEX ix_runs_" in step
    assert ties in ([], ["USE TEMP B-TREE FOR RIGHT PART OF ORDER BY"]), "the runs of one moment are put in order"
    if name in ("owes undo", "open"):
        assert "ix_runs_unfinished" in step
    unnamed = dict.fromkeys(("nothing", "since", "until", "owes undo", "open"), "")
    column = {**unnamed, "alertname": "alert_name", "playbook since": "playbook"}.get(name, name)
    assert step.startswith("SEARCH" if column or before or name in ("since", "until") else "SCAN")
    assert f"({column}=?" in step or not column


@pytest.mark.parametrize("before", [None, (at(5), "id")], ids=["first", "next"])
def test_a_page_of_a_job_is_read_from_two_indexes(migrated: sa.Connection, before: Any) -> None:
    """One has the runs on it, the other the few runs with further targets."""
    steps = page_plan(migrated, HistoryFilter(job=("a",)), before)
    assert not [step for step in steps if step.startswith("SCAN runs") and "ix_runs_also" not in step], steps
    assert any("ix_runs_job (job=?" in step for step in steps)
    assert any("ix_runs_also" in step for step in steps)


@pytest.mark.parametrize(
    "several",
    [
        {"node": "a"},
        {"status": ("failed", "waiting")},
        {"gpu": "a/0", "status": ("failed", "waiting")},
        {"by": "ann"},
        {"target": ("gpu:a/0", "job:b")},
        {"node": ("a", "b"), "since": at(0)},
    ],
)
@pytest.mark.parametrize("before", [None, (at(5), "id")], ids=["first", "next"])
def test_a_page_of_several_values_reads_no_table(migrated: sa.Connection, several: Any, before: Any) -> None:
    """Each value's part comes from an index in its order; only their few rows are sorted."""
    steps = page_plan(migrated, HistoryFilter(**several), before)
    tables = ("runs", "touched_nodes", "orders")
    assert not [step for step in steps if step.startswith("SCAN") and step.split()[1] in tables]


async def test_no_unit_of_work_reads_a_whole_table(url: str) -> None:
    """Every statement uses an index, so that a storm's cost does not depend on the stored data."""
    store = SqlStore.open(url)
    traced: list[str] = []
    await store.transact(lambda tx: tx._connection.connection.set_trace_callback(traced.append))  # type: ignore[attr-defined]
    await store.transact(_everything_that_reads)
    await store.prune(at(1000))
    await store.close()
    reads = {statement for statement in traced if statement.lstrip().startswith(("SELECT", "DELETE"))}
    assert len(reads) > 10
    engine = database.writer_engine(sa.make_url(url), timedelta(seconds=1))
    small = ("nodes", "controls", "time_gaps", "kept_jobs", "job_places")
    with engine.connect() as connection:
        for statement in reads:
            if statement.startswith("SELECT count(*) AS count_1"):  # once an hour: how many alerts there are
                continue
            for step in plan(connection, statement, ()):
                whole = step.startswith("SCAN") and not any(
                    name in step for name in ("unfinished", "findings_open", "uq_runs_open")
                )
                assert not whole or step.split()[1] in small, (statement, step)


def _everything_that_reads(tx: Transaction) -> None:
    one, identity = closed(), heard().identity
    tx.save_alerts([heard()])
    tx.add_runs([one, run(target=values.gpu(int(one.id[:8], 16)), playbook=one.id)])
    tx.link([(one.id, identity)])
    tx.add_order(OperatorOrder(one.id, one.id, OrderKind.CANCEL, "kim", at(1)))
    tx.alerts([identity])
    tx.firing_with(["f1"])
    tx.firing_not_heard_since(at(9))
    tx.linked_runs([identity])
    tx.nodes_acted_on(at(-5))
    tx.touched_nodes(one.id)
    tx.guard_facts([("cool", "gpu:node-1/0")], {"cool": at(0)})
    tx.runs([one.id])
    tx.alerts_of([one.id])
    tx.orders_of([one.id])
    tx.unfinished()
    tx.run_of_command("c1")
    tx.known_nodes()
    tx.controls()
    tx.playbook_text("cool", "v1")
    tx.findings.with_ids(["f"])
    tx.findings.open_with(["k"])
    tx.findings.all_open()
    tx.findings.to_tell(at(1), 9)
    tx.findings.episodes([EpisodeKey("node-1", "e")])
    tx.findings.ids_with_open_episodes(["f"])
    tx.findings.excerpt_counts(["f"])


@pytest.mark.parametrize(
    ("changes", "readable_from"),
    [
        ({}, schema.READABLE_FROM),
        ({"target": Target(TargetKind.GROUP, group="nodes:rack=r1")}, schema.HEAD),
        ({"status": Status.NOT_STARTED, "decision": Decision.OUTSIDE_WINDOW, "ended_at": at(1)}, schema.HEAD),
        ({"status": Status.NOT_STARTED, "decision": Decision.CAPACITY_LIMITED, "ended_at": at(1)}, schema.HEAD),
    ],
)
async def test_a_run_unreadable_by_earlier_releases_makes_them_reject_the_store(
    url: str, changes: dict[str, Any], readable_from: str
) -> None:
    """They would fail on each page that contains it."""
    store, one = SqlStore.open(url), replace(run(), **changes)
    await store.transact(lambda tx: (tx.save_alerts([heard()]), tx.add_runs([one])))
    await store.close()
    with sa.create_engine(url).connect() as connection:
        assert connection.execute(sa.select(schema.identity.c.readable_from)).scalar() == readable_from
