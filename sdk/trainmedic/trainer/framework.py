"""Interface of a framework that runs the training loop itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping, Protocol, Sequence

from trainmedic.recovery.checkpoints import SavedCheckpoint, healthy_first
from trainmedic.recovery.loop_restart import LoopRestart


class Framework(Protocol):
    """Optional members have defaults."""

    reads_late: bool = False
    """True if the batches are known only at the first one, which calls `TrainerLoop.compare_losses`."""
    no_restart_because: str = ""
    no_skip_because: str = ""
    writes: bool

    @property
    def directories(self) -> list[Path]:
        """Checkpoint directories; the first gets this package's files."""
        ...

    def all_checkpoints(self) -> list[SavedCheckpoint]: ...

    def is_complete(self, checkpoint: Path) -> bool: ...

    def step_of(self, checkpoint: Path) -> int: ...

    def restart_order(self, present: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
        """Return the complete ones in order of preference."""
        return healthy_first(present)

    def abandoned(self, name: str, number: int) -> str:
        return f"abandoned-{number}-{name}"

    @property
    def accumulation(self) -> int: ...

    @property
    def data(self) -> str:
        """Description of the batches after the last restart, as in `BatchSource.restore`."""
        ...

    @property
    def newly_skipped(self) -> int: ...

    def whole_skip(self, batches: int) -> int:
        """Round up to what the framework can skip at once."""
        return batches

    def goes_back_to(self, step: int) -> None:
        """Make the framework resume from this step, on the writing rank. Raises OSError."""
        return

    def prepare(self, checkpoint: Path, restart: LoopRestart) -> None:
        return

    def outcome(self, restart: LoopRestart) -> Mapping[str, Any]:
        return {}
