from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Callable, Mapping, Sequence

from trainmedic.launch import guard, terminal, warm

_GUARD = Path(guard.__file__)
_WARM = Path(warm.__file__)


class Guarded:
    """Command under a guard, with pipes for orders (`lifeline`), the guard's report, and output."""

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        grace: float,
        passed_fd: int = -1,
        *,
        prints_to_terminal: bool = False,
    ) -> None:
        """Start the guard. The command inherits `passed_fd` unless -1. Raises OSError."""
        guard_end, self.lifeline = os.pipe()
        self.report, report_end = os.pipe()
        make: Callable[[], tuple[int, int]] = terminal.open_terminal if prints_to_terminal else os.pipe
        (self.out, out_end), (self.err, err_end) = make(), make()
        self.prints_to_terminal = prints_to_terminal
        own = [sys.executable, "-I", "-S", str(_GUARD), str(guard_end), str(report_end), str(grace), str(passed_fd)]
        self.process = subprocess.Popen(  # noqa: S603 - the user's own command
            [*own, *argv],
            stdout=out_end,
            stderr=err_end,
            env=dict(environment),
            pass_fds=(guard_end, report_end, *((passed_fd,) if passed_fd >= 0 else ())),
            start_new_session=True,
        )
        for descriptor in (guard_end, report_end, out_end, err_end):
            os.close(descriptor)
        self.has_begun: Callable[[], bool] = lambda: True
        """To call after the guard's end: returns whether the command was started."""


class WarmStandby:
    """A guard whose child imports PyTorch in advance."""

    def __init__(self, interpreter: str, threads: str, grace: float, *, prints_to_terminal: bool) -> None:
        self._to_standby, its_end = socket.socketpair()
        argv = [interpreter, str(_WARM), str(its_end.fileno()), threads]
        with its_end:
            self._guarded = Guarded(argv, os.environ, grace, its_end.fileno(), prints_to_terminal=prints_to_terminal)

    def begin(self, argv: Sequence[str], torchrun: Sequence[str], environment: Mapping[str, str]) -> Guarded | None:
        """Order the attempt and return its guard; None if the process has ended."""
        if self._guarded.process.poll() is None:
            order = {"argv": list(argv), "torchrun": list(torchrun), "environment": dict(environment)}
            # Write in a thread: the process reads the order after its imports, and the environment may exceed the
            # socket's buffer. Signals can arrive during this time.
            content = json.dumps(order).encode()
            threading.Thread(target=_write, args=(self._to_standby, content), daemon=True).start()
            self._guarded.has_begun = self._was_order_read
            return self._guarded
        self.close()
        return None

    def _was_order_read(self) -> bool:
        with self._to_standby, contextlib.suppress(OSError):  # also closes the socket
            self._to_standby.settimeout(0)
            return self._to_standby.recv(1) == warm.READ
        return False

    def close(self) -> None:
        guarded = self._guarded
        self._to_standby.close()
        for descriptor in (guarded.lifeline, guarded.report, guarded.out, guarded.err):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        deadline = time.monotonic() + guard.LONGEST_GRACE_FOR_REST
        while guarded.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)


def _write(orders: socket.socket, content: bytes) -> None:
    with contextlib.suppress(OSError):
        orders.sendall(content)
        orders.shutdown(socket.SHUT_WR)
