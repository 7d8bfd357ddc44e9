"""A Redis master, its replica, and three Sentinels that watch them, as processes of this machine."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import redis

from tests.support.programs import Program, eventually, free_port

MASTER = "remedies"
_SENTINEL = """\
port {port}
bind 127.0.0.1
sentinel monitor {master} 127.0.0.1 {redis} 2
sentinel down-after-milliseconds {master} 1000
sentinel failover-timeout {master} 5000
"""


class Sentinels:
    """Two Redis and three Sentinels while the context lasts. `make` makes a Redis that is not started yet."""

    def __init__(self, directory: Path, make: Callable[..., Any]) -> None:
        self._directory = directory
        self._places = [directory / name for name in ("redis-1", "redis-2")]
        for place in self._places:
            place.mkdir(parents=True)
        first = make(self._places[0])
        self.redis = [first, make(self._places[1], "--replicaof", "127.0.0.1", str(first.port))]
        self.ports = [free_port() for _ in range(3)]
        self._stack = contextlib.ExitStack()

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in self.ports)}/{MASTER}/0"

    def __enter__(self) -> Self:
        for each in self.redis:
            each.start()
            self._stack.callback(each.kill)
        for port in self.ports:
            home = self._directory / f"sentinel-{port}"
            home.mkdir()
            config = home / "sentinel.conf"
            config.write_text(_SENTINEL.format(port=port, master=MASTER, redis=self.redis[0].port))
            self._stack.enter_context(Program(["redis-server", config, "--sentinel"], home / "log"))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def master(self) -> int:
        """The port of the master, as the first Sentinel says."""
        with redis.Redis(port=self.ports[0], protocol=2) as sentinel:
            found: Any = sentinel.sentinel_get_master_addr_by_name(MASTER)
            return int(found[1])

    def fail_over(self, kind: str) -> None:
        """Have the other take the master's place, which is killed, hangs (and goes on later), or gives it up."""
        eventually(self._is_whole, 60, "there is a replica to take its place")
        before = self.master()
        old = next(each for each in self.redis if each.port == before)
        match kind:
            case "killed":
                old.kill()
            case "hung":
                old.process.send_signal(signal.SIGSTOP)
            case _:
                with redis.Redis(port=self.ports[0], protocol=2) as sentinel:
                    sentinel.execute_command("SENTINEL", "FAILOVER", MASTER)
        try:
            eventually(lambda: self.master() != before, 60, "the other is the master")
        finally:
            if kind == "hung":
                old.process.send_signal(signal.SIGCONT)
        if kind == "killed":
            old.start()

    def _is_whole(self) -> bool:
        for port in self.ports:
            with redis.Redis(port=port, protocol=2) as sentinel:
                state: Any = sentinel.sentinel_master(MASTER)
                replicas: Any = sentinel.sentinel_slaves(MASTER)
            others = state["num-other-sentinels"]
            if others != 2 or not any(each["master-link-status"] == "ok" for each in replicas):
                return False
        return True
