"""Everything that the chaos breaks: a server, an agent with GPUs, training jobs, Redis and perhaps PostgreSQL.

All of them are real processes with secrets of their own. What ends is started again, as Kubernetes and systemd do it.
Not here: what is done to them (``faults``), what is asked of them (``load``), what must hold (``promises``).
"""

from __future__ import annotations

import hashlib
import json
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import redis

from tests.attack.chaos.small_disk import SmallDisk
from tests.conftest import RedisServer
from tests.driver.driver import Driver
from tests.support.gpu_node import GpuNode
from tests.support.live import Server
from tests.support.postgres import PostgresServer
from tests.support.programs import PYTHON_PATH, ROOT, Program, eventually
from tests.support.set_clock import MachineClock

GPUS = 4
JOBS = ("job-0", "job-1", "job-2")
FORGETFUL = "job-2"
"""The job whose script does not say what is in force."""
PATIENCE = 60.0
_MEGABYTES = 256


@dataclass(frozen=True)
class Secrets:
    """What no log, answer or history may show."""

    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    signing_key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    redis_password: str = field(default_factory=lambda: secrets.token_hex(24))


class DiskNode(GpuNode):
    """An agent whose journal is on the small disk, where there is one."""

    launcher: tuple[str, ...] = ()

    def _launcher(self) -> tuple[str | Path, ...]:
        return self.launcher


class TrainingJob:
    """One training job as a process; its changes outlive it."""

    def __init__(self, directory: Path, name: str, environment: dict[str, str]) -> None:
        self.name = name
        self.directory = directory
        self.changes_file = directory / f"{name}.changes"
        self._environment = {"PYTHONPATH": PYTHON_PATH, **environment}
        self.program: Program | None = None
        self.starts = 0

    def start(self) -> None:
        self.starts += 1
        script = Path(__file__).with_name("training_job.py")
        log = self.directory / f"{self.name}-{self.starts}.log"
        options = ["forgetful"] if self.name == FORGETFUL else []
        self.program = Program([sys.executable, script, self.name, self.changes_file, *options], log, self._environment)

    def changes(self) -> list[dict[str, Any]]:
        if not self.changes_file.exists():
            return []
        return [json.loads(line) for line in self.changes_file.read_text().splitlines()]


class Cluster:
    """The processes, and who starts them again. ``database`` is PostgreSQL's where the server keeps its runs there."""

    def __init__(
        self,
        directory: Path,
        redis_server: RedisServer,
        driver: Driver,
        secret: Secrets,
        postgres: PostgresServer | None,
    ) -> None:
        self.redis, self.driver, self.secret, self.postgres = redis_server, driver, secret, postgres
        self.directory = directory
        self.disk = SmallDisk(directory / "disk", _MEGABYTES)
        connection = {"TRAINMEDIC_REDIS_URL": redis_server.url, "TRAINMEDIC_SIGNING_KEY": secret.signing_key}
        self.node = DiskNode(directory / "node", redis_server.url, driver, policy="allow: [gpu.power_limit]\n")
        self.node.state = self.disk.path / "agent"
        self.clocks = {name: MachineClock(directory / f"clock-of-{name}") for name in ("server", "agent")}
        self._node_environment = {**connection, **self.clocks["agent"].environment}
        self.server = self._server(connection)
        self.jobs = [TrainingJob(directory, name, connection) for name in JOBS]
        self.exits: list[tuple[str, int]] = []
        self.flushed_at: list[float] = []
        self._held: set[str] = set()
        self._over = threading.Event()
        self._keeper = threading.Thread(daemon=True, target=self._keep, name="keeper")
        self._keeper_error: BaseException | None = None

    def _server(self, connection: dict[str, str]) -> Server:
        directory = self.directory / "server"
        directory.mkdir()
        tokens = directory / "tokens.yaml"
        digest = hashlib.sha256(self.secret.token.encode()).hexdigest()
        tokens.write_text(f"- {{name: chaos, sha256: {digest}, roles: [webhook, viewer, operator]}}\n")
        environment = {"TRAINMEDIC_TOKENS_FILE": str(tokens), **connection, **self.clocks["server"].environment}
        if self.postgres is not None:
            environment["TRAINMEDIC_DATABASE_URL"] = self.postgres.database()
        playbooks = Path(__file__).with_name("playbooks.yaml").read_text()
        hasty = ROOT / "tests" / "integration" / "hasty_server.py"
        # One node of one is more than any share; the breaker has tests of its own.
        options = ("--breaker-min-nodes", "100", "--takeover-after", "10s")
        server = Server(
            directory, playbooks, *options, program=(hasty,), environment=environment, token=self.secret.token
        )
        server.argv[server.argv.index("--state-dir") + 1] = self.disk.path / "server"
        return server

    def __enter__(self) -> Self:
        self.disk.__enter__()
        self.node.launcher = self.disk.launcher
        self.server.argv = [*self.disk.launcher, *self.server.argv]
        self.redis.start()
        for name in self.names:
            self._start(name)
        eventually(self.is_healthy, PATIENCE, "everything is up", 0.05)
        self._keeper.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._keeper.join()
        for name in self.names:
            program = self.program(name)
            program.process.send_signal(signal.SIGCONT)
            program.end()
        self.disk.__exit__()

    # --- the processes ------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        return ["server", "agent", *JOBS]

    def program(self, name: str) -> Program:
        part: Any = {"server": self.server, "agent": self.node, **{job.name: job for job in self.jobs}}[name]
        assert part.program is not None
        program: Program = part.program
        return program

    def _start(self, name: str) -> None:
        if name == "server":
            self.server.start(wait=False)
        elif name == "agent":
            self.node.start(wait=False, **self._node_environment)
        else:
            next(job for job in self.jobs if job.name == name).start()

    @contextmanager
    def left_down(self, name: str) -> Iterator[None]:
        """Do not start it again meanwhile."""
        self._held.add(name)
        try:
            yield
        finally:
            self._held.discard(name)

    def _keep(self) -> None:
        """Start again what has ended."""
        try:
            while not self._over.wait(0.1):
                for name in self.names:
                    status = self.program(name).process.poll()
                    if status is not None and name not in self._held:
                        self.exits.append((name, status))
                        self._start(name)
        except BaseException as error:
            self._keeper_error = error
            raise

    # --- asking -------------------------------------------------------------------------------------------

    def is_healthy(self) -> bool:
        """Whether the server says that all is well, and everybody is connected to it."""
        if self._keeper_error is not None:
            raise AssertionError("nobody starts again what has ended") from self._keeper_error
        if self.server.ask("/ready", timeout=5).status != 200:
            return False
        agents, jobs = self.server.ask("/agents"), self.server.ask("/jobs")
        if agents.status != 200 or jobs.status != 200:
            return False
        connected = {entry["name"] for entry in [*agents.body["items"], *jobs.body["items"]]}
        return {self.node.name, *JOBS} <= connected

    def insistently(self, what: str, act: Callable[[redis.Redis], object]) -> None:
        """Do something to Redis as its administrator, as soon as it answers."""

        def attempt() -> bool:
            try:
                with redis.Redis.from_url(self.redis.url, socket_timeout=10) as client:
                    act(client)
            except (redis.RedisError, OSError):
                return False
            return True

        eventually(attempt, PATIENCE, what, 0.1)

    def flush(self) -> None:
        self.insistently("Redis is emptied", lambda client: client.flushall())
        self.flushed_at.append(time.time())
