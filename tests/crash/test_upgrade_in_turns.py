"""Servers of the release before, of this one and of the next on one database, one after the other: nothing is lost or
done twice.

The release before is the commit before the newest migration, taken from git and run with this environment's libraries.
The next one is this one with a migration more, which only adds to the schema.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import messages
from tests.support.live import Job, Server
from tests.support.postgres import PostgresServer
from tests.support.programs import PYTHON_PATH, ROOT, eventually
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


@pytest.fixture(scope="module")
def python_path_before(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the release before is imported from."""
    [newest] = (revision.MIGRATIONS / "versions").glob(f"{schema.HEAD}_*.py")
    git = ("git", "-C", str(ROOT))
    added = subprocess.run(
        [*git, "log", "--diff-filter=A", "-1", "--format=%H", "--", str(newest)],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    assert added, "the tests of an upgrade need the history of this repository, not a copy of its files"
    tree = tmp_path_factory.mktemp("before")
    archive = subprocess.run([*git, "archive", f"{added}^", "app", "sdk"], check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
    assert not list(tree.rglob(newest.name))
    return f"{tree}/app:{tree}/sdk"


@pytest.fixture(params=["sqlite", "postgresql"])
def server(
    request: pytest.FixtureRequest, tmp_path: Path, redis_url: str, postgres: PostgresServer, python_path_before: str
) -> MakeServer:
    """Makes a server, of the release before or of this one, on the same database."""
    url = f"sqlite:///{tmp_path}/shared.db" if request.param == "sqlite" else postgres.database()

    def make(name: str, is_before: bool) -> Server:
        path = python_path_before if is_before else PYTHON_PATH
        options = ("--database", url, "--redis", redis_url)
        return Server(tmp_path / name, PLAYBOOK, *options, environment={"PYTHONPATH": path})

    return make


def act(server: Server, job: Job) -> dict[str, object]:
    """Have the job's learning rate lowered; returns the delivery."""
    count = len(job.effects)
    delivery = messages.delivery("TrainingLossSpike", job.name)
    eventually(lambda: server.ask("/webhook", delivery).status == 200, 60, "the delivery is taken", every=0.2)
    eventually(lambda: len(job.effects) > count, 60, "the job was told", every=0.1)
    return delivery


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
            eventually(lambda: now.ask("/webhook", messages.resolved(fired)).status == 200, 60, "resolved", every=0.2)
            eventually(lambda: job.done == ["job.scale_lr 0.5", "job.scale_lr 2"], 60, "given back", every=0.1)
            eventually(lambda: [run["undone_at"] for run in now.runs()] != [None], 60, "on record", every=0.1)
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
    postgres: PostgresServer, tmp_path: Path, redis_url: str, python_path_before: str
) -> None:
    """Two of them, as a rolling upgrade starts them, on a database that the release before works on: one takes over,
    brings the schema up to date, and both are there; nobody else touched the schema meanwhile."""
    database = postgres.database()

    def make(name: str, path: str) -> Server:
        options = ("--database", database, "--redis", redis_url)
        return Server(tmp_path / name, PLAYBOOK, *options, environment={"PYTHONPATH": path})

    with Job("llm-1", redis_url) as job, make("before", python_path_before) as before:
        act(before, job)
        with make("first", PYTHON_PATH) as first, make("second", PYTHON_PATH) as second:
            eventually(lambda: len(before.runs()) == 1, 60, "the one before works on", every=0.1)
            before.stop()
            working = eventually(
                lambda: next((each for each in (first, second) if works(each)), None), 60, "one takes over", every=0.1
            )
            act(working, job)
            eventually(lambda: len(working.runs()) == 2, 60, "both are there", every=0.1)


@pytest.fixture(scope="module")
def python_path_after(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where a release is imported from that has one migration more than this one."""
    tree = tmp_path_factory.mktemp("after")
    shutil.copytree(ROOT / "app", tree / "app", ignore=shutil.ignore_patterns("__pycache__"))
    store = tree / "app/trainmedic_server/adapters/sql_store"
    (store / "migrations/versions/9999_moods.py").write_text(MIGRATION.format(head=schema.HEAD))
    code = (store / "schema.py").read_text()
    changed = code.replace(f'HEAD = "{schema.HEAD}"', 'HEAD = "9999"')
    assert changed != code
    (store / "schema.py").write_text(changed)
    return f"{tree}/app:{ROOT}/sdk"


@pytest.mark.long
def test_this_release_works_on_after_the_next_has_added_to_the_schema(
    postgres: PostgresServer, tmp_path: Path, redis_url: str, python_path_after: str
) -> None:
    """Both are there, as while servers roll. The next one takes over, adds to the schema and is killed; this one, which
    stood by, works on what it left, and the next takes over from it again."""
    database = postgres.database()

    def make(name: str, path: str) -> Server:
        options = ("--database", database, "--redis", redis_url)
        return Server(tmp_path / name, PLAYBOOK, *options, environment={"PYTHONPATH": path})

    with Job("llm-1", redis_url) as job, make("next", python_path_after) as following:
        act(following, job)
        with make("this", PYTHON_PATH) as this:
            assert not works(this)
            following.kill()
            eventually(lambda: works(this), 60, "this one takes over", every=0.1)
            act(this, job)
            with make("again", python_path_after) as again:
                this.stop()
                eventually(lambda: works(again), 60, "the next one takes over", every=0.1)
                act(again, job)
                eventually(lambda: len(again.runs()) == 3, 60, "all are there", every=0.1)
