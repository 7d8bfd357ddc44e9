"""Reader of a rank's status file (``trainmedic.job.status_file``)."""

from __future__ import annotations

import json
import math
import os
import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmedic.job.status_file import FILE_NAME
from trainmedic.launch.causes import Reached

_LARGEST = 4096  # bytes; a longer file is unreadable
_MOST_STEPS = 10**15  # others read as -1, none
_ID = re.compile(r"[0-9a-f-]{36}\Z")


@dataclass(frozen=True)
class JobStatus:
    reached: Reached
    stalled_for: float  # seconds beyond the limit of a hang
    waiting: tuple[str, ...] = ()  # IDs of rollbacks


class StatusReader:
    """``stalled_for`` grows while the file does not change."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._raw = b""
        self._changed_at = 0.0

    def read(self) -> JobStatus | None:  # None if unreadable
        path = self._directory / FILE_NAME
        if not path.exists():
            path = min(self._directory.glob("rank-*.json"), default=path)
        try:
            raw = _contents(path)
            fields = json.loads(raw)
            reached = Reached(_whole(fields["step"]), _whole(fields["checkpoint"]))
            stall, limit, is_over = _seconds(fields["stall"]), _limit(fields["limit"]), bool(fields["over"])
            waiting = tuple(each for each in fields.get("waiting", ()) if isinstance(each, str) and _ID.match(each))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return None
        now = time.monotonic()
        if raw != self._raw:
            self._raw, self._changed_at = raw, now
        excess = stall + (now - self._changed_at) - limit
        hangs = not is_over and path.name == FILE_NAME  # another rank's file only shows progress
        return JobStatus(reached, max(excess, 0.0) if hangs else 0.0, waiting)


def _contents(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        return file.read(_LARGEST)


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError("not a finite number")
    return seconds


def _limit(value: Any) -> float:
    return math.inf if value == math.inf else _seconds(value)  # the script can give an infinite `hang_floor`


def _whole(value: object) -> int:
    return value if isinstance(value, int) and abs(value) < _MOST_STEPS else -1
