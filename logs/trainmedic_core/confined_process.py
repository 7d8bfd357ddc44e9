"""Process without rights that parses untrusted input, one answer line per request. Calls block."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Protocol

from trainmedic_core import confined_child, kill_as_user

START_SECONDS = 30  # callers add them to `seconds`, as the first request starts the process


class ProgramProcess(Protocol):
    @property
    def requests(self) -> IO[bytes]: ...

    @property
    def answers(self) -> IO[bytes]: ...

    def kill(self) -> None:
        """End it; thread-safe."""
        ...

    def close(self) -> None:
        """Close pipes and reap it."""
        ...


StartsPrograms = Callable[[str, Sequence[str]], ProgramProcess]
"""Starts a module's program. Raises OSError."""


class ExecutedProgram:
    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        # No environment: it can contain tokens.
        environment = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        command = [sys.executable, "-P", "-m", module, *arguments]
        self.process = subprocess.Popen(  # noqa: S603 - our own program; what others wrote is its input alone
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )

    @property
    def requests(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def answers(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def kill(self) -> None:
        """End it, even as another user."""
        try:
            self.process.kill()
        except PermissionError:
            own = confined_child.first_mapped(confined_child.PARSER_IDS)
            if own is not None and self.process.returncode is None:
                kill_as_user.kill(self.process.pid, own)

    def close(self) -> None:
        with suppress(OSError):  # discard what the pipe still holds
            self.process.communicate()


class ConfinedProcess:
    """Process started on demand, for one request at a time."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        longest_answer: int,
        start: StartsPrograms = ExecutedProgram,
    ) -> None:
        """`longest_answer`: bytes."""
        self._module = module
        self._arguments = arguments
        self._longest_answer = longest_answer
        self._start = start
        self._process: ProgramProcess | None = None

    def ask(self, request: bytes, seconds: float) -> bytes:
        """Return the answer line, cut after `longest_answer` bytes.

        It has no line feed if the process ended or took too long, or it was cut: then call `end`. Raises OSError if it
        cannot start.
        """
        process = self._process = self._process or self._start(self._module, self._arguments)
        watchdog = threading.Timer(seconds, process.kill)
        watchdog.start()
        try:
            process.requests.write(request)
            process.requests.flush()
            return process.answers.readline(self._longest_answer + 1)
        except OSError:  # the process ended while reading the request
            return b""
        finally:
            watchdog.cancel()

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.close()
