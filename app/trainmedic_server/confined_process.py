"""A process that parses what a job's user wrote, and can do nothing else. It answers each request with one line.

The program gives up its rights with ``confined_child``. Blocking: a caller that serves others uses a thread.
Who calls it: ``adapters.dump_reader`` (flight recorders) and ``agent.disk.metadata_reader`` (checkpoints).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from trainmedic_server import confined_child, kill_as_user

START_SECONDS = 30
"""Seconds that the start of the process may take."""


class ConfinedProcess:
    """One program, one request at a time. It is started when it is needed, and again after it has ended."""

    def __init__(self, module: str, arguments: Sequence[str], longest_answer: int) -> None:
        """`longest_answer` is the number of bytes that are taken of one answer."""
        self._module = module
        self._arguments = arguments
        self._longest_answer = longest_answer
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: bytes, seconds: float) -> bytes:
        """Return the line that answers a request, cut after `longest_answer` bytes.

        It has no line feed at its end if the process has ended, or has not answered within `seconds`.
        """
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        watchdog = threading.Timer(seconds, _kill, (process,))
        watchdog.start()
        try:
            process.stdin.write(request)
            process.stdin.flush()
            return process.stdout.readline(self._longest_answer + 1)
        except OSError:  # the process ended while it took the request
            return b""
        finally:
            watchdog.cancel()

    def end(self) -> None:
        """Kill the process."""
        process, self._process = self._process, None
        if process is not None:
            _kill(process)
            with suppress(OSError):  # what the pipe still holds is not wanted
                process.communicate()

    def _started(self) -> subprocess.Popen[bytes]:
        # No environment: what stands in it, such as tokens, is none of the program's business.
        environment = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        command = [sys.executable, "-P", "-m", self._module, *self._arguments]
        return subprocess.Popen(  # noqa: S603 - our own program; what others wrote is its input alone
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process, also as another user's and without CAP_KILL."""
    try:
        process.kill()
    except PermissionError:
        own = confined_child.first_mapped(confined_child.PARSER_IDS)
        if own is not None and process.returncode is None:
            kill_as_user.kill(process.pid, own)
