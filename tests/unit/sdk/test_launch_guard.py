"""The guard alone, as ``trainmedic-run`` starts it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import eventually
from trainmedic.launch import guard

# Neither process ends by the signals that ask for it.
STUBBORN = "trap '' TERM USR1; (exec setsid sleep 60) & sleep 60; sleep 60"


@pytest.mark.parametrize("order", [b"", b"pass 10\n"])
def test_a_launcher_that_ends_leaves_no_process(order: bytes) -> None:
    """The guard can report neither the job's process nor a signal, but kills the job after the grace period."""
    orders, lifeline = os.pipe()
    report, reports = os.pipe()
    program = [sys.executable, guard.__file__, str(orders), str(reports), "1", "-1", "sh", "-c", STUBBORN]
    if not order:
        os.close(report)
    with subprocess.Popen(program, pass_fds=(orders, reports)) as guarding:
        os.close(orders)
        os.close(reports)
        below = eventually(lambda: (pids := guard.descendants(guarding.pid))[2:] and pids, 60, "the job", every=0.05)
        try:
            if order:
                os.close(report)
                os.write(lifeline, order)
            os.close(lifeline)
            guarding.wait(60)
            assert not [pid for pid in below if _lives(pid)]
        finally:
            for pid in below:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    return False
