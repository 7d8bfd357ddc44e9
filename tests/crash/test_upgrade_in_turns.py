"""Servers of the release before, of this one and of the next on one database, one after the other: nothing is lost or
done twice.

The release before is the commit before the newest migration. The oldest that works on this schema is the commit that
last changed the migration that it is named by. Both are taken from git and run with the libraries that they pinned. The
next one is this one with another migration, which only adds to the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import messages
from tests.support.live import Job, Server
from tests.support.postgres import PostgresServer
from tests.support.programs import eventually
from tests.support.releases import Release, commit_of, installed, next_release
from tests.support.run_store_tables import connected, definitions, rows
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
MakeServer = Callable[..., Server]


def migration(pattern: str) -> str:
    """The pattern of git for a migration, which need not be there any more."""
    return f":(glob)app/trainmedic_server/adapters/sql_store/migrations/versions/{pattern}_*.py"


@pytest.fixture(scope="module")
def release_before() -> Release:
    """The commit before the newest migration."""
    added = commit_of("--diff-filter=A", "--", migration(schema.HEAD))
    return installed(commit_of(f"{added}^"))


@pytest.fixture(scope="module")
def oldest_release() -> Release:
    """The oldest that works on this schema: the commit that last changed the migration to `schema.READABLE_FROM`."""
    return installed(commit_of("--diff-filter=AM", "--", migration(schema.READABLE_FROM)))


@pytest.fixture(scope="module")
def named_release() -> Release:
    """The one that the refusal of an older schema names."""
    return installed(commit_of(revision.EARLIER_RELEASE.split()[-1]))


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path, postgres: PostgresServer) -> str:
    return f"sqlite:///{tmp_path}/shared.db" if request.param == "sqlite" else postgres.database()


@pytest.fixture
def new_url(url: str, tmp_path: Path, postgres: PostgresServer) -> str:
    """An empty database of the same kind."""
    return f"sqlite:///{tmp_path}/new.db" if url.startswith("sqlite") else postgres.database()


@pytest.fixture
def server(tmp_path: Path, redis_url: str, url: str) -> MakeServer:
    """Makes a server of a release, or of this one, on the same database."""

    def make(name: str, release: Release | None = None) -> Server:
        return Server(tmp_path / name, PLAYBOOK, "--database", url, "--redis", redis_url, release=release)

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
def test_an_older_schema_is_upgraded_by_the_release_that_the_error_names(
    server: MakeServer, url: str, new_url: str, redis_url: str, oldest_release: Release, named_release: Release
) -> None:
    """An older release acts, and has a pending undo. This one refuses the store and changes nothing. The
    release that it names takes over, and acts too. This one takes over from that, with the schema of a new store, and
    gives both back."""
    with Job("llm-1", redis_url) as job:
        with server("older", oldest_release) as older:
            first = act(older, job)
            eventually(lambda: [run["status"] for run in older.runs()] == ["succeeded"], 60, "the run ended", every=0.1)
            older.stop()
        with connected(url) as connection:
            left = definitions(connection), rows(connection)
        refused = server("refused")
        refused.start(wait=False)
        assert refused.program is not None
        assert refused.program.process.wait(60) != 0
        said = refused.program.tail()
        assert f"is at revision '{schema.READABLE_FROM}'; this release needs '{revision.FIRST}'" in said
        assert revision.EARLIER_RELEASE in said
        with connected(url) as connection:
            assert (definitions(connection), rows(connection)) == left
        with server("named", named_release) as named:
            give_back(named, job, first)
            second = act(named, job)
            eventually(lambda: [run["status"] for run in named.runs()] == ["succeeded"] * 2, 60, "the run ended", 0.1)
            named.stop()
        with server("now") as now:
            give_back(now, job, second)
            assert len(now.runs()) == 2
            now.stop()
    assert job.done == ["job.scale_lr 0.5", "job.scale_lr 2"] * 2
    with connected(url) as adopted, connected(new_url) as new:
        revision.bring_to_head(new)
        assert definitions(adopted) == definitions(new)


@pytest.mark.long
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_the_next_release_is_on_standby_until_the_one_before_stops(
    server: MakeServer, redis_url: str, release_before: Release
) -> None:
    """Two of them, as a rolling upgrade starts them, on a database that the release before works on: one takes over,
    brings the schema up to date, and both are there; nobody else touched the schema meanwhile."""
    with Job("llm-1", redis_url) as job, server("before", release_before) as before:
        act(before, job)
        with server("first") as first, server("second") as second:
            eventually(lambda: len(before.runs()) == 1, 60, "the one before works on", every=0.1)
            before.stop()
            working = eventually(
                lambda: next((each for each in (first, second) if works(each)), None), 60, "one takes over", every=0.1
            )
            act(working, job)
            eventually(lambda: len(working.runs()) == 2, 60, "both are there", every=0.1)


@pytest.fixture(scope="module")
def following_release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """One that has one migration more than this one."""
    return next_release(tmp_path_factory.mktemp("after"))


@pytest.mark.long
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_this_release_still_works_after_the_next_has_extended_the_schema(
    server: MakeServer, redis_url: str, following_release: Release
) -> None:
    """Both run, as in a rolling upgrade. The next takes over, extends the schema and is killed; this one, which
    stood by, works on what it left, and the next takes over from it again."""
    with Job("llm-1", redis_url) as job, server("next", following_release) as following:
        act(following, job)
        with server("this") as this:
            assert not works(this)
            following.kill()
            eventually(lambda: works(this), 60, "this one takes over", every=0.1)
            act(this, job)
            with server("again", following_release) as again:
                this.stop()
                eventually(lambda: works(again), 60, "the next one takes over", every=0.1)
                act(again, job)
                eventually(lambda: len(again.runs()) == 3, 60, "all are there", every=0.1)


@pytest.mark.long
def test_the_oldest_release_with_this_schema_and_this_one_work_in_turns(
    server: MakeServer, redis_url: str, oldest_release: Release
) -> None:
    """Each acts, is killed, and its undo is carried out by the other; each reads the other's writes."""
    owed: dict[str, Any] | None = None
    with Job("llm-1", redis_url) as job:
        for turn, release in enumerate((None, oldest_release, None, oldest_release)):
            with server(f"{turn}", release) as one:
                if owed is not None:
                    give_back(one, job, owed)
                owed = act(one, job)
                eventually(lambda: one.runs()[0]["status"] == "succeeded", 60, "the run ended", every=0.1)
                assert len(one.runs()) == turn + 1
                assert all(each["steps"] for each in map(one.run, (each["run_id"] for each in one.runs())))
                one.kill()
    assert job.done == ["job.scale_lr 0.5", "job.scale_lr 2"] * 3 + ["job.scale_lr 0.5"]
