"""Tuning of the Python interpreter."""

from __future__ import annotations

import gc
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

from trainmedic_server import telemetry

# Second and third threshold. The second limits a stop: the middle generation is collected after 3 collections of the
# youngest. The third keeps full collections, the longest ones, to one in 50 million allocations.
GC_LATER = (3, 333)

log = telemetry.logger(__name__)


def tune() -> None:
    """Reduce the switch interval and the frequency of garbage collection."""
    # After each SQLite call, the store's thread waits for the GIL, by default up to 5 ms.
    sys.setswitchinterval(0.0005)
    # Collections doubled the time of `benchmarks.alert_storm`. Without the GIL, each one stops all threads.
    gc.set_threshold(50_000 if _has_gil() else 2_000_000, *GC_LATER)


def described() -> dict[str, Any]:
    return {"python": ".".join(map(str, sys.version_info[:3])), "gil": _has_gil()}


def warn_of_gil() -> None:
    if sysconfig.get_config_var("Py_GIL_DISABLED") and _has_gil():
        log.warning("free-threaded Python runs with the GIL; start the server with PYTHON_GIL=0")


def _has_gil() -> bool:
    is_enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)  # since Python 3.13
    return is_enabled()
