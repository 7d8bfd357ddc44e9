"""``trainmedic``, made to die by SIGKILL at its n-th write boundary: a program for the crash tests.

    python doomed_server.py N LOG serve …

A boundary is the moment before or after a commit of the run store, before or after a batch of
commands that writes to Redis, or before or after an HTTP call that changes something, as of
slurmrestd. Each is named in LOG, one line each, before the process dies at the N-th (0: never). The
hooks sit in SQLAlchemy, redis-py and the HTTP client, so that all other code runs unchanged.
They do not model a power failure: what the operating system has been given survives.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import redis.asyncio.client
from sqlalchemy.engine.default import DefaultDialect

from trainmedic_core.command import main
from trainmedic_server.adapters.httpx_caller import HttpxCaller

_WRITES = ("XADD", "XACK", "XDEL")


class Countdown:
    """Counts boundaries from every thread; the n-th is the last thing that the process does."""

    def __init__(self, fatal: int, log: Path) -> None:
        self._left = fatal
        self._log = log.open("a", buffering=1)
        self._lock = threading.Lock()

    def boundary(self, name: str) -> None:
        with self._lock:
            self._log.write(f"{name}\n")
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def watch_commits(countdown: Countdown) -> None:
    commit = DefaultDialect.do_commit

    def watched(self: Any, connection: Any) -> None:
        countdown.boundary("before commit")
        commit(self, connection)
        countdown.boundary("after commit")

    DefaultDialect.do_commit = watched  # type: ignore[method-assign]


def watch_sends(countdown: Countdown) -> None:
    execute = redis.asyncio.client.Pipeline.execute

    async def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = {str(command[0][0]) for command in self.command_stack}
        written = "+".join(name for name in _WRITES if name in names)
        if not written:
            return await execute(self, *args, **kwargs)
        countdown.boundary(f"before {written}")
        replies = await execute(self, *args, **kwargs)
        countdown.boundary(f"after {written}")
        return replies

    redis.asyncio.client.Pipeline.execute = watched  # type: ignore[method-assign]


def watch_calls(countdown: Countdown) -> None:
    call = HttpxCaller.call

    async def watched(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "GET":
            return await call(self, method, *args, **kwargs)
        countdown.boundary(f"before {method}")
        reply = await call(self, method, *args, **kwargs)
        countdown.boundary(f"after {method}")
        return reply

    HttpxCaller.call = watched  # type: ignore[method-assign]


if __name__ == "__main__":
    doom = Countdown(int(sys.argv[1]), Path(sys.argv[2]))
    watch_commits(doom)
    watch_sends(doom)
    watch_calls(doom)
    main(sys.argv[3:], prog_name="trainmedic")
