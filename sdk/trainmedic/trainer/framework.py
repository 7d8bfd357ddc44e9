"""What Trainmedic asks of a framework that runs the training loop itself.

A framework is one class that implements `Framework`, and what it puts around the framework's own functions. It holds a
`TrainerLoop`, which restarts the loop, and an `Attachment`, which carries out commands between two steps; both are the
same for every framework, and no framework derives from them. What is optional here has a default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping, Protocol, Sequence

from trainmedic.recovery.checkpoints import SavedCheckpoint, healthy_first
from trainmedic.recovery.loop_restart import LoopRestart


class Framework(Protocol):
    """One training by the framework: its checkpoints, its place in the data, and what a restart changes of it."""

    reads_late: bool = False
    """Whether it is known only at the first batch which batches come, so that losses are compared from there on:
    `TrainerLoop.compare_losses` is called then."""
    no_restart_because: str = ""
    """Why this training cannot be restarted at all; empty where it can."""
    no_skip_because: str = ""
    """Why a rollback cannot leave out batches; empty where it can."""
    writes: bool
    """Whether this is the one rank that changes what is in the directories of the checkpoints."""

    # --- checkpoints --------------------------------------------------------------------------------------

    @property
    def directories(self) -> list[Path]:
        """The directories of the checkpoints. The first one gets those that commands ask for, and this package's
        files."""
        ...

    def all_checkpoints(self) -> list[SavedCheckpoint]:
        """Every checkpoint in the directories, foreign and half-written ones too, by ascending step."""
        ...

    def is_complete(self, checkpoint: Path) -> bool:
        """Whether the loop can start from it."""
        ...

    def step_of(self, checkpoint: Path) -> int:
        """The step at which it was written."""
        ...

    def restart_order(self, present: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
        """The complete ones in the order in which a crash goes on from them."""
        return healthy_first(present)

    def abandoned(self, name: str, number: int) -> str:
        """The new name of a checkpoint that is put aside. It is like no checkpoint's of the framework."""
        return f"abandoned-{number}-{name}"

    # --- the data -----------------------------------------------------------------------------------------

    @property
    def accumulation(self) -> int:
        """How many batches make a step."""
        ...

    @property
    def data(self) -> str:
        """Which batches come after the last restart, for the answer; as `BatchSource.restore` says it."""
        ...

    @property
    def newly_skipped(self) -> int:
        """How many batches were left out since the last restart."""
        ...

    # --- a restart ----------------------------------------------------------------------------------------

    def goes_back_to(self, step: int) -> None:
        """On the rank that writes: the framework itself goes on from this step, when the job is started again. Later
        checkpoints are put aside after that. Raises OSError."""
        return

    def prepare(self, checkpoint: Path, restart: LoopRestart) -> None:
        """On every rank, before the loop starts from `checkpoint`: apply what the restart changes. Raises OSError."""
        return

    def outcome(self, restart: LoopRestart) -> Mapping[str, Any]:
        """What the answer says in addition, now that the loop has done its first step after the restart."""
        return {}
