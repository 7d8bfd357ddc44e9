"""A torchtitan training that goes back to a checkpoint within its processes.

``Trainer.train()`` begins with loading a checkpoint, and keeps its data iterator in a local name. So for a rollback it
is ended by an exception, from the method that it calls between two steps, and called again with the checkpoint to go
back to; everything is loaded by torchtitan's own checkpoint manager, the place in the data included. What is to be
left out of the data is drawn then, and dropped. Everything happens on all ranks at the same step.

Not here: what is called at which point of a step (``callback``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Iterator

from trainmedic.client import Medic
from trainmedic.recovery import left_out
from trainmedic.recovery.checkpoints import SavedCheckpoint, keep, kept
from trainmedic.recovery.health import CheckpointHealth
from trainmedic.recovery.loop_restart import LoopEnds, LoopRestart
from trainmedic.recovery.restarts import RestartLimits
from trainmedic.torch.checkpoints.digests import Modules, Optimizers
from trainmedic.torch.sources.batch_sources import REPLAYED
from trainmedic.torchtitan import checkpoints
from trainmedic.trainer.carried_files import CarriedFiles
from trainmedic.trainer.self_saving import SelfSavingLoop

_CALLED = ("_should_save", "maybe_wait_for_saving", "maybe_wait_for_staging", "exclude_from_loading", "interval")


class TitanLoop(SelfSavingLoop):
    """One training, from its first step to the last, rollbacks included. ``trainer`` is torchtitan's."""

    # Torchtitan takes whatever has "step-" and a number in its name for a checkpoint.
    abandoned_name = "abandoned-{number}-of-{name}"

    def __init__(self, medic: Medic, trainer: Any, limits: RestartLimits, carried: CarriedFiles) -> None:
        super().__init__(medic, limits, carried)
        self._trainer = trainer
        self._checkpointer = trainer.checkpointer
        self._drawn = 0  # batches of this rank since training began, those that were left out included
        self._left_out: left_out.Ranges = []  # by their number, from 0
        self._left_out_before: left_out.Ranges = []  # in the course that a rollback has ended
        self._dropped = self._dropped_newly = 0  # since the loop began
        self.no_restart_because = _no_restart(self._checkpointer)

    # --- around train() ---------------------------------------------------------------------------------

    def train(self, call: Callable[[], Any]) -> Any:
        """`call` the trainer's ``train()``, again after each rollback. Returns what it returns."""

        def attempt(restart: LoopRestart | None) -> Any:
            self._dropped = self._dropped_newly = 0
            if restart is None:
                return self._call(call)
            self._checkpointer.maybe_wait_for_saving()  # else it would write what is being put aside
            checkpoint = self._prepare(restart)
            options, excluded = self._trainer.config.checkpoint, self._checkpointer.exclude_from_loading
            load_step, options.load_step = options.load_step, self._step_of(checkpoint)
            self._checkpointer.exclude_from_loading = []
            try:
                return self._call(call)
            finally:
                options.load_step, self._checkpointer.exclude_from_loading = load_step, excluded

        return self.restarts.run(attempt)

    def _call(self, call: Callable[[], Any]) -> Any:
        with self._attempting():
            try:
                result = call()
            except LoopEnds:
                result = None
            self.ends()
            return result

    def _abandoned(self, name: str, number: int) -> str:
        return super()._abandoned(name.replace("step-", ""), number)

    # --- what TrainerLoop asks --------------------------------------------------------------------------

    @property
    def directories(self) -> list[Path]:
        return [Path(getattr(self._checkpointer, "folder", self._trainer.config.dump_folder))]

    def _all_checkpoints(self) -> list[SavedCheckpoint]:
        return checkpoints.in_directory(self.directories[0])

    def _is_complete(self, checkpoint: Path) -> bool:
        return checkpoints.is_complete(checkpoint)

    def _step_of(self, checkpoint: Path) -> int:
        return checkpoints.step_of(checkpoint) or 0

    def _skipped_batches(self) -> int:
        return self._dropped

    @property
    def _accumulation(self) -> int:
        trainer = self._trainer
        return int(trainer.gradient_accumulation_steps * getattr(trainer, "num_pipeline_parallel_microbatches", 1))

    @property
    def _data(self) -> str:
        return REPLAYED

    # --- called by the callback -------------------------------------------------------------------------

    def start_fit(self) -> None:
        """Take note that the training begins in this process."""
        self.carried.begin(self._trainer.model_parts, getattr(self._trainer, "dataloader", None))
        if self._trainer.step == 0 and not self.no_restart_because:
            self._start_fresh()
            if self._writes:
                left_out.forget(self.directories[0])

    def recall(self) -> None:
        """What rollbacks have left out before this process."""
        self._left_out = self._recalled_left_out()

    def begins(self, step: int, modules: Modules, optimizers: Optimizers) -> None:
        restart = self.restarts.starting
        self._kept = kept(self._path(step), self._medic.rank) if step else None
        self._drawn = (self._kept or {}).get("drawn", step * self._accumulation)
        self._left_out_before = self._left_out
        if restart is None:
            self.proof.resumes(self._kept)
        else:
            self._leave_out(restart.skip_batches)
            self.proof.goes_back(self._kept, lambda: self._dropped_newly)
        if step:
            self._put_back_carried(self._path(step))
        super().begins(step, modules, optimizers)

    def _leave_out(self, batches: int) -> None:
        """Leave out so many of the batches that come next; those that are left out already count."""
        if batches:
            self._left_out = [*self._left_out, (self._drawn, self._drawn + batches)]
            if self._writes:
                left_out.write(self.directories[0], self._left_out)

    def to_train_on(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches without those that are left out."""
        for batch in batches:
            number, self._drawn = self._drawn, self._drawn + 1
            if left_out.contains(self._left_out, number):
                self._dropped += 1
                self._dropped_newly += not left_out.contains(self._left_out_before, number)
            else:
                yield batch

    def saves(self, step: int, is_last: bool) -> bool:
        """Whether torchtitan writes a checkpoint now that one can go back to."""
        if self.no_restart_because or (is_last and self._checkpointer.last_save_model_only):
            return False
        return bool(self._checkpointer._should_save(step, is_last))

    def keep(self, step: int, modules: Modules, optimizers: Optimizers) -> None:
        """Every rank keeps in the checkpoint of this step what it will compare with. Raises OSError."""
        path = self._path(step)
        path.mkdir(parents=True, exist_ok=True)
        self.carried.save(path)
        keep(path, self._medic.rank, {**self.proof.kept(step, modules, optimizers), "drawn": self._drawn})

    def has_saved(self, step: int) -> bool:
        """Whether the checkpoint of that step is whole, as seen from here."""
        future = getattr(self._checkpointer, "save_future", None)
        return (future is None or future.done()) and checkpoints.is_complete(self._path(step))

    def mark(self, step: int, health: CheckpointHealth) -> None:
        """Note on the checkpoint of that step, which is whole, what it is to be judged by."""
        if self._writes:
            checkpoints.mark(self._path(step), health)

    def _path(self, step: int) -> Path:
        return checkpoints.path_of(self.directories[0], step)


def _no_restart(checkpointer: Any) -> str:
    """Why a training with this checkpoint manager cannot go back; empty where it can."""
    if not checkpointer.enable:
        return "there are no checkpoints: --checkpoint.enable"
    if any(not hasattr(checkpointer, name) for name in _CALLED):
        return f"how a {type(checkpointer).__name__} keeps its checkpoints is not known; use CheckpointManager"
    if checkpointer.load_only:
        return "no checkpoints are written: --checkpoint.load_only"
    if "://" in checkpointer.folder:
        return f"the checkpoints are not in a file system: {checkpointer.folder}"
    return ""
