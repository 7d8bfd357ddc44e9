"""Text, pace and faults of both demo trainings."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from trainmedic_server.demo.faults import FaultKind

SPOILED_BATCHES = 120  # with random labels, from one fault
EXPLODED_SECONDS = 15.0
_EXPLOSION = 500.0  # factor of the gradients
_STEP_SECONDS = 0.1


def training_text() -> str:
    """Return the source of Python's json package."""
    return "".join(path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py")))


class StepPace:
    def __init__(self) -> None:
        self._due = time.monotonic()

    def wait(self) -> None:
        """Sleep until the next step is due. Lost time is not made up for."""
        self._due = max(self._due + _STEP_SECONDS, time.monotonic())
        time.sleep(max(0.0, self._due - time.monotonic()))


class Explosion:
    """Factor of the gradients."""

    # It ends by time: a number of slow steps could outlast the playbook's wait.

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = clock()

    def begin(self) -> None:
        self._until = self._clock() + EXPLODED_SECONDS

    def factor(self) -> float:
        return _EXPLOSION if self._clock() < self._until else 1.0


class FaultFile:
    """File by which the demo asks a training for a fault."""

    def __init__(self, directory: Path, job: str) -> None:
        self._path = directory / f"{job}.fault"

    def write(self, kind: FaultKind) -> None:
        self._path.write_text(kind, encoding="utf-8")

    def take(self) -> FaultKind | None:
        """Return each fault once."""
        try:
            kind = FaultKind(self._path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # ValueError: it is just being written
            return None
        self._path.unlink()
        return kind
