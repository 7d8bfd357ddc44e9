"""Several servers on one PostgreSQL, seen as one: what a load balancer and whoever restarts them make of them.

Asked is one after the other, as a Service does it, connection by connection; a server that has ended is started
again, as Kubernetes does. Used by the crash tests of several servers, in the place of a `live.Server`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from tests.support.live import Answer, Server
from tests.support.postgres import PostgresServer
from tests.support.programs import eventually
from tests.support.wires import Wire, Wires

QUICK = ("--takeover-after", "10s")
"""For servers that are to be replaced when they hang; on a busy machine one may lose its place without having hung."""


LOST = ("kill", "cut", "hang", "silence", "no database")
"""The ways in which `Servers.lose` takes one away."""
KINDS = (*LOST, "session", "restart", "redis")
"""All that can happen to the one that works."""


def member(
    directory: Path,
    playbook: str,
    database: str,
    redis: str,
    *options: str,
    advertise: bool = True,
    environment: Mapping[str, str] | None = None,
    token: str | None = None,
) -> Server:
    """A server on `database`, with a state directory and port of its own; not started yet."""
    connected = ("--database", database, "--redis", redis)
    server = Server(directory, playbook, *connected, *options, environment=environment, token=token)
    if advertise:
        server.argv += ["--advertise", f"127.0.0.1:{server.port}"]
    return server


def works(server: Server) -> bool:
    return server.ask("/ready", timeout=5).status == 200


def begun_anew(server: Server) -> int:
    """How often it has lost its place, and begun anew in the same process, since it was last started."""
    assert server.program is not None
    return server.program.log.read_text(errors="replace").count("this server is no longer the leader and restarts")


class Linked(Server):
    """A server that reaches PostgreSQL and Redis, and is reached by all others, over wires."""

    def __init__(
        self,
        directory: Path,
        playbook: str,
        database: str,
        redis: str,
        *options: str,
        wires: Wires,
        environment: Mapping[str, str] | None = None,
        token: str | None = None,
    ) -> None:
        self.to_database, to_redis = wires.to(_port(database)), wires.to(_port(redis))
        connected = ("--database", self.to_database.through(database), "--redis", to_redis.through(redis))
        super().__init__(directory, playbook, *connected, *options, environment=environment, token=token)
        self.door = wires.to(self.port)
        self.argv += ["--advertise", f"127.0.0.1:{self.door.port}"]
        self._wires = (self.to_database, to_redis, self.door)

    def wires(self, change: Callable[[Wire], None]) -> None:
        """Change all of its wires: `Wire.cut`, `Wire.silence` or `Wire.mend`."""
        for wire in self._wires:
            change(wire)

    def signal(self, number: signal.Signals) -> None:
        assert self.program is not None
        self.program.process.send_signal(number)


def _port(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


class Servers(Server):
    """Two servers behind one port, the Service's; the wire that leads from there to them keeps what passes."""

    def __init__(
        self,
        directory: Path,
        playbook: str,
        database: str,
        redis: str,
        *options: str,
        environment: Mapping[str, str] | None = None,
        token: str | None = None,
    ) -> None:
        self._wires = Wires()
        self.members = [
            Linked(
                directory / f"server-{n}",
                *(playbook, database, redis, *QUICK, *options),
                wires=self._wires,
                environment=environment,
                token=token,
            )
            for n in range(2)
        ]
        self.service = self._wires.to(*(member.door.port for member in self.members), keeps=True)
        self.port = self.service.port
        self._headers = self.members[0]._headers
        self.exits: list[int] = []
        self._over = threading.Event()
        self._lost: Linked | None = None
        """Not started again before another works: it could lead again first."""
        self._keeper = threading.Thread(daemon=True, target=self._keep)

    def __enter__(self) -> Self:
        self._wires.__enter__()
        for member in self.members:
            member.start(wait=False)
        self._keeper.start()
        try:
            self.wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._keeper.join()
        for member in self.members:
            member.__exit__()
        self._wires.__exit__()

    def wait(self, but: Server | None = None) -> Linked:
        """The server that works, once there is one, other than `but`."""
        return eventually(lambda: self.working(but), 120, "a server works", 0.05)

    def wait_for_all(self) -> None:
        """Until one works and the others stand by."""
        for member in self.members:
            eventually(lambda member=member: member.ask("/health").status == 200, 60, "each is there", 0.05)
        self.wait()

    def working(self, but: Server | None = None) -> Linked | None:
        return next((member for member in self.members if member is not but and works(member)), None)

    def ask(self, path: str, body: Mapping[str, Any] | None = None, timeout: float = 20) -> Answer:
        answer = super().ask(path, body, timeout)
        return answer if answer.status < 500 else Answer(answer.status)

    def kill(self) -> None:
        self.lose("kill")

    def lose(self, how: str) -> float:
        """Take the one that works from the others until another works; the seconds that this took.

        `kill` ends it, `hang` stops it, `cut` ends all of its connections, `silence` lets nothing through, and
        `no database` nothing between it and PostgreSQL. What is not dead then goes on, and begins anew.
        """
        lost = self.wait()
        harm, mend = {
            "kill": (lost.kill, lambda: None),
            "hang": (lambda: lost.signal(signal.SIGSTOP), lambda: lost.signal(signal.SIGCONT)),
            "cut": (lambda: lost.wires(Wire.cut), lambda: lost.wires(Wire.mend)),
            "silence": (lambda: lost.wires(Wire.silence), lambda: lost.wires(Wire.mend)),
            "no database": (lost.to_database.silence, lost.to_database.mend),
        }[how]
        before, began = begun_anew(lost), time.monotonic()
        self._lost = lost
        harm()
        try:
            self.wait(but=lost)
            seconds = time.monotonic() - began
        finally:
            self._lost = None
            mend()
        if how != "kill":
            eventually(lambda: begun_anew(lost) > before, 60, "the one that was away begins anew", 0.02)
        return seconds

    def _keep(self) -> None:
        """Start again what has ended."""
        while not self._over.wait(0.1):
            for member in self.members:
                if member is self._lost or member.program is None:
                    continue
                if (status := member.program.process.poll()) is not None:
                    self.exits.append(status)
                    member.start(wait=False)


def trouble(kind: str, servers: Servers, postgres: PostgresServer, redis: Any = None) -> float:
    """Let one of `KINDS` happen to the one that works; the seconds until another works, or any where all were harmed.

    `redis` is needed for the kind of that name alone.
    """
    if kind in LOST:
        return servers.lose(kind)
    servers.wait()
    began = time.monotonic()
    match kind:
        case "session":
            postgres.cut()
        case "restart":
            postgres.stop()
            postgres.start()
            began = time.monotonic()
        case "redis":
            redis.kill()
            redis.start()
    servers.wait()
    return time.monotonic() - began
