"""Checkpoints on disk and in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping, Sequence

from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.torch.checkpoints.background_saves import BackgroundSaves
from trainmedic.torch.checkpoints.checkpoint_storage import CheckpointDirectory, CheckpointStorage
from trainmedic.torch.memory.memory_checkpoints import MemoryCheckpoints, is_in_memory
from trainmedic.torch.state_parts import StateParts


class TieredCheckpoints:
    """Both storages as one `CheckpointStorage`. `save` writes to disk."""

    def __init__(
        self, disk: CheckpointStorage, memory: MemoryCheckpoints, background: BackgroundSaves | None = None
    ) -> None:
        self.disk = disk
        self.memory = memory
        self.background = background
        self.directory: Path | None = disk.directory
        if isinstance(disk, CheckpointDirectory):
            disk.in_memory = memory.checkpoints

    def checkpoints(self) -> Sequence[SavedCheckpoint]:
        return [*self.disk.checkpoints(), *self.memory.checkpoints()]

    def save(self, step: int, parts: StateParts, run: Mapping[str, Any]) -> SavedCheckpoint:
        self._settle()
        return self.disk.save(step, parts, run)

    def load(self, checkpoint: SavedCheckpoint, parts: StateParts) -> Mapping[str, Any] | None:
        storage = self.memory if is_in_memory(checkpoint) else self.disk
        return storage.load(checkpoint, parts)

    def rolled_back_to(self, checkpoint: SavedCheckpoint, reason: Mapping[str, Any]) -> None:
        self._settle()
        self.memory.rolled_back_to(checkpoint, int(reason.get("left_step", checkpoint.step)))
        self.disk.rolled_back_to(checkpoint, reason)

    def prune(self) -> None:
        self._settle()
        self.disk.prune()

    def _settle(self) -> None:
        """Wait for background writes: their files are no leftovers."""
        if self.background is not None:
            self.background.settle()


def without_memory(storage: CheckpointStorage | None) -> CheckpointStorage | None:
    return storage.disk if isinstance(storage, TieredCheckpoints) else storage
