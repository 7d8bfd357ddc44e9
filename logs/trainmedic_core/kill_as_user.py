"""SIGKILL to another user's process without CAP_KILL."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import threading
from collections.abc import Callable

# The C library's function would change all threads.
_SETRESUID = {"x86_64": 117, "aarch64": 147}
_UNCHANGED = -1
_JOIN_SECONDS = 5.0  # Two system calls take microseconds.


def kill(pid: int, uid: int) -> bool:
    """Kill a process if it still exists. Return False without permission."""
    return _send_as(lambda: os.kill(pid, signal.SIGKILL), uid)


def kill_group(group: int, uid: int) -> bool:
    """Kill the user's processes of a group, like `kill`."""
    return _send_as(lambda: os.killpg(group, signal.SIGKILL), uid)


def _send_as(send: Callable[[], None], uid: int) -> bool:
    if uid == os.geteuid():
        return _send_signal(send)
    outcome: list[bool] = []
    thread = threading.Thread(target=lambda: outcome.append(_become(uid) and _send_signal(send)), daemon=True)
    thread.start()
    thread.join(_JOIN_SECONDS)
    return outcome == [True]


def _become(uid: int) -> bool:
    """Set this thread's effective user; False without permission."""
    # The effective user only: with the same real user, the target could signal this thread.
    number = _SETRESUID.get(platform.machine())
    if number is None:
        return False
    arguments = (ctypes.c_long(each) for each in (number, _UNCHANGED, uid, _UNCHANGED))
    return bool(ctypes.CDLL(None).syscall(*arguments) == 0)


def _send_signal(send: Callable[[], None]) -> bool:
    try:
        with contextlib.suppress(ProcessLookupError):
            send()
    except PermissionError:
        return False
    return True
