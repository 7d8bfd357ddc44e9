"""A Lightning fit that is restarted: by a rollback, and after a crash.

Here is what a restart means for Lightning: ``trainer.fit`` once more, from another checkpoint. When to restart is
`trainmedic.recovery.restarts`'s business. Who calls it: the `callback` for commands, ``trainmedic.lightning`` to train.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Callable, Mapping

from trainmedic.client import Medic
from trainmedic.errors import Rejected
from trainmedic.job.command import JobCommand
from trainmedic.job.parameters import Rollback
from trainmedic.lightning import checkpoints
from trainmedic.lightning.resumable_loader import ResumableLoader
from trainmedic.recovery.checkpoints import SavedCheckpoint, choose, newest_first
from trainmedic.recovery.restarts import LoopRestart, LoopRestarter, RestartLimits, agree_on_checkpoint
from trainmedic.recovery.rollback_budget import RollbackBudget

log = logging.getLogger("trainmedic")


class LightningLoop:
    """One fit, from its first step to the last, restarts included. ``replay`` where there is one."""

    def __init__(self, trainer: Any, medic: Medic, limits: RestartLimits, replay: ResumableLoader | None) -> None:
        self._trainer = trainer
        self._medic = medic
        self._limits = limits
        self.replay = replay
        self._step = 0
        self.restarts = LoopRestarter(medic, self._newest, self._target, limits)
        self._budget: RollbackBudget | None = None
        # What an earlier training has left there, by path and time: nothing goes back to that. None: not begun yet.
        self._foreign: frozenset[tuple[Any, Any]] | None = None

    # --- around the fit ---------------------------------------------------------------------------------

    def fit(self, call: Callable[[Any], None], ckpt_path: Any) -> None:
        """`call` is ``trainer.fit`` from the checkpoint that it is given. Raises what that raises."""
        fit_loop = self._trainer.fit_loop
        least = (fit_loop.min_epochs, fit_loop.epoch_loop.min_steps)

        def attempt(restart: LoopRestart | None) -> None:
            fit_loop.min_epochs, fit_loop.epoch_loop.min_steps = least
            if restart is not None:
                self._prepare(restart)
            call(ckpt_path if restart is None else str(restart.checkpoint))

        try:
            self.restarts.run(attempt)
        finally:
            fit_loop.min_epochs, fit_loop.epoch_loop.min_steps = least

    def _prepare(self, restart: LoopRestart) -> None:
        self.restarts.together().poll()  # until then some rank may still be writing
        if not checkpoints.is_complete(restart.checkpoint):
            raise FileNotFoundError(f"{restart.checkpoint} is not there any more, or not whole")
        if self._trainer.is_global_zero:
            aside = checkpoints.put_aside(self.directories(), checkpoints.step_of(restart.checkpoint) or 0)
            if aside:
                log.warning("%s: put aside as %s", self._medic.job, ", ".join(aside))
        self._mark_saved(0)  # else the step that was saved last is not saved when the loop comes to it again
        log.warning("%s: the training loop starts again from %s", self._medic.job, restart.checkpoint)
        if self.replay is not None:
            self.replay.to_leave_out, self.replay.left_out = restart.skip_batches, 0

    def _mark_saved(self, step: int) -> None:
        """Lightning's own callbacks do not save the same step twice."""
        for callback in self._trainer.checkpoint_callbacks:
            if hasattr(callback, "_last_global_step_saved"):
                callback._last_global_step_saved = step

    def _newest(self) -> Path | None:
        complete = newest_first(self._found())
        return complete[0].path if complete else None

    def _found(self) -> list[SavedCheckpoint]:
        return [one for one in checkpoints.found(self.directories()) if (one.path, one.at) not in (self._foreign or ())]

    def directories(self) -> list[Path]:
        """Where checkpoints are; the first is where those go that a command asks for."""
        named = [callback.dirpath for callback in self._trainer.checkpoint_callbacks]
        return [Path(path) for path in named if path] or [directory_of(self._trainer)]

    # --- called by the callback -------------------------------------------------------------------------

    def begins(self) -> None:
        """The fit begins, or begins again; where checkpoints are is known now, and none of it is written yet."""
        if self._foreign is not None:
            return
        self._foreign = frozenset()
        if self._trainer.ckpt_path is None:
            self._foreign = frozenset((one.path, one.at) for one in self._found())
            self._counted().renew()

    def knows_epochs(self) -> None:
        """Training starts, and Lightning has said how many batches an epoch has."""
        if self.replay is not None:
            self.replay.limit = self._trainer.num_training_batches

    def stepped(self, step: int) -> None:
        """A step is complete."""
        self._step = step
        self.restarts.stepped(step, self._finish)

    def roll_back(self, command: JobCommand) -> None:
        """Raises Rejected."""
        rollback = command.parameters
        assert isinstance(rollback, Rollback)
        if rollback.skip_batches and self.replay is None:
            raise Rejected(
                "batches can be left out only of a DataLoader that was given to trainmedic.lightning.fit, and has a "
                "length, in a job of one rank; ask with skip_batches: 0"
            )
        target = agree_on_checkpoint(command.group, lambda: self._target(rollback), checkpoints.is_complete)
        output = {"checkpoint": target.path.name, "checkpoint_step": target.step, "left_step": self._step}
        output["saved_at"] = target.at.isoformat()
        self.restarts.ask(LoopRestart(target.path, command, rollback.skip_batches, output=output))

    def end(self) -> None:
        """Let the fit end at the next opportunity; the least numbers of steps and epochs do not count."""
        if self.restarts.is_asked:
            # What the loop holds is to be thrown away; saving it could delete the very checkpoint to go back to.
            self._mark_saved(self._trainer.global_step)
        self._trainer.fit_loop.min_epochs = 0
        self._trainer.fit_loop.epoch_loop.min_steps = None
        self._trainer.should_stop = True

    def _target(self, rollback: Rollback) -> SavedCheckpoint:
        target = choose(self._found(), rollback, self._step)
        self._counted().check(target.step, self._step)
        return target

    def _finish(self, restart: LoopRestart) -> Mapping[str, Any]:
        """The loop runs again, and `restart` is done."""
        if restart.command is None:
            return {}
        spent = self._counted().spend(restart.output["checkpoint_step"], restart.output["left_step"])
        return {**spent, "skipped_batches": self.replay.left_out if self.replay else 0}

    def _counted(self) -> RollbackBudget:
        """The directory of the checkpoints is known only while the Trainer fits."""
        if self._budget is None:
            writes = self._trainer.is_global_zero
            self._budget = RollbackBudget(self.directories()[0], self._limits.rollbacks, writes=writes)
        return self._budget


def directory_of(trainer: Any) -> Path:
    """Where checkpoints go in a Trainer that has no ``ModelCheckpoint``."""
    return Path(trainer.default_root_dir) / "trainmedic"
