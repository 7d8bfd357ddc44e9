"""A real PostgreSQL of the tests' own: its data in a directory of its own, on loopback.

It refuses to run as root, so root starts it as the user that the Debian package makes. Used by
the contract, integration and crash tests.
"""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psycopg
import pytest

from tests.support.programs import eventually, free_port

PASSWORD = "not-a-secret-in-tests"
_INSTALLED = Path("/usr/lib/postgresql")
_UNPRIVILEGED = "postgres"


def _program(name: str) -> str:
    """Debian keeps the server's programs by version, off the path."""
    found = [*sorted(_INSTALLED.glob(f"*/bin/{name}"))[-1:], shutil.which(name)]
    if found[0] is None:
        pytest.fail("PostgreSQL's server is not installed: scripts/system-packages postgresql")
    return str(found[0])


def _as_another() -> Mapping[str, Any]:
    """How subprocesses are started so that they are not root's."""
    if os.getuid() != 0:
        return {}
    try:
        found = pwd.getpwnam(_UNPRIVILEGED)
    except KeyError:
        pytest.fail("PostgreSQL does not run as root, and there is no user postgres: install the package postgresql")
    return {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": []}


class PostgresServer:
    """One server process. It can be stopped, killed and started again; each `database` is new and empty."""

    def __init__(self, *, outlasts_machine: bool = True) -> None:
        """Make its data directory. Unless the data has to outlast the machine, commits do not wait for the disk: they
        outlast any process all the same, because the kernel has them."""
        self._durability = () if outlasts_machine else ("-c", "fsync=off")
        self._who = _as_another()
        self._directory = Path(tempfile.mkdtemp(prefix="trainmedic-postgres-"))
        if self._who:
            os.chown(self._directory, self._who["user"], self._who["group"])
        self._numbers = itertools.count(1)
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        password = self._directory / "password"
        password.write_text(PASSWORD + "\n")
        password.chmod(0o644)
        self._run(
            *(_program("initdb"), "--no-sync", "--pgdata", str(self._directory / "data"), "--username", "trainmedic"),
            *("--pwfile", str(password), "--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C.UTF-8"),
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self._directory, ignore_errors=True)

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://trainmedic:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def database(self) -> str:
        """The URL of a database that nobody has used."""
        name = f"trainmedic_{next(self._numbers)}"
        self.ask(f"CREATE DATABASE {name}")
        return self.url(name)

    def start(self) -> None:
        with (self._directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(_program("postgres"), "-D", str(self._directory / "data"), "-p", str(self.port)),
                    *("-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={self._directory}"),
                    *("-c", "max_connections=50", "-c", "shared_buffers=16MB", "-c", "max_wal_size=256MB"),
                    *self._durability,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                **self._who,
            )
        eventually(self._answers, 60, "PostgreSQL answers", 0.02)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT ends every session and stops in order; SIGQUIT leaves recovery to the next start."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(60)
            self.process = None

    def ask(self, statement: str, values: Sequence[Any] = (), database: str = "postgres") -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            found = connection.execute(statement.encode(), values)
            return found.fetchall() if found.description else []

    def cut(self) -> int:
        """End every session of a server that works, as an operator would; how many there were."""
        cut = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted"
        return len(self.ask(cut))

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            log = (self._directory / "log").read_text(errors="replace")
            raise AssertionError(f"PostgreSQL ended with {self.process.returncode}:\n{log[-2000:]}")
        try:
            return bool(self.ask("SELECT 1"))
        except psycopg.OperationalError:
            return False

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, cwd=self._directory, capture_output=True, text=True, check=False, **self._who)
        assert done.returncode == 0, done.stderr
