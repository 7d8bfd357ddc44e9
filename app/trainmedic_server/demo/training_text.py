"""Text and faults that both trainings of the demo share."""

from __future__ import annotations

import json
from pathlib import Path

from trainmedic_server.demo.faults import FaultKind

SPOILED_BATCHES, EXPLODED_STEPS = 120, 150
EXPLOSION = 500.0


def text() -> str:
    """Return the source of Python's json package."""
    return "".join(path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py")))


class FaultFile:
    """File by which the demo asks a training for a fault."""

    def __init__(self, directory: Path, job: str) -> None:
        self._path = directory / f"{job}.fault"

    def write(self, kind: FaultKind) -> None:
        self._path.write_text(kind, encoding="utf-8")

    def take(self) -> FaultKind | None:
        try:
            kind = FaultKind(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError:  # it is just being written
            return None
        self._path.unlink()
        return kind
