"""The Python that the server runs on: how it is tuned, and whether its threads can run side by side, as the log tells.

A Python that was built free-threaded has no global interpreter lock (GIL), unless an extension module that does not
say that it can do without turns it on again, or a person does.
"""

from __future__ import annotations

import gc
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

from trainmedic_server import telemetry

log = telemetry.logger(__name__)


def tune() -> None:
    """Let the store's thread run sooner, and look for cyclic garbage less often.

    After each call into SQLite that thread waits for the interpreter's lock, by default up to 5 ms. A tenth
    of that makes the commits of an alert storm that much faster.

    A storm of ten thousand alerts makes a million objects that all live on for a while, and neither alerts nor runs
    leave cyclic garbage. At the usual thresholds the collector goes through all of them again and again, which doubled
    the time of ``benchmarks.alert_storm``. Without the lock the collector goes through everything
    there is each time, while all threads stand still.
    """
    sys.setswitchinterval(0.0005)
    gc.set_threshold(50_000 if _has_gil() else 2_000_000, 20, 50)


def described() -> dict[str, Any]:
    """Its version, and whether it has the lock."""
    return {"python": ".".join(map(str, sys.version_info[:3])), "gil": _has_gil()}


def warn_of_gil() -> None:
    """Warn where the lock is on that this Python was built to do without."""
    if sysconfig.get_config_var("Py_GIL_DISABLED") and _has_gil():
        log.warning("this Python is free-threaded, and its GIL is on: start the server with PYTHON_GIL=0")


def _has_gil() -> bool:
    """Whether only one thread of this process runs at a time."""
    is_enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)  # which Python 3.13 began to tell
    return is_enabled()
