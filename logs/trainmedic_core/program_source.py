"""Process that forks confined programs for the log reader, which can no longer execute or import any."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

NAME = "log-parsers"  # of the process
_ANSWER_SECONDS = 30.0
_LONGEST_MESSAGE = 4096  # bytes
_MOST_RUNNING = 8
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

Programs = Mapping[str, Callable[[Sequence[str]], None]]  # main functions by module, called with arguments


class ProgramSource:
    """Thread-safe client of the forking process."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self._pid = pid
        self._connection = connection
        self._connection.settimeout(_ANSWER_SECONDS)
        self._lock = threading.Lock()
        self._has_failed = False

    @classmethod
    def forked(cls, programs: Programs, confine: Callable[[], None]) -> ProgramSource:
        """Fork the process, from a single thread. `confine` gives up what no program needs."""
        # The reader still has its user here, and all programs are loaded.
        connection, source_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            _run_source(source_end, programs, confine)
        source_end.close()
        return cls(pid, connection)

    @property
    def has_ended(self) -> bool:
        with self._lock:
            if not self._has_failed:
                with contextlib.suppress(ChildProcessError):
                    self._has_failed = os.waitpid(self._pid, os.WNOHANG)[0] != 0
            return self._has_failed

    def start(self, module: str, arguments: Sequence[str]) -> ForkedProgram:
        """Raises OSError."""
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            their_input, our_output = os.pipe()
            theirs.callback(os.close, their_input)
            requests = ours.enter_context(os.fdopen(our_output, "wb"))
            our_input, their_output = os.pipe()
            theirs.callback(os.close, their_output)
            answers = ours.enter_context(os.fdopen(our_input, "rb"))
            pid = self.ask({"start": module, "arguments": list(arguments)}, (their_input, their_output))
            ours.pop_all()
        return ForkedProgram(self, pid, requests, answers)

    def ask(self, request: Mapping[str, object], descriptors: Sequence[int] = ()) -> int:
        """Return the program's process ID. Raises OSError."""
        with self._lock:
            try:
                socket.send_fds(self._connection, [json.dumps(request).encode()], list(descriptors))
                answer = self._connection.recv(_LONGEST_MESSAGE)
            except OSError:
                self._has_failed = True
                raise
            if not answer:
                self._has_failed = True
                raise ConnectionResetError("the process that starts programs has ended")
        pid = int(answer)
        if pid <= 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid


class ForkedProgram:
    """Its process ID is valid until `kill`, because the source waits for it."""

    def __init__(self, source: ProgramSource, pid: int, requests: IO[bytes], answers: IO[bytes]) -> None:
        self._source = source
        self._pid = pid
        self.requests = requests
        self.answers = answers

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # it ends with the source
            self._source.ask({"end": self._pid})

    def close(self) -> None:
        for pipe in (self.requests, self.answers):
            with contextlib.suppress(OSError):
                pipe.close()


# --- the process ----------------------------------------------------------------------------------------


def _run_source(connection: socket.socket, programs: Programs, confine: Callable[[], None]) -> None:
    status = 1
    try:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        # The closed descriptors include the link, which must end with the parent.
        _close_all_but(connection.fileno())
        null_descriptor = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null_descriptor, 0)
        os.dup2(null_descriptor, 1)
        confine()
        ctypes.CDLL(None).prctl(_PR_SET_NAME, NAME.encode(), 0, 0, 0)
        gc.freeze()
        _serve(connection, programs, null_descriptor)
        status = 0
    finally:
        os._exit(status)


def _close_all_but(kept: int) -> None:
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def _serve(connection: socket.socket, programs: Programs, null_descriptor: int) -> None:
    running: list[int] = []  # process IDs, the oldest first
    while True:
        raw, descriptors, _, _ = socket.recv_fds(connection, _LONGEST_MESSAGE, 2)
        if not raw:
            break
        request = json.loads(raw)
        if "start" in request:
            answer = _start_program(
                programs[request["start"]], request["arguments"], descriptors, running, null_descriptor
            )
        else:
            answer = _end_program(int(request["end"]), running)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(b"%d" % answer)
    while running:
        _end_program(running[0], running)


def _start_program(
    program: Callable[[Sequence[str]], None],
    arguments: Sequence[str],
    descriptors: Sequence[int],
    running: list[int],
    null_descriptor: int,
) -> int:
    """Return the process ID, or a negative errno."""
    while len(running) >= _MOST_RUNNING:
        _end_program(running[0], running)  # it was never ended
    try:
        pid = os.fork()
    except OSError as error:
        return -(error.errno or 1)
    if pid == 0:
        _run_program(program, arguments, descriptors, null_descriptor)
    running.append(pid)
    return pid


def _run_program(
    program: Callable[[Sequence[str]], None], arguments: Sequence[str], descriptors: Sequence[int], null_descriptor: int
) -> None:
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        for standard, descriptor in enumerate((*descriptors, null_descriptor)):
            os.dup2(descriptor, standard)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        program(arguments)
        sys.stdout.flush()
        status = 0
    finally:
        os._exit(status)


def _end_program(pid: int, running: list[int]) -> int:
    if pid in running:
        running.remove(pid)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return pid
