"""One server works from a run store: a second one, by whatever name or copy it comes, is refused with the reason.

Real servers with their own Redis. After each refusal the first one still carries out what an alert asks for.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.live import Job, Server
from tests.support.messages import delivery
from tests.support.programs import PYTHON_PATH, Program, eventually, free_port

PLAYBOOK = """
playbook: slow-down
on: {alert: Spike}
target: job
steps:
  - {id: slow, action: job.scale_lr, with: {factor: 0.5}, timeout: 20s}
"""
REFUSED = 2


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "first", PLAYBOOK) as server:
        yield server


def redis_url(state: Path) -> str:
    return (state / "redis.url").read_text().strip()


def redis_pid(state: Path) -> int:
    return int((state / "redis" / "redis.pid").read_text())


def second(state: Path, *options: str | Path, launcher: Sequence[str | Path] = ()) -> Program:
    """A server that is started beside the first one."""
    state.parent.mkdir(parents=True, exist_ok=True)
    return Program(
        [
            *(*launcher, sys.executable, "-m", "trainmedic_server", "serve", "--port", str(free_port())),
            *("--mode", "enforce", "--state-dir", state, *options),
        ],
        state.parent / f"{state.name}.log",
        {"PYTHONPATH": PYTHON_PATH},
    )


def refusal(program: Program) -> str:
    """What a server that ends by itself says. It must not have served before."""
    try:
        assert program.process.wait(60) == REFUSED, program.tail()
    finally:
        program.end()
    return program.tail()


def assert_works(server: Server, name: str) -> None:
    """The server takes an alert, and carries its repair out through the Redis that it began with."""
    with Job(name, redis_url(server.state)) as job:
        assert server.ask("/webhook", delivery("Spike", name)).status == 200
        eventually(lambda: job.done == ["job.scale_lr 0.5"], 60, "the repair", every=0.02)


# --- another name of the same file -------------------------------------------------------------------


def by_symlink(database: Path, state: Path) -> None:
    state.mkdir()
    (state / "trainmedic.db").symlink_to(database)


def by_hard_link(database: Path, state: Path) -> None:
    state.mkdir()
    (state / "trainmedic.db").hardlink_to(database)


def by_directory(database: Path, state: Path) -> None:
    state.symlink_to(database.parent)


def by_directory_of_links(database: Path, state: Path) -> None:
    """As ``cp -al`` makes it."""
    shutil.copytree(database.parent, state, copy_function=os.link)


def test_a_second_server_is_rejected_under_any_name_of_the_file(tmp_path: Path, first: Server) -> None:
    """It reports that the file is in use, and the first one continues with its Redis."""
    redis = redis_pid(first.state)
    for alias in (by_symlink, by_hard_link, by_directory, by_directory_of_links):
        other = tmp_path / alias.__name__
        alias(first.state / "trainmedic.db", other)
        assert "in use by" in refusal(second(other)), alias
        assert redis_pid(first.state) == redis
        assert_works(first, alias.__name__)
        if not other.is_symlink():
            shutil.rmtree(other)  # so that the file has one name again


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_second_server_is_rejected_behind_a_mount(tmp_path: Path, first: Server) -> None:
    """It has another mount and network namespace, as in containers; both can see only the file."""
    state = tmp_path / "second"
    state.mkdir()
    (state / "trainmedic.db").touch()
    mounting = f'mount --bind {first.state}/trainmedic.db {state}/trainmedic.db && exec "$@"'
    launcher = ("unshare", "--mount", "--net", "sh", "-c", mounting, "sh")
    assert "in use by another server" in refusal(second(state, launcher=launcher))
    assert_works(first, "llm")


def test_a_file_is_identified_only_by_its_path(tmp_path: Path, first: Server) -> None:
    """SQLite's own URIs would open the file without its lock."""
    for number, form in enumerate(("sqlite:///file:{}", "sqlite:///file:{}?uri=true", "sqlite:///{}?uri=true")):
        url = form.format(first.state / "trainmedic.db")
        assert "names no file" in refusal(second(tmp_path / "second", "--database", url)), form
        assert_works(first, f"llm-{number}")


def test_a_file_with_two_names_is_served_under_neither(tmp_path: Path) -> None:
    """SQLite keeps a journal per name: what is in the one is missing from the other."""
    by_name = tmp_path / "trainmedic.db"
    sqlite3.connect(by_name).close()
    by_hard_link(by_name, tmp_path / "state")
    assert "2 names (hard links)" in refusal(second(tmp_path / "state"))


# --- a copy -------------------------------------------------------------------------------------------


def copied(state: Path, to: Path) -> None:
    shutil.copytree(state, to)


def backed_up(state: Path, to: Path) -> None:
    to.mkdir()
    with closing(sqlite3.connect(state / "trainmedic.db")) as connection:
        connection.execute("VACUUM INTO ?", [str(to / "trainmedic.db")])


def test_a_server_on_a_copy_is_rejected_while_the_first_one_runs(tmp_path: Path, first: Server) -> None:
    """Both would execute its open runs. The first one's Redis stays unchanged, under the same URL."""
    assert_works(first, "before")
    redis, url = redis_pid(first.state), redis_url(first.state)
    for copy in (copied, backed_up):
        copy(first.state, tmp_path / copy.__name__)
        text = refusal(second(tmp_path / copy.__name__))
        assert first.program is not None
        assert f"is a copy: the server with process id {first.program.process.pid}" in text
        assert (redis_pid(first.state), redis_url(first.state)) == (redis, url)
        assert_works(first, f"after-{copy.__name__}")


def test_a_copy_is_served_once_the_first_server_has_ended_and_then_blocks_it(tmp_path: Path, first: Server) -> None:
    """It has its own Redis, port and password: clients with the first one's URL do not reach the copy."""
    copied(first.state, tmp_path / "copy")
    url = redis_url(first.state)
    first.kill()
    with second(tmp_path / "copy") as other:
        eventually(lambda: '"ready"' in other.tail() or other.process.poll() is not None, 60, "the copy is served")
        ours = redis_url(tmp_path / "copy")
        assert ours.split(":")[2] != url.split(":")[2], "the password is that of the first one"
        first.start(wait=False)
        assert first.program is not None
        assert f"process id {other.process.pid}" in refusal(first.program)
    first.start()
    assert redis_url(first.state) == url
    assert_works(first, "llm")


def test_a_backup_in_place_of_the_file_is_served_at_once(tmp_path: Path, first: Server) -> None:
    """As the backup page states, nothing more is needed, even if the server was killed."""
    backed_up(first.state, tmp_path / "backup")
    first.kill()
    for name in ("trainmedic.db", "trainmedic.db-wal", "trainmedic.db-shm"):
        (first.state / name).unlink(missing_ok=True)
    (tmp_path / "backup" / "trainmedic.db").rename(first.state / "trainmedic.db")
    first.start()
    assert_works(first, "llm")


# --- the first one itself -----------------------------------------------------------------------------


def test_a_killed_server_restarts_at_once(first: Server) -> None:
    """None of its locks remain, however often; its Redis keeps its URL."""
    url = redis_url(first.state)
    for number in range(2):
        first.kill()
        first.start()
        assert redis_url(first.state) == url
        assert_works(first, f"llm-{number}")


def test_a_file_replaced_under_the_server_accepts_nothing_more(tmp_path: Path, first: Server) -> None:
    """Writes to an unlinked file are lost, so nothing is accepted until it is restored."""
    database = first.state / "trainmedic.db"
    backed_up(first.state, tmp_path / "backup")
    database.rename(tmp_path / "moved.db")
    assert first.ask("/webhook", delivery("Spike", "llm")).status == 503
    shutil.copy(tmp_path / "backup" / "trainmedic.db", database)
    assert first.ask("/webhook", delivery("Spike", "llm")).status == 503
    assert first.ask("/ready").status == 503
    assert first.program is not None
    assert "was moved or replaced while the server runs" in first.program.tail()
    (tmp_path / "moved.db").rename(database)
    eventually(lambda: first.ask("/ready").status == 200, 60, "ready again")
    assert_works(first, "llm")
