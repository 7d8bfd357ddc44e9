"""Servers of the release before, of this one and of the next on one database, one after the other: nothing is lost or
done twice.

The release before is the commit before the newest migration; the oldest that works on this schema is the commit that it
came with. Both are taken from git and run with the libraries that they pinned. The next one is this one with another
migration, which only adds to the schema.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import messages
from tests.support.live import Job, Server
from tests.support.postgres import PostgresServer
from tests.support.programs import ROOT, eventually
from tests.support.releases import Release, commit_of, installed
from tests.support.server_group import works
from trainmedic_server.adapters.sql_store import revision, schema

PLAYBOOK = """
playbook: lower
on: {alert: TrainingLossSpike}
target: job
steps:
  - action: job.scale_lr
    with: {factor: 0.5}
    undo: on_resolve
"""
MakeServer = Callable[[str, bool], Server]
MIGRATION = """
import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "9999", "{head}", None, None


def upgrade():
    op.add_column("runs", sa.Column("mood", sa.Text))
    op.create_table("moods", sa.Column("name", sa.Text, primary_key=True))
"""


def migration(number: str) -> str:
    [path] = (revision.MIGRATIONS / "versions").glob(f"{number}_*.py")
    return str(path)


@pytest.fixture(scope="module")
def release_before() -> Release:
    """The commit before the newest migration."""
    added = commit_of("--diff-filter=A", "--", migration(schema.HEAD))
    return installed(commit_of(f"{added}^"))


@pytest.fixture(scope="module")
def oldest_release() -> Release:
    """The oldest that works on this schema: the commit that last changed the migration to `schema.READABLE_FROM`."""
    return installed(commit_of("--", migration(schema.READABLE_FROM)))


@pytest.fixture(params=["sqlite", "postgresql"])
def server(
    request: pytest.FixtureRequest, tmp_path: Path, redis_url: str, postgres: PostgresServer, release_before: Release
) -> MakeServer:
    """Makes a server, of the release before or of this one, on the same database."""
    url = f"sqlite:///{tmp_path}/shared.db" if request.param == "sqlite" else postgres.database()

    def make(name: str, is_before: bool) -> Server:
        options = ("--database", url, "--redis", redis_url)
        return Server(tmp_path / name, PLAYBOOK, *options, release=release_before if is_before else None)

    return make


def act(server: Server, job: Job) -> dict[str, Any]:
    """Have the job's learning rate lowered; returns the delivery."""
    count = len(job.effects)
    delivery = messages.delivery("TrainingLossSpike", job.name)
    eventually(lambda: server.ask("/webhook", delivery).status == 200, 60, "the delivery is taken", every=0.2)
    eventually(lambda: len(job.effects) > count, 60, "the job was told", every=0.1)
    return delivery


def give_back(server: Server, job: Job, delivery: Mapping[str, Any]) -> None:
    """Have what the newest run did undone."""
    resolved = messages.resolved(delivery)
    eventually(lambda: server.ask("/webhook", resolved).status == 200, 60, "resolved", every=0.2)
    eventually(lambda: job.done[-1] == "job.scale_lr 2", 60, "given back", every=0.1)
    eventually(lambda: server.runs()[0]["undone_at"] is not None, 60, "on record", every=0.1)


@pytest.mark.long
def test_each_release_takes_up_what_the_other_left(server: MakeServer, redis_url: str) -> None:
    """The release before acts; this one takes over, brings the schema up to date and gives back; the release before,
    started again, says that the schema is newer and changes nothing; this one goes on."""
    with Job("llm-1", redis_url) as job:
        with server("before", True) as before:
            fired = act(before, job)
            eventually(lambda: [run["status"] for run in before.runs()] == ["succeeded"], 60, "the run ended", 0.1)
            before.stop()
        with server("now", False) as now:
            give_back(now, job, fired)
            assert len(now.runs()) == 1
            now.stop()
        again = server("again", True)
        again.start(wait=False)
        assert again.program is not None
        assert again.program.process.wait(60) != 0
        assert "does not know" in again.program.tail()
        with server("later", False) as later:
            act(later, job)
            eventually(lambda: len(later.runs()) == 2, 60, "both are there", every=0.1)
    assert job.done == ["job.scale_lr 0.5", "job.scale_lr 2", "job.scale_lr 0.5"]


@pytest.mark.long
def test_the_next_release_stands_by_until_the_one_before_has_gone(
    postgres: PostgresServer, tmp_path: Path, redis_url: str, release_before: Release
) -> None:
    """Two of them, as a rolling upgrade starts them, on a database that the release before works on: one takes over,
    brings the schema up to date, and both are there; nobody else touched the schema meanwhile."""
    database = postgres.database()

    def make(name: str, release: Release | None = None) -> Server:
        return Server(tmp_path / name, PLAYBOOK, "--database", database, "--redis", redis_url, release=release)

    with Job("llm-1", redis_url) as job, make("before", release_before) as before:
        act(before, job)
        with make("first") as first, make("second") as second:
            eventually(lambda: len(before.runs()) == 1, 60, "the one before works on", every=0.1)
            before.stop()
            working = eventually(
                lambda: next((each for each in (first, second) if works(each)), None), 60, "one takes over", every=0.1
            )
            act(working, job)
            eventually(lambda: len(working.runs()) == 2, 60, "both are there", every=0.1)


@pytest.fixture(scope="module")
def next_release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """One that has one migration more than this one."""
    tree = tmp_path_factory.mktemp("after")
    shutil.copytree(ROOT / "app", tree / "app", ignore=shutil.ignore_patterns("__pycache__"))
    store = tree / "app/trainmedic_server/adapters/sql_store"
    (store / "migrations/versions/9999_moods.py").write_text(MIGRATION.format(head=schema.HEAD))
    code = (store / "schema.py").read_text()
    changed = code.replace(f'HEAD = "{schema.HEAD}"', 'HEAD = "9999"')
    assert changed != code
    (store / "schema.py").write_text(changed)
    return Release(Path(sys.executable), f"{tree}/app:{ROOT}/sdk")


@pytest.mark.long
def test_this_release_works_on_after_the_next_has_added_to_the_schema(
    postgres: PostgresServer, tmp_path: Path, redis_url: str, next_release: Release
) -> None:
    """Both are there, as while servers roll. The next one takes over, adds to the schema and is killed; this one, which
    stood by, works on what it left, and the next takes over from it again."""
    database = postgres.database()

    def make(name: str, release: Release | None = None) -> Server:
        return Server(tmp_path / name, PLAYBOOK, "--database", database, "--redis", redis_url, release=release)

    with Job("llm-1", redis_url) as job, make("next", next_release) as following:
        act(following, job)
        with make("this") as this:
            assert not works(this)
            following.kill()
            eventually(lambda: works(this), 60, "this one takes over", every=0.1)
            act(this, job)
            with make("again", next_release) as again:
                this.stop()
                eventually(lambda: works(again), 60, "the next one takes over", every=0.1)
                act(again, job)
                eventually(lambda: len(again.runs()) == 3, 60, "all are there", every=0.1)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_the_oldest_release_that_knows_this_schema_and_this_one_work_in_turns(
    kind: str, postgres: PostgresServer, tmp_path: Path, redis_url: str, oldest_release: Release
) -> None:
    """Each acts, is killed, and what it owes is given back by the other; each reads what the other wrote."""
    url = f"sqlite:///{tmp_path}/shared.db" if kind == "sqlite" else postgres.database()
    owed: dict[str, Any] | None = None
    with Job("llm-1", redis_url) as job:
        for turn, release in enumerate((None, oldest_release, None, oldest_release)):
            options = ("--database", url, "--redis", redis_url)
            with Server(tmp_path / f"{turn}", PLAYBOOK, *options, release=release) as server:
                if owed is not None:
                    give_back(server, job, owed)
                owed = act(server, job)
                eventually(lambda: server.runs()[0]["status"] == "succeeded", 60, "the run ended", every=0.1)
                assert len(server.runs()) == turn + 1
                assert all(each["steps"] for each in map(server.run, (each["run_id"] for each in server.runs())))
                server.kill()
    assert job.done == ["job.scale_lr 0.5", "job.scale_lr 2"] * 3 + ["job.scale_lr 0.5"]
