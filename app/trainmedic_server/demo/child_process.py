from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import httpx

from trainmedic_server.errors import DemoFailed

_END_SECONDS = 15.0  # from SIGTERM to SIGKILL
_POLL_SECONDS = 0.1
_LAST_LINES = 15  # of the output, in an error
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_libc = ctypes.CDLL(None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_answering(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).is_success
    except httpx.HTTPError:
        return False


class ChildProcess:
    """A subprocess with its output in a file. The kernel ends it if the demo is killed."""

    def __init__(self, name: str, argv: Sequence[str | Path], log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self._log = log
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("TRAINMEDIC_")}
        with log.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 - programs of this machine, without a shell
                [str(part) for part in argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**inherited, **environment},
                cwd=log.parent,
                start_new_session=True,  # Ctrl-C reaches the demo alone, which ends its programs in order
                preexec_fn=_end_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until(self, is_ready: Callable[[], bool], seconds: float) -> Self:
        """Raise DemoFailed with the last lines of its output if it ends or is not ready in time."""
        deadline = time.monotonic() + seconds
        while not is_ready():
            self.check()
            if time.monotonic() > deadline:
                raise DemoFailed(f"{self.name} was not ready within {seconds:g} s:\n{self._last_lines()}")
            time.sleep(_POLL_SECONDS)
        return self

    def check(self) -> None:
        if (status := self._process.poll()) is not None:
            raise DemoFailed(f"{self.name} ended with status {status}:\n{self._last_lines()}")

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()

    def _last_lines(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:])


def _end_with_parent() -> None:
    _libc.prctl(_DEATH_SIGNAL, signal.SIGTERM)
