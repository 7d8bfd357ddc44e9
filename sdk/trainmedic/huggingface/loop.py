"""A Trainer whose training loop is restarted: by commands, and after a crash.

Here is what a restart means for the Trainer: which checkpoint, which of its arguments change, which batches are
left out. When to restart is `trainmedic.recovery.restarts`'s business. Who calls it: the `callback` for commands, and
``trainmedic.huggingface`` to train.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Callable, Mapping

from transformers.trainer_utils import get_last_checkpoint

from trainmedic.client import Medic
from trainmedic.errors import Rejected
from trainmedic.huggingface import checkpoints
from trainmedic.huggingface.batch_skipper import BatchSkipper
from trainmedic.job.command import JobCommand
from trainmedic.job.parameters import DataloaderWorkers, Rollback, ScaleBatch
from trainmedic.recovery.changes import check_workers
from trainmedic.recovery.checkpoints import SavedCheckpoint, choose
from trainmedic.recovery.restarts import LoopRestart, LoopRestarter, RestartLimits, agree_on_checkpoint
from trainmedic.recovery.rollback_budget import RollbackBudget

log = logging.getLogger("trainmedic")

_MODEL_ONLY = "the Trainer saves the model alone (save_only_model), and cannot go on from that"
_BATCH = "per_device_train_batch_size"
_ACCUMULATION = "gradient_accumulation_steps"
_WORKERS = "dataloader_num_workers"


class HuggingFaceLoop:
    """The training of one Trainer, from its first step to the last, restarts included."""

    def __init__(self, trainer: Any, medic: Medic, limits: RestartLimits) -> None:
        self._trainer = trainer
        self._medic = medic
        self._ranks: int = trainer.args.world_size
        self._step = 0
        self.restarts = LoopRestarter(medic, self._newest, self._target, limits)
        self._budget = RollbackBudget(Path(trainer.args.output_dir), limits.rollbacks, writes=trainer.args.should_save)
        self._left_out = BatchSkipper(trainer, 0)
        self._left_out_before = 0  # by the checkpoint that the loop went on from
        self._batches_scaled: set[str] = set()  # by which commands, since the process began
        # What an earlier training has left in the directory, by path and time: nothing goes back to that.
        self._foreign: frozenset[tuple[Any, Any]] = frozenset()

    # --- around the Trainer's loop ----------------------------------------------------------------------

    def train(self, original: Callable[..., Any], resume: Any, *arguments: Any, **options: Any) -> Any:
        """Like ``Trainer.train``, which `original` is; what it returned last. Raises what it raises."""

        def attempt(restart: LoopRestart | None) -> Any:
            start = self._first(resume) if restart is None else self._prepare(restart)
            if not start:
                self._begin_anew()
            self._left_out_before = checkpoints.skipped_batches(start) if start else 0
            skip = self._left_out_before + (restart.skip_batches if restart else 0)
            with BatchSkipper(self._trainer, skip) as self._left_out:
                return original(start, *arguments, **options)

        return self.restarts.run(attempt)

    def _first(self, resume: Any) -> Any:
        """The checkpoint that the caller of ``Trainer.train`` means, by the Trainer's own rules."""
        if resume is True:
            return get_last_checkpoint(self._trainer.args.output_dir) or resume
        return resume or None

    def _begin_anew(self) -> None:
        self._foreign = frozenset((one.path, one.at) for one in self._found())
        self._budget.renew()

    def _prepare(self, restart: LoopRestart) -> str:
        ranks = self.restarts.together()
        ranks.poll()  # until then some rank may still be writing its part of a checkpoint
        checkpoint = Path(ranks.choose(lambda: str(self._whole(restart))))
        self._set(restart.settings)
        if self._trainer.args.should_save:
            aside = checkpoints.put_aside(self._trainer.args.output_dir, checkpoints.step_of(checkpoint))
            if aside:
                log.warning("%s: put aside as %s", self._medic.job, ", ".join(aside))
        log.warning("%s: the training loop starts again from %s", self._medic.job, checkpoint)
        return str(checkpoint)

    def _whole(self, restart: LoopRestart) -> Path:
        if checkpoints.is_complete(restart.checkpoint, self._ranks):
            return restart.checkpoint
        newest = self._newest()
        if newest is None or restart.output.get("left_step") is not None:
            raise FileNotFoundError(f"{restart.checkpoint} is not there any more, or not complete")
        return newest

    def _set(self, settings: Mapping[str, Any]) -> None:
        args = self._trainer.args
        for name, value in settings.items():
            setattr(args, name, value)
        if _BATCH in settings:
            self._trainer._train_batch_size = args.train_batch_size  # the Trainer's own copy

    def _newest(self) -> Path | None:
        complete = [one for one in self._found() if one.complete]
        return complete[-1].path if complete else None

    def _found(self) -> list[SavedCheckpoint]:
        found = checkpoints.found(self._trainer.args.output_dir, self._ranks)
        return [one for one in found if (one.path, one.at) not in self._foreign]

    # --- called by the callback -------------------------------------------------------------------------

    @property
    def no_restart_because(self) -> str:
        """Why this Trainer cannot be restarted at all; empty where it can."""
        return _MODEL_ONLY if self._trainer.args.save_only_model else ""

    @property
    def is_ending(self) -> bool:
        """The loop ends only to start again."""
        return self.restarts.is_asked

    @property
    def skipped_batches(self) -> int:
        """How many batches were left out since training began."""
        return self._left_out.done

    def stepped(self, step: int) -> None:
        """A step is complete."""
        self._step = step
        self.restarts.stepped(step, self._finish)

    def roll_back(self, command: JobCommand) -> None:
        """Raises Rejected."""
        rollback = command.parameters
        assert isinstance(rollback, Rollback)
        if rollback.skip_batches and self._trainer.args.ignore_data_skip:
            raise Rejected("with ignore_data_skip the Trainer does not know which batches to leave out")
        target = agree_on_checkpoint(
            command.group, lambda: self._target(rollback), lambda path: checkpoints.is_complete(path, self._ranks)
        )
        output = {"checkpoint": target.path.name, "checkpoint_step": target.step, "left_step": self._step}
        output["saved_at"] = target.at.isoformat()
        self.restarts.ask(LoopRestart(target.path, command, rollback.skip_batches, output=output))

    def _target(self, rollback: Rollback) -> SavedCheckpoint:
        target = choose(self._found(), rollback, self._step)
        self._budget.check(target.step, self._step)
        return target

    def _finish(self, restart: LoopRestart) -> Mapping[str, Any]:
        """The loop runs again, and `restart` is done."""
        command = restart.command
        if command is not None and command.action == "job.scale_batch":
            self._batches_scaled ^= {command.undo_of or command.id}
        if command is None or command.action != "job.rollback":
            return {}
        spent = self._budget.spend(checkpoints.step_of(restart.checkpoint), restart.output["left_step"])
        return {**spent, "skipped_batches": max(self._left_out.done - self._left_out_before, 0)}

    def has_own_batches(self, command: JobCommand) -> bool:
        """Whether `command` takes back a change that ended with an earlier process: this one has begun with the
        script's own batches."""
        return command.undo_of is not None and command.undo_of not in self._batches_scaled

    def scale_batch(self, command: JobCommand, here: Path) -> None:
        """``here`` is the checkpoint that is about to be written. Raises Rejected."""
        scale, args = command.parameters, self._trainer.args
        assert isinstance(scale, ScaleBatch)
        if not scale.keep_global_batch:
            raise Rejected("the Trainer finds its place in the data by the global batch, so that has to stay")
        if args.auto_find_batch_size:
            raise Rejected("the Trainer was told to find its batch size by itself (auto_find_batch_size)")
        before = {_BATCH: getattr(args, _BATCH), _ACCUMULATION: getattr(args, _ACCUMULATION)}
        batch, accumulation = split(before[_BATCH], before[_ACCUMULATION], scale.factor)
        after = {_BATCH: batch, _ACCUMULATION: accumulation}
        output = {**after, "previous": before}
        self.restarts.ask(LoopRestart(here, command, settings=after, previous=before, output=output))

    def set_workers(self, command: JobCommand, here: Path) -> None:
        """``here`` is the checkpoint that is about to be written. Raises Rejected."""
        wanted, args = command.parameters, self._trainer.args
        assert isinstance(wanted, DataloaderWorkers)
        check_workers(wanted.count)
        names = [_WORKERS]
        after: dict[str, Any] = {_WORKERS: wanted.count}
        if wanted.count == 0:  # torch refuses both without workers
            after.update(dataloader_persistent_workers=False, dataloader_prefetch_factor=None)
            names = list(after)
        before = {name: getattr(args, name) for name in names}
        output = {"count": wanted.count, "previous": before[_WORKERS]}
        self.restarts.ask(LoopRestart(here, command, settings=after, previous=before, output=output))


def split(batch: int, accumulation: int, factor: float) -> tuple[int, int]:
    """The micro-batch nearest to ``batch * factor``, not beyond, that leaves ``batch * accumulation`` as it is.

    Raises Rejected where there is none other than the present.
    """
    whole = batch * accumulation
    wanted = batch * factor * (1 + 1e-9)  # 1/3 and back again
    fitting = [size for size in range(1, whole + 1) if whole % size == 0 and size <= max(wanted, 1)]
    if fitting[-1] == batch:
        raise Rejected(f"the micro-batch is {batch} of {whole}; there is no other that keeps the global batch")
    return fitting[-1], whole // fitting[-1]
