"""``trainmedic`` with short leases, made to die by SIGKILL at its n-th write boundary after a test says so.

    python doomed_leases.py ORDER serve …

ORDER is a file that is not there at first. Once it is, and has a number in it, boundaries are counted from that
moment on, and named in ``ORDER.log``; 0: it does not die. ``doomed_server`` says what a boundary is.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from doomed_server import watch_commits, watch_sends

from tests.integration.hasty_server import LEASE
from trainmedic_core.command import main
from trainmedic_server.actions.nodes import GpuPowerLimit
from trainmedic_server.engine import lease_recovery, leases


class Ordered:
    """Counts boundaries while the order is there."""

    def __init__(self, order: Path) -> None:
        self._order = order
        self._count = 0
        self._lock = threading.Lock()

    def boundary(self, name: str) -> None:
        with self._lock:
            if not self._order.exists():
                self._count = 0
                return
            self._count += 1
            with self._order.with_suffix(".log").open("a") as log:
                log.write(f"{name}\n")
            if self._count == int(self._order.read_text()):
                self._order.unlink()
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    GpuPowerLimit.lease = LEASE
    leases.RENEW_EVERY = LEASE / 15
    lease_recovery.RESENT_AFTER = LEASE / 100
    doom = Ordered(Path(sys.argv[1]))
    watch_commits(doom)  # type: ignore[arg-type]
    watch_sends(doom)  # type: ignore[arg-type]
    main(sys.argv[2:], prog_name="trainmedic")
