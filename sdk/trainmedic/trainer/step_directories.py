"""Checkpoints that a framework writes by itself: a directory for each step, which is in its name.

Not here: which of them a rollback means (``recovery.choice``), writing and loading one, which the framework does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Callable

from trainmedic.recovery import checkpoints
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.health import CheckpointHealth
from trainmedic.wire import envelope


@dataclass(frozen=True)
class StepDirectories:
    """How the checkpoints of one framework lie on the disk."""

    prefix: str
    """What stands before the step in a name."""
    digits: int
    """The least number of digits of a step."""
    is_complete: Callable[[Path], bool]
    """Whether the framework can go on from a checkpoint."""
    last_change: Callable[[Path, bool], float]
    """When a checkpoint without a mark was written, as a Unix time; and whether it is complete. Raises OSError."""

    def in_directory(self, directory: Path) -> list[SavedCheckpoint]:
        """All checkpoints, half-written ones too, oldest step first. A directory that is not there holds none."""
        present = []
        for path in directory.glob(f"{self.prefix}*"):
            step = self.step_of(path)
            if step is None:
                continue
            facts, complete = checkpoints.completion(path) or {}, self.is_complete(path)
            try:
                marked_at = envelope.read_time(facts["at"]) if "at" in facts else None
                at = marked_at or datetime.fromtimestamp(self.last_change(path, complete), timezone.utc)
            except (OSError, ValueError, TypeError):  # it was removed just now, or its mark is damaged
                continue
            health = CheckpointHealth.from_json(facts.get("health"))
            present.append(SavedCheckpoint(step, at, path, complete, health))
        return sorted(present, key=lambda checkpoint: (checkpoint.step, checkpoint.at))

    def mark(self, checkpoint: Path, health: CheckpointHealth) -> None:
        """Note when it was whole, and what it is to be judged by. Raises OSError."""
        at = envelope.write_time(envelope.utc_now())
        checkpoints.mark_complete(checkpoint, {"step": self.step_of(checkpoint), "at": at, "health": health.to_json()})

    def path_of(self, directory: Path, step: int) -> Path:
        return directory / f"{self.prefix}{step:0{self.digits}d}"

    def step_of(self, checkpoint: Path) -> int | None:
        """The step by its name; None where it is no checkpoint of a step."""
        match = re.fullmatch(rf"{self.prefix}(\d{{{self.digits},18}})", checkpoint.name)
        return None if match is None else int(match[1])
