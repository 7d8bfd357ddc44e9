"""How rank 0 says how it goes: what the job writes (``trainmedic.job.status_file``), as the launcher reads it."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

from trainmedic.job.status_file import FILE_NAME
from trainmedic.launch.causes import Reached

_LARGEST = 4096
_ID = re.compile(r"[0-9a-f-]{36}\Z")


@dataclass(frozen=True)
class JobStatus:
    """What rank 0 has said last."""

    reached: Reached
    stalled_for: float
    """Seconds beyond the limit from which on its stall is a hang; 0 where it does not hang."""
    waiting: tuple[str, ...] = ()
    """The ids of the rollbacks that wait for its loop."""


class StatusReader:
    """Reads the status of one attempt. ``stalled_for`` goes on while the file does not change: a process that cannot
    even write it hangs all the more."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._raw = b""
        self._changed_at = 0.0

    def read(self) -> JobStatus | None:
        """None where rank 0 has said nothing, or not here."""
        try:
            with self._path.open("rb") as file:
                raw = file.read(_LARGEST)
            fields = json.loads(raw)
            reached = Reached(_whole(fields["step"]), _whole(fields["checkpoint"]))
            stall, limit, is_over = float(fields["stall"]), float(fields["limit"]), bool(fields["over"])
            waiting = tuple(each for each in fields.get("waiting", ()) if isinstance(each, str) and _ID.match(each))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        now = time.monotonic()
        if raw != self._raw:
            self._raw, self._changed_at = raw, now
        excess = stall + (now - self._changed_at) - limit
        return JobStatus(reached, 0.0 if is_over else max(excess, 0.0), waiting)


def _whole(value: object) -> int:
    return value if isinstance(value, int) else -1
