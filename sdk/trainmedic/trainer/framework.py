"""Interface of a framework that runs the training loop itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping, Protocol, Sequence

from trainmedic.recovery.checkpoints import SavedCheckpoint, healthy_first
from trainmedic.recovery.loop_restart import LoopRestart


class Framework(Protocol):
    """One training. Optional members have defaults."""

    # True if the batches are known only at the first one, which calls `TrainerLoop.compare_losses`.
    knows_batches_late: bool = False
    no_restart_because: str = ""  # reason to reject commands that need a restart
    no_skip_because: str = ""  # reason to reject rollbacks that skip batches
    writes: bool  # True on the rank that writes this package's files

    @property
    def directories(self) -> list[Path]:
        """Checkpoint directories; the first gets this package's files."""
        ...

    def all_checkpoints(self) -> list[SavedCheckpoint]: ...

    def is_complete(self, checkpoint: Path) -> bool: ...

    def step_of(self, checkpoint: Path) -> int: ...

    def restart_order(self, present: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
        return healthy_first(present)

    def abandoned_name(self, name: str, number: int) -> str:
        return f"abandoned-{number}-{name}"

    @property
    def accumulation(self) -> int: ...

    @property
    def data(self) -> str:
        """Description of the batches after the last restart, as in `BatchSource.restore`.

        Losses are compared only if it starts with `REPLAYED`.
        """
        ...

    @property
    def newly_skipped(self) -> int:
        """Batches skipped after the last restart's checkpoint."""
        ...

    def round_up_skip(self, batches: int) -> int:
        """Round up to what the framework can skip at once."""
        return batches

    def resume_from(self, step: int) -> None:
        """Make the framework resume from this step, on the writing rank. Raises OSError."""
        return

    def prepare(self, checkpoint: Path, restart: LoopRestart) -> None:
        """Prepare a restart from ``checkpoint``, on every rank."""
        return

    def outcome(self, restart: LoopRestart) -> Mapping[str, Any]:
        """Return further output for the command's answer."""
        return {}
