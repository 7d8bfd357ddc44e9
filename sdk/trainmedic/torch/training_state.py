"""State of a training. Training thread only."""

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
from trainmedic.torch.global_batch import GlobalBatch, GlobalBatchLost, accumulation_to_continue_with
from trainmedic.torch.learning_rate import LearningRate
from trainmedic.torch.memory.memory_checkpoints import NEVER, MemoryCheckpoints
from trainmedic.torch.rank_comparison import RankComparison
from trainmedic.torch.sources.batch_sources import BatchSource
from trainmedic.torch.sources.fetch_order import FetchOrder
from trainmedic.torch.state_parts import StateParts

log = logging.getLogger("trainmedic")

CARRIED_HINT = (
    "State that the loop carries was not restored, or the reported number is not the step's loss: name the state "
    "with attach(also=...)"
)


# With slots: each step accesses it with cold CPU caches.
@dataclass(slots=True, eq=False)
class TrainingState:
    medic: Medic
    parts: StateParts
    rate: LearningRate
    batch_source: BatchSource | None  # None if the loop reads its data
    storage: CheckpointStorage | None  # None without checkpoints and rollbacks
    budget: RollbackBudget
    changes: AppliedChanges
    accumulation: int  # batches per optimizer step, with changes by commands
    accelerated: AcceleratedSteps = field(default_factory=AcceleratedSteps)
    verifies: bool = True  # True to compare loaded states with the saved digests
    memory: MemoryCheckpoints | None = None  # None without in-memory checkpoints
    accumulates: bool = False  # True if the loop heeds ``Step.is_update``
    keep_global_batch: bool | None = None  # see `attach`

    rank_comparison: RankComparison = field(init=False)
    # Batches per optimizer step without commands, adapted to the number of ranks.
    script_accumulation: int = field(init=False)
    given_accumulation: int = field(init=False)  # accumulation that the script asked for
    script_batch_size: int | None = field(init=False)  # None if unknown or fixed
    script_workers: int | None = field(init=False)  # None if fixed

    global_step: int = 0  # completed optimizer steps; a rollback decreases it
    batches_done: int = 0  # batches of the present step
    batch_log: BatchLog = field(default_factory=BatchLog)
    loss_log: LossLog = field(default_factory=LossLog)  # losses of the steps after each checkpoint
    carried: CarriedState = field(default_factory=CarriedState)
    carried_hint: str = CARRIED_HINT
    losses: list[Any] = field(default_factory=list)  # losses of the present step's batches
    gradients: list[Any] = field(default_factory=list)  # the present step's `GradientSamples`
    memory_due: int = NEVER  # step of the next in-memory checkpoint
    current_checkpoint: SavedCheckpoint | None = None  # the checkpoint of the present state, until the next step
    rollbacks: int = 0  # in this process
    fetch_order: FetchOrder = field(default_factory=FetchOrder)
    # Epoch of a loop that asks for the batches of one epoch at a time, without `Run.epochs`; else None.
    lone_epoch: int | None = None
    stopping: bool = False  # see `Run.stopping`
    is_interruptible: bool = True  # False if an interrupted step's partial results cannot be discarded
    was_interrupted: bool = False  # True if the last step was interrupted, so that the state is incomplete
    broken: HalfLoaded | None = None  # the error of a partial load, after which nothing is saved

    def __post_init__(self) -> None:
        # With an averager (``PostLocalSGDOptimizer``) the ranks differ between averages.
        averages = any(hasattr(part, "averager") for part in self.parts.optimizer_parts().values())
        self.rank_comparison = RankComparison(self.medic, ("model", "optimizer") if averages else ())
        self.script_accumulation = self.given_accumulation = self.accumulation
        self.script_batch_size = self.batch_source.batch_size if self.batch_source is not None else None
        self.script_workers = self.batch_source.workers if self.batch_source is not None else None

    @property
    def global_batch(self) -> GlobalBatch:
        ranks = self.medic.world_size
        return GlobalBatch(self.script_batch_size, self.script_accumulation, ranks, self.given_accumulation)

    def accumulation_after(self, run_state: Mapping[str, Any] | None) -> int:
        """Return `script_accumulation` after a resume. Raises GlobalBatchLost."""
        then = GlobalBatch.from_plain(run_state.get("global_batch")) if run_state is not None else None
        if then is None or self.keep_global_batch is False:
            return self.script_accumulation
        try:
            return accumulation_to_continue_with(then, self.global_batch, self.accumulates)
        except GlobalBatchLost as error:
            if self.keep_global_batch:
                raise
            log.warning("%s: the global batch changes: %s", self.medic.job, error)
            return self.script_accumulation

    def check_rank_count(self, run_state: Mapping[str, Any]) -> None:
        """Raise UnusableCheckpoint if the global batch must be kept but cannot."""
        if not self.keep_global_batch:
            return
        try:
            self.accumulation_after(run_state)
        except GlobalBatchLost as error:
            raise UnusableCheckpoint(str(error)) from error

    def state_dict(self) -> dict[str, Any]:
        return {
            "v": 1,
            "step": self.global_step,
            "feed": self.batch_source.state() if self.batch_source is not None else None,
            "batches": {**self.batch_log.state(), "make": self.batch_form},
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
        self.accumulation = batches
        self.accelerated.set_accumulation(batches)

    @property
    def batch_form(self) -> list[Any]:
        """Settings that change the batches: size, and whether there are workers."""
        source = self.batch_source
        # Workers draw their own random numbers, which do not depend on the number of workers.
        return [] if source is None else [source.batch_size, bool(source.workers)]

    def reset_to(self, checkpoint: SavedCheckpoint) -> None:
        self.drop_unfinished_step()
        self.global_step = self.medic.step = checkpoint.step
        self.current_checkpoint = checkpoint

    def drop_unfinished_step(self) -> None:
        self.batches_done = 0
        self.losses, self.gradients = [], []
        self.accelerated.restart_accumulation()
        self.parts.discard_gradients()
