"""Our programs in tests, as forks of one process that has imported them: most of a start is imports.

A fork runs the program's own code in a process of its own, with the arguments, environment, directory and output that
it is given. Not here: a program whose environment Python or the C library reads when it starts (`Parent.can_fork`).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

IMPORTED = ("trainmedic_server.cli.serve",)
"""What the process imports that is forked."""
_READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "OMP_")
_LONGEST = 200_000
_LONGEST_ANSWER = 300.0  # seconds; the first waits for the imports


class Fork:
    """A program that runs, with what `subprocess.Popen` has for it."""

    def __init__(self, parent: Parent, pid: int, argv: Sequence[str]) -> None:
        self.pid = pid
        self.args = argv
        self.returncode: int | None = None
        self._parent = parent
        self._descriptor = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._descriptor)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, negative for a signal; subprocess.TimeoutExpired after `timeout` seconds."""
        watch = select.poll()  # select() takes no descriptor over 1023
        watch.register(self._descriptor, select.POLLIN)
        if not watch.poll(None if timeout is None else max(0, timeout) * 1000):
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        with self._lock:
            if self.returncode is None:
                self.returncode = self._parent.status_of(self.pid)
            return self.returncode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Parent:
    """The process that is forked. It ends with the process of the tests."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._at_start = _at_start(environment)
        self._owner = os.getpid()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(_LONGEST_ANSWER)
        with theirs:
            argv = [sys.executable, "-m", __name__, str(theirs.fileno())]
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, env=environment, pass_fds=[theirs.fileno()], cwd="/"
            )
        self._lock = threading.Lock()

    def can_fork(self, environment: Mapping[str, str]) -> bool:
        """Return whether a fork is like a start with this environment: Python has read the same one."""
        return _at_start(environment) == self._at_start

    def fork(self, argv: Sequence[str], environment: Mapping[str, str], directory: Path, output: int) -> Fork:
        """Run a program; `argv` is ``PYTHON -m MODULE ARGUMENT…`` or ``PYTHON FILE ARGUMENT…``."""
        request = {"argv": argv[1:], "environment": dict(environment), "directory": str(directory)}
        return Fork(self, self._ask(request, output), argv)

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> None:
        if os.getpid() != self._owner:
            return
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)  # close() leaves it open where a fork of this process has it
        self.control.close()
        self._status(60)

    def status_of(self, pid: int) -> int:
        """ChildProcessError if the process that could read it has ended."""
        return os.waitstatus_to_exitcode(self._ask({"ended": pid}))

    def _ask(self, request: Mapping[str, Any], *descriptors: int) -> int:
        with self._lock:
            try:
                socket.send_fds(self.control, [json.dumps(request).encode()], descriptors)
                answer = self.control.recv(_LONGEST)
            except OSError as error:
                answer, why = b"", f"{error}: "
            else:
                why = ""
            if not answer:  # end it: a late answer would be taken for that of the next request
                raise ChildProcessError(f"{why}the process to fork ended with {self._status(1)}")
        return int(json.loads(answer))

    def _status(self, patience: float) -> int:
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


_parents: dict[str, Parent] = {}
_starting = threading.Lock()


def parent(python_path: str) -> Parent:
    """Return this process's one, which is started at the first call, and after its end."""
    with _starting:
        known = _parents.get(python_path)
        if known is None or known.has_ended():
            known = _parents[python_path] = Parent({**os.environ, "PYTHONPATH": python_path})
            atexit.register(known.end)
        return known


def _at_start(environment: Mapping[str, str]) -> Mapping[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}


def _serve(control: socket.socket) -> Sequence[str]:
    """Answer until the other end is closed. In a fork: become the program, and return its arguments."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _LONGEST, 1)
        if not message:
            os._exit(0)
        request = json.loads(message)
        if "ended" in request:
            answer = os.waitpid(request["ended"], 0)[1]
        else:
            answer = os.fork()
            if answer == 0:
                control.close()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for standard in (sys.stdout.fileno(), sys.stderr.fileno()):
                    os.dup2(*descriptors, standard)
                os.close(*descriptors)
                os.chdir(request["directory"])
                os.environ.clear()
                os.environ.update(request["environment"])
                time.tzset()
                argv: Sequence[str] = request["argv"]
                return argv
            for descriptor in descriptors:
                os.close(descriptor)
        control.send(json.dumps(answer).encode())


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the tests still need exit statuses
    with socket.socket(fileno=int(sys.argv[1])) as control:
        for module in IMPORTED:
            importlib.import_module(module)
        threads = list(Path("/proc/self/task").iterdir())
        assert len(threads) == 1, f"what {IMPORTED} imports has started threads, which a fork lacks"
        gc.freeze()
        argv = _serve(control)
    sys.orig_argv = [sys.executable, *argv]  # a server may start itself again
    first, *others = argv
    if first == "-m":
        module, *others = others
        sys.argv = [module, *others]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *others]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    _main()
