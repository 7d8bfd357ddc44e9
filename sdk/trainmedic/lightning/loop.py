"""A Lightning fit that is restarted: by a rollback, and after a crash.

In a restart ``trainer.fit`` is called again, with another checkpoint. `TrainerLoop` does the rest. The `Callback` calls
this module for commands, ``trainmedic.lightning`` to train.
"""

from __future__ import annotations

import functools
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
from trainmedic.trainer.held_modules import HeldModules
from trainmedic.trainer.held_state import PutBack
from trainmedic.trainer.loop import TrainerLoop

_SHARDING = ("DeepSpeed", "FSDP", "ModelParallel", "XLA")
_SHARDED = "the strategy keeps the parameters in shards of its own"


class LightningLoop(TrainerLoop):
    """One fit, from its first step to the last, restarts included."""

    abandoned_name = "{name}.abandoned-{number}"

    def __init__(self, trainer: Any, medic: Medic, limits: RestartLimits) -> None:
        super().__init__(medic, limits, writes=trainer.is_global_zero)
        self._trainer = trainer
        self.data = ResumableData(trainer, self.proof.before_draw)
        self._has_begun = False
        self._held: HeldModules | None = None
        self._put_back = PutBack()  # in the last restart
        self._keeps_batches = True
        self._begin_comparison: Callable[[], None] | None = None

    # --- around the fit ---------------------------------------------------------------------------------

    def fit(self, call: Callable[[Any], None], ckpt_path: Any, model: Any) -> None:
        """`call` is ``trainer.fit`` of ``model`` from the checkpoint that it is given. Raises what that raises."""
        self._held = HeldModules(model, batches_in_model=True)
        fit_loop = self._trainer.fit_loop
        least = (fit_loop.min_epochs, fit_loop.epoch_loop.min_steps)

        def attempt(restart: LoopRestart | None) -> None:
            fit_loop.min_epochs, fit_loop.epoch_loop.min_steps = least  # `end` has changed them
            self._kept = None
            start = ckpt_path if restart is None else str(self._prepare(restart))
            with self._attempting():
                call(start)

        try:
            self.restarts.run(attempt)
        finally:
            fit_loop.min_epochs, fit_loop.epoch_loop.min_steps = least

    def _prepare(self, restart: LoopRestart) -> Path:
        checkpoint = super()._prepare(restart)
        self._mark_saved(0)  # else the step that was saved last is not saved when the loop comes to it again
        self.data.prepare(restart.skip_batches)
        self._keeps_batches = not restart.skip_batches
        if self._held is not None:
            self._put_back = self._held.put_back(None)  # before the model's own hooks load what they have saved
        return checkpoint

    def _mark_saved(self, step: int) -> None:
        """Lightning's own callbacks do not save the same step twice."""
        for callback in self._trainer.checkpoint_callbacks:
            if hasattr(callback, "_last_global_step_saved"):
                callback._last_global_step_saved = step

    # --- what TrainerLoop asks --------------------------------------------------------------------------

    @property
    def directories(self) -> list[Path]:
        paths = [callback.dirpath for callback in self._trainer.checkpoint_callbacks]
        return [Path(path) for path in paths if path] or [directory_of(self._trainer)]

    def _all_checkpoints(self) -> list[SavedCheckpoint]:
        return checkpoints.in_directories(self.directories)

    def _is_complete(self, checkpoint: Path) -> bool:
        return checkpoints.is_complete(checkpoint)

    def _step_of(self, checkpoint: Path) -> int:
        return checkpoints.step_of(checkpoint) or 0

    def _skipped_batches(self) -> int:
        return self.data.to_be_skipped

    @property
    def _accumulation(self) -> int:
        return int(self._trainer.accumulate_grad_batches)

    @property
    def _data(self) -> str:
        return self.data.replayed

    def _finish(self, restart: LoopRestart) -> Mapping[str, Any]:
        told = super()._finish(restart)
        return {**told, "trainer_state": self._put_back.to_json()} if told and self._put_back.reset else told

    # --- called by the callback -------------------------------------------------------------------------

    def start_fit(self) -> None:
        """Take note that the fit begins. Lightning knows its directories now, and has written nothing there yet."""
        if not self._has_begun:
            self._has_begun = True
            if self._trainer.ckpt_path is None:
                self._start_fresh()

    def held(self) -> Mapping[str, Any]:
        """Return what this rank keeps in a checkpoint of the data that the model holds besides its weights."""
        return self._held.record() if self._held is not None else {}

    def load(
        self, kept: Mapping[str, Any], place: Mapping[str, Any] | None, held: Mapping[str, Any] | None = None
    ) -> None:
        """Take what the checkpoint has kept of this rank, when Lightning loads it."""
        self._kept = kept
        self.data.restore(place)
        if self._held is not None and held and self.restarts.starting is not None:
            self._put_back = self._put_back.followed_by(self._held.add(held, self._keeps_batches))

    def begins(self, step: int, modules: Modules, optimizers: Optimizers) -> None:
        if any(name in type(self._trainer.strategy).__name__ for name in _SHARDING):
            self.proof.not_comparable = _SHARDED
        if self.restarts.starting is None:
            self.proof.resumes(self._kept)
        else:
            self.proof.goes_back(self._kept, lambda: self.data.skipped)
        super().begins(step, modules, optimizers)

    def _compare_losses(self, *arguments: Any) -> None:
        # Which batches come is known once Lightning has made its iterator, which is later.
        self._begin_comparison = functools.partial(super()._compare_losses, *arguments)

    def draws(self) -> None:
        """Take note that a batch is about to be trained on."""
        self.data.count_skipped()
        if self._begin_comparison is not None:
            self._begin_comparison()
            self._begin_comparison = None
        why_not = "" if self._data.startswith(REPLAYED) else self._data
        for batch, before in self.data.take_drawn():
            self.proof.drawn(batch, self._trainer.current_epoch, before, why_not)

    def end(self) -> None:
        """Let the fit end at the next opportunity; the least numbers of steps and epochs do not count."""
        if self.restarts.is_asked:
            # What the loop holds is to be thrown away; saving it could delete the very checkpoint to go back to.
            self._mark_saved(self._trainer.global_step)
        self._trainer.fit_loop.min_epochs = 0
        self._trainer.fit_loop.epoch_loop.min_steps = None
        self._trainer.should_stop = True


def directory_of(trainer: Any) -> Path:
    """Where checkpoints go in a Trainer that has no ``ModelCheckpoint``."""
    return Path(trainer.default_root_dir) / "trainmedic"
