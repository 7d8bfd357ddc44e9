"""Framework-written checkpoints: a directory per step."""

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
    prefix: str
    digits: int  # at least
    is_complete: Callable[[Path], bool]
    # Returns the Unix time at which an unmarked checkpoint, complete or not, was written. Raises OSError.
    last_change: Callable[[Path, bool], float]

    def in_directory(self, directory: Path) -> list[SavedCheckpoint]:
        present = []
        for path in directory.glob(f"{self.prefix}*"):
            step = self.step_of(path)
            if step is None:
                continue
            facts, complete = checkpoints.completion(path) or {}, self.is_complete(path)
            try:
                marked_at = envelope.read_time(facts["at"]) if "at" in facts else None
                at = marked_at or datetime.fromtimestamp(self.last_change(path, complete), timezone.utc)
            except (OSError, ValueError, TypeError):  # just removed, or the mark is damaged
                continue
            health = CheckpointHealth.from_json(facts.get("health"))
            present.append(SavedCheckpoint(step, at, path, complete, health))
        return sorted(present, key=lambda checkpoint: (checkpoint.step, checkpoint.at))

    def mark(self, checkpoint: Path, health: CheckpointHealth) -> None:
        at = envelope.write_time(envelope.utc_now())
        checkpoints.mark_complete(checkpoint, {"step": self.step_of(checkpoint), "at": at, "health": health.to_json()})

    def path_of(self, directory: Path, step: int) -> Path:
        return directory / f"{self.prefix}{step:0{self.digits}d}"

    def step_of(self, checkpoint: Path) -> int | None:
        match = re.fullmatch(rf"{self.prefix}(\d{{{self.digits},18}})", checkpoint.name)
        return None if match is None else int(match[1])
