"""The state of a training, which all parts of a run share.

The restore, the checkpoint writer, the command handlers and the step boundary each read and change it, always on
the training thread. Not here: what any of them does, and the loop that the user writes (``run``). `attach` makes
it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainmedic.client import Medic
from trainmedic.job.progress import number
from trainmedic.recovery.changes import AppliedChanges
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.rollback_budget import RollbackBudget
from trainmedic.torch import randomness
from trainmedic.torch.batch_sources import BatchSource
from trainmedic.torch.checkpoint_storage import CheckpointStorage, HalfLoaded
from trainmedic.torch.learning_rate import LearningRate
from trainmedic.torch.state_parts import StateParts


# With slots, since each step reads and writes it with caches that the step's own work has emptied.
@dataclass(slots=True, eq=False)
class TrainingState:
    """The parts of a training, where its data and checkpoints are kept, and its position."""

    medic: Medic
    parts: StateParts
    """What a checkpoint holds: the model, the optimizer and so on."""
    rate: LearningRate
    batch_source: BatchSource | None
    """Where the batches come from; None where the loop reads its data by itself."""
    storage: CheckpointStorage | None
    """Where checkpoints are kept; None where there are none, and so no rollback."""
    budget: RollbackBudget
    changes: AppliedChanges
    accumulation: int
    """Batches that make an optimizer step; at first as the script has it, then as commands have changed it."""

    script_accumulation: int = field(init=False)
    """Batches that make an optimizer step in the script; commands' factors apply to it."""
    script_batch_size: int | None = field(init=False)
    """Samples that the script's loader puts into a batch; None where it is not known or cannot be changed."""
    script_workers: int | None = field(init=False)
    """Worker processes of the script's loader; None where they cannot be changed."""

    global_step: int = 0
    """Optimizer steps that were done; a rollback sets it back."""
    batches_done: int = 0
    """Batches of the present step that were done; fewer than ``accumulation``."""
    losses: list[Any] = field(default_factory=list)
    """Their losses, where several batches make a step."""
    current_checkpoint: SavedCheckpoint | None = None
    """The checkpoint that holds the present state, where one was written or loaded and no step was done since."""
    rollbacks: int = 0
    """Rollbacks that this process has carried out."""
    stopping: bool = False
    """Whether the run was told to stop."""
    was_interrupted: bool = False
    """Whether the step that the present boundary follows was interrupted, so that the state is not whole."""
    broken: HalfLoaded | None = None
    """Why training cannot go on: a checkpoint was loaded only in part. From then on nothing is saved."""

    def __post_init__(self) -> None:
        self.script_accumulation = self.accumulation
        self.script_batch_size = self.batch_source.batch_size if self.batch_source is not None else None
        self.script_workers = self.batch_source.workers if self.batch_source is not None else None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds beside the parts. ``feed`` is the stored name of the batch source's state."""
        return {
            "v": 1,
            "step": self.global_step,
            "feed": self.batch_source.state() if self.batch_source is not None else None,
            "random": randomness.capture(),
            "lr_scale": self.rate.scale,
            "changes": self.changes.state(),
            "loss": number(self.medic.progress.loss),
        }

    def reset_to(self, checkpoint: SavedCheckpoint) -> None:
        """Set the position after the parts were loaded from `checkpoint`."""
        self.drop_unfinished_step()
        self.global_step = self.medic.step = checkpoint.step
        self.current_checkpoint = checkpoint

    def drop_unfinished_step(self) -> None:
        """Forget the batches and gradients of a step that will not be completed."""
        self.batches_done = 0
        self.losses = []
        self.parts.forget_gradients()
