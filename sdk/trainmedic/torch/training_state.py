"""The state of a training, which all parts of a run share.

The restore, the checkpoint writer, the command handlers and the step boundary each read and change it, always on
the training thread. Not here: what any of them does, and the loop that the user writes (``run``). `attach` makes
it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Mapping

from trainmedic.client import Medic
from trainmedic.job.loss_log import LossLog
from trainmedic.job.reported_values import number
from trainmedic.recovery.batch_log import BatchLog
from trainmedic.recovery.changes import AppliedChanges
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.rollback_budget import RollbackBudget
from trainmedic.torch import randomness
from trainmedic.torch.accelerated_steps import AcceleratedSteps
from trainmedic.torch.carried_state import CarriedState
from trainmedic.torch.checkpoints.checkpoint_storage import CheckpointStorage, HalfLoaded, UnusableCheckpoint
from trainmedic.torch.global_batch import GlobalBatch, GlobalBatchLost, accumulation_to_go_on_with
from trainmedic.torch.learning_rate import LearningRate
from trainmedic.torch.memory.memory_checkpoints import NEVER, MemoryCheckpoints
from trainmedic.torch.rank_comparison import RankComparison
from trainmedic.torch.sources.batch_sources import BatchSource
from trainmedic.torch.sources.fetch_order import FetchOrder
from trainmedic.torch.state_parts import StateParts

log = logging.getLogger("trainmedic")

CARRIED_HINT = (
    "State that the loop carries did not go back, or it reports another number than the loss of the step: name the "
    "state with attach(also=...)"
)


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
    accelerated: AcceleratedSteps = field(default_factory=AcceleratedSteps)
    """Accelerate's part in the steps."""
    verifies: bool = True
    """Whether a state that was loaded is compared with the digests of what was saved."""
    memory: MemoryCheckpoints | None = None
    """The checkpoints in memory; None without them."""
    accumulates: bool = False
    """Whether the loop heeds ``Step.is_update``, so that it can accumulate as many batches as it is told."""
    keep_global_batch: bool | None = None
    """Whether a resume with another number of ranks keeps what makes an optimizer step: as far as it can (None);
    always, and it is refused where it cannot (True); or never (False)."""

    rank_comparison: RankComparison = field(init=False)
    """Whether the ranks still have the same weights."""
    script_accumulation: int = field(init=False)
    """Batches that make an optimizer step in the script, or in its place with another number of ranks; commands'
    factors apply to it."""
    given_accumulation: int = field(init=False)
    """What the script has asked for."""
    script_batch_size: int | None = field(init=False)
    """Samples that the script's loader puts into a batch; None where it is not known or cannot be changed."""
    script_workers: int | None = field(init=False)
    """Worker processes of the script's loader; None where they cannot be changed."""

    global_step: int = 0
    """Optimizer steps that were done; a rollback sets it back."""
    batches_done: int = 0
    """Batches of the present step that were done; fewer than ``accumulation``."""
    batch_log: BatchLog = field(default_factory=BatchLog)
    """The batches that were drawn."""
    loss_log: LossLog = field(default_factory=LossLog)
    """The losses of the steps after each checkpoint."""
    carried: CarriedState = field(default_factory=CarriedState)
    """State beside the parts that training carries from step to step."""
    carried_hint: str = CARRIED_HINT
    """What an answer advises where other losses come after a rollback."""
    losses: list[Any] = field(default_factory=list)
    """Their losses, where several batches make a step."""
    gradients: list[Any] = field(default_factory=list)
    """Norms of gradients in the present step, see ``gradient_samples``."""
    memory_due: int = NEVER
    """The step from which on a checkpoint in memory is due."""
    current_checkpoint: SavedCheckpoint | None = None
    """The checkpoint that holds the present state, where one was written or loaded and no step was done since."""
    rollbacks: int = 0
    """Rollbacks that this process has carried out."""
    fetch_order: FetchOrder = field(default_factory=FetchOrder)
    """Whether the loop takes its batches ahead."""
    stopping: bool = False
    """Whether the run was told to stop."""
    is_interruptible: bool = True
    """Whether a step that hangs may be broken off. Not where what is left of it cannot be cleared away."""
    was_interrupted: bool = False
    """Whether the step that the present boundary follows was interrupted, so that the state is not whole."""
    broken: HalfLoaded | None = None
    """Why training cannot go on: a checkpoint was loaded only in part. From then on nothing is saved."""

    def __post_init__(self) -> None:
        # An optimizer with an averager, PyTorch's ``PostLocalSGDOptimizer``, lets the ranks differ between averages.
        averages = any(hasattr(part, "averager") for part in self.parts.of_optimizers().values())
        self.rank_comparison = RankComparison(self.medic, ("model", "optimizer") if averages else ())
        self.script_accumulation = self.given_accumulation = self.accumulation
        self.script_batch_size = self.batch_source.batch_size if self.batch_source is not None else None
        self.script_workers = self.batch_source.workers if self.batch_source is not None else None

    @property
    def global_batch(self) -> GlobalBatch:
        """What makes one optimizer step, without what commands have changed."""
        ranks = self.medic.world_size
        return GlobalBatch(self.script_batch_size, self.script_accumulation, ranks, self.given_accumulation)

    def accumulation_after(self, kept: Mapping[str, Any] | None) -> int:
        """How many batches of the script's make a step after a resume from what a checkpoint holds. Raises
        GlobalBatchLost where the global batch has to be kept, and cannot."""
        then = GlobalBatch.of(kept.get("global_batch")) if kept is not None else None
        if then is None or self.keep_global_batch is False:
            return self.script_accumulation
        try:
            return accumulation_to_go_on_with(then, self.global_batch, self.accumulates)
        except GlobalBatchLost as error:
            if self.keep_global_batch:
                raise
            log.warning("%s: the global batch changes with the number of ranks: %s", self.medic.job, error)
            return self.script_accumulation

    def check_rank_count(self, kept: Mapping[str, Any]) -> None:
        """Raises UnusableCheckpoint where the global batch of a checkpoint of another number of ranks is lost."""
        if not self.keep_global_batch:
            return
        try:
            self.accumulation_after(kept)
        except GlobalBatchLost as error:
            raise UnusableCheckpoint(str(error)) from error

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds beside the parts. ``feed`` is the stored name of the batch source's state."""
        return {
            "v": 1,
            "step": self.global_step,
            "feed": self.batch_source.state() if self.batch_source is not None else None,
            "batches": {**self.batch_log.state(), "make": self.batch_make},
            "losses": {**self.loss_log.state(), "accumulation": self.accumulation},
            "carried": self.carried.take(),
            "random": randomness.capture(),
            "lr_scale": self.rate.scale,
            "follows_schedule": self.rate.schedule.is_followed,
            "changes": self.changes.state(),
            "loss": number(self.medic.progress.loss),
            "global_batch": self.global_batch.plain(),
        }

    def set_accumulation(self, batches: int) -> None:
        """Let so many batches make an optimizer step."""
        self.accumulation = batches
        self.accelerated.set_accumulation(batches)

    @property
    def batch_make(self) -> list[Any]:
        """What the same samples come in other batches for, or look otherwise, if a command changes it."""
        source = self.batch_source
        # Workers draw random numbers of their own, however many they are.
        return [] if source is None else [source.batch_size, bool(source.workers)]

    def reset_to(self, checkpoint: SavedCheckpoint) -> None:
        """Set the position after the parts were loaded from `checkpoint`."""
        self.drop_unfinished_step()
        self.global_step = self.medic.step = checkpoint.step
        self.current_checkpoint = checkpoint

    def drop_unfinished_step(self) -> None:
        """Forget the batches and gradients of a step that will not be completed."""
        self.batches_done = 0
        self.losses, self.gradients = [], []
        self.accelerated.begin_step()
        self.parts.forget_gradients()
