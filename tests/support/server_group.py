"""Several servers on one PostgreSQL, seen as one: what a load balancer and whoever restarts them make of them.

Asked is one after the other, as a Service does it; a server that has ended is started again, as
Kubernetes does. Used by the crash tests of several servers, in the place of a `live.Server`.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tests.support.live import Answer, Server
from tests.support.programs import eventually

QUICK = ("--takeover-after", "10s")
"""For servers that are to be replaced when they hang; on a busy machine one may lose its place without having hung."""


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
    return server.program.log.read_text(errors="replace").count("this server works no more and begins anew")


class Servers(Server):
    """`count` servers. `kill` hits the one that works."""

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
        known = (playbook, database, redis, *QUICK, *options)
        self.members = [
            member(directory / f"server-{n}", *known, environment=environment, token=token) for n in range(2)
        ]
        self.exits: list[int] = []
        self._turns = itertools.cycle(self.members)
        self._over = threading.Event()
        self._keeper = threading.Thread(daemon=True, target=self._keep)

    def __enter__(self) -> Self:
        for member in self.members:
            member.start(wait=False)
        self._keeper.start()
        self.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._keeper.join()
        for member in self.members:
            member.__exit__()

    def wait(self, but: Server | None = None) -> Server:
        """The server that works, once there is one, other than `but`."""
        return eventually(lambda: self.working(but), 60, "a server works", 0.05)

    def working(self, but: Server | None = None) -> Server | None:
        return next((member for member in self.members if member is not but and works(member)), None)

    def ask(self, path: str, body: Mapping[str, Any] | None = None, timeout: float = 20) -> Answer:
        answer = next(self._turns).ask(path, body, timeout)
        return answer if answer.status < 500 else Answer(answer.status)

    def kill(self) -> None:
        self.wait().kill()

    def hang(self) -> None:
        """Stop the one that works for longer than it takes another to take over, then let it go on."""
        hung = self.wait()
        assert hung.program is not None
        process, before = hung.program.process, begun_anew(hung)
        process.send_signal(signal.SIGSTOP)
        try:
            self.wait(but=hung)
        finally:
            process.send_signal(signal.SIGCONT)
        eventually(lambda: begun_anew(hung) > before, 30, "the one that hung begins anew", 0.02)

    def _keep(self) -> None:
        """Start again what has ended."""
        while not self._over.wait(0.1):
            for member in self.members:
                if member.program is not None and (status := member.program.process.poll()) is not None:
                    self.exits.append(status)
                    member.start(wait=False)
