"""The guard's process of one attempt, with its pipes: started for the attempt, or before it, on standby."""

from __future__ import annotations

import contextlib
import json
import os
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
    """A started guard. The attempt that takes it over closes its descriptors."""

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        grace: float,
        passed_fd: int = -1,
        *,
        prints_to_terminal: bool = False,
    ) -> None:
        """Start it with the command `argv`, which gets the descriptor `passed_fd` unless it is -1.

        Raises OSError if there is no room for a process or a descriptor.
        """
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


class WarmStandby:
    """A guard whose child has imported PyTorch and waits for the next attempt (see `warm`)."""

    def __init__(self, interpreter: str, threads: str, grace: float, *, prints_to_terminal: bool) -> None:
        orders_end, self._orders = os.pipe()
        argv = [interpreter, str(_WARM), str(orders_end), threads]
        try:
            self._guarded = Guarded(argv, os.environ, grace, orders_end, prints_to_terminal=prints_to_terminal)
        finally:
            os.close(orders_end)

    def begin(self, argv: Sequence[str], torchrun: Sequence[str], environment: Mapping[str, str]) -> Guarded | None:
        """Let the attempt begin, and return its guard. None if the process has ended; then it is closed."""
        if self._guarded.process.poll() is None:
            order = {"argv": list(argv), "torchrun": list(torchrun), "environment": dict(environment)}
            # The process reads the order after its imports, and a pipe does not hold every environment. Meanwhile
            # signals can come for the job.
            write = threading.Thread(target=_write, args=(self._orders, json.dumps(order).encode()), daemon=True)
            self._orders = -1
            write.start()
            return self._guarded
        self.close()
        return None

    def close(self) -> None:
        """End the process. Its guard ends it after its grace at the latest."""
        guarded = self._guarded
        for descriptor in (self._orders, guarded.lifeline, guarded.report, guarded.out, guarded.err):
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._orders = -1
        deadline = time.monotonic() + guard.LONGEST_GRACE_FOR_REST
        while guarded.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)


def _write(pipe: int, content: bytes) -> None:
    """Write to a pipe, and close it. A reader that has ended needs nothing."""
    with contextlib.suppress(OSError), os.fdopen(pipe, "wb") as file:
        file.write(content)
