from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Mapping

from trainmedic.client import Medic
from trainmedic.lightning import checkpoints
from trainmedic.lightning.resumable_data import ResumableData
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.loop_restart import LoopRestart
from trainmedic.recovery.restarts import RestartLimits
from trainmedic.torch.checkpoints.digests import Modules, Optimizers
from trainmedic.torch.sources.batch_sources import REPLAYED
from trainmedic.trainer.framework import Framework
from trainmedic.trainer.held_modules import HeldModules
from trainmedic.trainer.held_state import PutBack
from trainmedic.trainer.loop import TrainerLoop

_SHARDING = ("DeepSpeed", "FSDP", "ModelParallel", "XLA")
_SHARDED = "the strategy keeps the parameters in shards of its own"


class LightningFramework(Framework):
    knows_batches_late = True  # batches are known once Lightning has made its iterator

    def __init__(self, trainer: Any, medic: Medic, limits: RestartLimits) -> None:
        self.writes = trainer.is_global_zero
        self.loop = TrainerLoop(medic, self, limits)
        self._trainer = trainer
        self.resumable = ResumableData(trainer, self.loop.proof.before_draw)
        self._has_begun = False  # True from the first loop on
        self._held: HeldModules | None = None  # None before `fit`
        self._put_back = PutBack()  # state restored by the last restart
        self._keeps_batches = True  # the last restart skips none

    def fit(self, call: Callable[[Any], None], ckpt_path: Any, model: Any) -> None:
        self._held = HeldModules(model, batches_in_model=True)
        fit_loop = self._trainer.fit_loop
        minima = (fit_loop.min_epochs, fit_loop.epoch_loop.min_steps)

        def attempt(restart: LoopRestart | None) -> None:
            fit_loop.min_epochs, fit_loop.epoch_loop.min_steps = minima  # `end` changed them
            self.loop.record = None
            start = ckpt_path if restart is None else str(self.loop.prepare(restart))
            with self.loop.attempting():
                call(start)

        try:
            self.loop.restarts.run(attempt)
        finally:
            fit_loop.min_epochs, fit_loop.epoch_loop.min_steps = minima

    def prepare(self, checkpoint: Path, restart: LoopRestart) -> None:
        self._set_last_saved_step(0)  # else the step saved last would not be saved again
        self.resumable.prepare(restart.skip_batches)
        self._keeps_batches = not restart.skip_batches
        if self._held is not None:
            self._put_back = self._held.put_back(None)  # before the model's own hooks load their state

    def _set_last_saved_step(self, step: int) -> None:
        for callback in self._trainer.checkpoint_callbacks:
            if hasattr(callback, "_last_global_step_saved"):
                callback._last_global_step_saved = step

    @property
    def directories(self) -> list[Path]:
        paths = [callback.dirpath for callback in self._trainer.checkpoint_callbacks]
        return [Path(path) for path in paths if path] or [directory_of(self._trainer)]

    def all_checkpoints(self) -> list[SavedCheckpoint]:
        return checkpoints.in_directories(self.directories)

    def is_complete(self, checkpoint: Path) -> bool:
        return checkpoints.is_complete(checkpoint)

    def step_of(self, checkpoint: Path) -> int:
        return checkpoints.step_of(checkpoint) or 0

    def abandoned_name(self, name: str, number: int) -> str:
        return f"{name}.abandoned-{number}"

    @property
    def newly_skipped(self) -> int:
        return self.resumable.to_be_skipped

    @property
    def accumulation(self) -> int:
        return int(self._trainer.accumulate_grad_batches)

    @property
    def data(self) -> str:
        return self.resumable.replayed

    def outcome(self, restart: LoopRestart) -> Mapping[str, Any]:
        return {"trainer_state": self._put_back.to_json()} if restart.is_rollback and self._put_back.reset else {}

    def start_fit(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            if self._trainer.ckpt_path is None:
                self.loop.start_fresh()

    def held(self) -> Mapping[str, Any]:
        return self._held.record() if self._held is not None else {}

    def load(
        self, record: Mapping[str, Any], position: Mapping[str, Any] | None, held: Mapping[str, Any] | None = None
    ) -> None:
        self.loop.record = record
        self.resumable.restore(position)
        if self._held is not None and held and self.loop.restarts.starting is not None:
            self._put_back = self._put_back.followed_by(self._held.add(held, self._keeps_batches))

    def begins(self, step: int, modules: Modules, optimizers: Optimizers) -> None:
        if any(name in type(self._trainer.strategy).__name__ for name in _SHARDING):
            self.loop.proof.not_comparable = _SHARDED
        if self.loop.restarts.starting is None:
            self.loop.proof.restore_batches(self.loop.record)
        else:
            self.loop.proof.expect_return(self.loop.record, lambda: self.resumable.skipped)
        self.loop.begins(step, modules, optimizers)

    def batch_begins(self) -> None:
        self.resumable.count_skipped()
        self.loop.compare_losses()
        why_not = "" if self.data.startswith(REPLAYED) else self.data
        for batch, before in self.resumable.take_drawn():
            self.loop.proof.drawn(batch, self._trainer.current_epoch, before, why_not)

    def end(self) -> None:
        if self.loop.restarts.is_requested:
            # Saving discarded state could delete the checkpoint to go back to.
            self._set_last_saved_step(self._trainer.global_step)
        self._trainer.fit_loop.min_epochs = 0
        self._trainer.fit_loop.epoch_loop.min_steps = None
        self._trainer.should_stop = True


def directory_of(trainer: Any) -> Path:
    return Path(trainer.default_root_dir) / "trainmedic"
