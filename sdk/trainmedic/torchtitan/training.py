"""A torchtitan training, rolled back within its processes.

``Trainer.train()`` keeps its data iterator in a local variable. So an exception ends it between steps for a rollback,
and it is called again.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist

from trainmedic.client import Medic
from trainmedic.job.command import JobCommand
from trainmedic.job.progress import CHECKPOINT, EVALUATION
from trainmedic.recovery import skipped_data
from trainmedic.recovery.checkpoints import read_rank_record, write_rank_record
from trainmedic.recovery.health import CheckpointHealth
from trainmedic.recovery.loop_restart import LoopEnds, LoopRestart
from trainmedic.torch.checkpoints.digests import Modules, Optimizers
from trainmedic.torch.sources.batch_sources import REPLAYED
from trainmedic.torchtitan import checkpoints
from trainmedic.trainer.attachment import log_errors
from trainmedic.trainer.carried_files import CarriedFiles
from trainmedic.trainer.patching import replaced
from trainmedic.trainer.self_saving import SelfSavingFramework

# Members of the checkpointer that are used.
_USED = ("_should_save", "maybe_wait_for_saving", "maybe_wait_for_staging", "exclude_from_loading", "interval")


class TitanTraining(SelfSavingFramework):
    restarter = "trainmedic.torchtitan.protect"
    fixed_by = "training.local_batch_size, training.global_batch_size and dataloader.num_workers of torchtitan"
    layout = checkpoints.LAYOUT
    data = REPLAYED
    newly_skipped = 0

    def __init__(self, medic: Medic, trainer: Any, rollbacks: int | None, carried: CarriedFiles) -> None:
        super().__init__(medic, rollbacks, carried)
        self._trainer = trainer
        self._checkpointer = trainer.checkpointer
        self._drawn = 0  # batches of this rank since training began, including skipped ones
        self._left_out_before: skipped_data.Ranges = []  # `left_out` of earlier loops
        self._first_skips = 0  # batches that the present loop has skipped and no earlier one
        self._logged: dict[str, float] = {}  # loss and norm of the current step, if torchtitan logged them
        self._samples = self._tokens = 0  # drawn by this rank since the last report
        self._saved: int | None = None  # step of the last checkpoint
        self._has_begun = False
        self._health = CheckpointHealth()  # when the last checkpoint was begun
        self._has_loop_begun = False  # the present loop has loaded its start
        # The original methods, which those of this class replace in `train` and call.
        self._continues: Callable[[], bool] = trainer.should_continue_training
        self._step: Callable[..., Any] = trainer.train_step
        self._batches: Callable[..., Iterator[Any]] = trainer.batch_generator
        self._load: Callable[..., Any] = trainer.checkpointer.load
        self._save: Callable[..., Any] = trainer.checkpointer.save
        self._log: Callable[..., Any] = trainer.metrics_processor.log
        self.no_restart_because = self.no_checkpoint_because = _why_no_restart(self._checkpointer)
        self.attachment.attach(self.loop)
        if self.no_restart_because:
            medic.cannot("job.checkpoint", self.no_restart_because)
        else:
            medic.on("job.checkpoint")(self.checkpoint)

    def train(self, call: Callable[[], Any]) -> Any:
        trainer, checkpointer = self._trainer, self._checkpointer
        trainer.should_continue_training = self.continues
        trainer.train_step = self.train_step
        trainer.batch_generator = self.batches
        checkpointer.load = self.load
        checkpointer.save = self.save
        trainer.metrics_processor.log = self.log
        if trainer.config.validator.enable:
            trainer.validator.validate = self.in_window(EVALUATION, trainer.validator.validate)

        def attempt(restart: LoopRestart | None) -> Any:
            self.newly_skipped = self._first_skips = 0
            if restart is None:
                return self._call(call)
            checkpointer.maybe_wait_for_saving()  # else it would write what is being put aside
            step = self.step_of(self.loop.prepare(restart))
            # The settings are for the first load; a rollback loads all of this step.
            with replaced(trainer.config.checkpoint, load_step=step), replaced(checkpointer, exclude_from_loading=[]):
                return self._call(call)

        try:
            return self.loop.restarts.run(attempt)
        finally:
            self.attachment.training_ends()

    def _call(self, call: Callable[[], Any]) -> Any:
        with self.loop.attempting():
            try:
                result = call()
            except LoopEnds:
                result = None
            self.loop.ends()
            return result

    # --- replacements of torchtitan's methods ----------------------------------------------------------------

    def load(self, *arguments: Any, **options: Any) -> Any:
        """Replace ``CheckpointManager.load``. Checkpoints hold unscaled rates."""
        self._has_loop_begun = False
        return self.attachment.live.call_unscaled(lambda: self._load(*arguments, **options))

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        return self._batches(self._recorded(self.without_skipped(iter(loader))))

    def continues(self) -> bool:
        """Replace ``should_continue_training``, which is called before each step."""
        if self._has_loop_begun:
            self.end_step(self._trainer.step)
        else:
            self._has_loop_begun = True
            self._begin()
        return not self.must_end() and self._continues()

    def train_step(self, *arguments: Any, **options: Any) -> Any:
        self._logged = {}
        result = self._step(*arguments, **options)
        self._report(self._trainer.step)
        return result

    def log(self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float, **more: Any) -> Any:
        self._remember_logged(global_avg_loss, grad_norm)
        return self._log(step, global_avg_loss, global_max_loss, grad_norm, **more)

    def save(self, curr_step: int, last_step: bool = False) -> Any:
        """Replace ``CheckpointManager.save``, which is called after each step."""
        if not self._will_save(curr_step, last_step):
            return self._save(curr_step, last_step)
        is_scaled = self.attachment.live.lr_scale != 1.0
        with self.medic.window(CHECKPOINT):
            self._save_records(curr_step)
            result = self.attachment.live.call_unscaled(lambda: self._save_now(curr_step, last_step, is_scaled))
            self.note_saved()
        return result

    @log_errors
    def _begin(self) -> None:
        trainer = self._trainer
        if not self._has_begun:
            self._has_begun = True
            self.carried.begin(trainer.model_parts, getattr(trainer, "dataloader", None))
            if trainer.step == 0 and not self.no_restart_because:
                self.start_fresh()
            self.begins(list(trainer.optimizers), list(trainer.lr_schedulers), trainer.step)
            self.attachment.measure(trainer.model_parts, knows_all_waiting=False)
        self._saved = trainer.step or None
        self._begin_loop(trainer.step)

    def _begin_loop(self, step: int) -> None:
        loop, restart = self.loop, self.loop.restarts.starting
        loop.record = read_rank_record(self.path_of(step), self.medic.rank) if step else None
        self._drawn = (loop.record or {}).get("drawn", step * self.accumulation)
        self._left_out_before = self.left_out
        if restart is None:
            loop.proof.restore_batches(loop.record)
        else:
            self.leave_out(self._drawn, restart.skip_batches)
            loop.proof.expect_return(loop.record, lambda: self._first_skips)
        if step:
            self.restore_carried(self.path_of(step))
        loop.begins(step, *self._parts())

    def without_skipped(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            number, self._drawn = self._drawn, self._drawn + 1
            if skipped_data.contains(self.left_out, number):
                self.newly_skipped += 1
                self._first_skips += not skipped_data.contains(self._left_out_before, number)
            else:
                yield batch

    def _recorded(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            before, began = self.loop.proof.before_draw(), time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._record_drawn(batch, before, time.perf_counter() - began)
            yield batch

    @log_errors
    def _record_drawn(self, batch: Any, before: Any, seconds: float) -> None:
        self.loop.proof.drawn(batch, 0, before)
        self.attachment.meter.add_batch(None, seconds)
        labels = batch[1]
        self._samples += len(labels)
        self._tokens += labels.numel()

    @log_errors
    def _remember_logged(self, loss: float, grad_norm: float) -> None:
        self._logged = {"loss": self._on_all_stages(loss), "grad_norm": grad_norm}

    def _on_all_stages(self, loss: float) -> float:
        """Return the last pipeline stage's loss."""
        trainer = self._trainer
        if not trainer.parallel_dims.pp_enabled:
            return loss
        # Other stages have no loss. Every rank of the pipeline must take part, or the others hang.
        shared = torch.tensor(loss if trainer.pp_has_last_stage else -math.inf, device=trainer.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=trainer.parallel_dims.get_mesh("pp").get_group())
        return shared.item()

    @log_errors
    def _report(self, step: int) -> None:
        live = self.attachment.live
        data_parallel_ranks = self.medic.world_size // self._trainer.parallel_dims.non_data_parallel_size
        parts = {**self.attachment.parts_of_step(step), "tokens": self._tokens * data_parallel_ranks or None}
        self.loop.proof.losses.add(self._logged.get("loss"))
        self.medic.report(
            step=step,
            learning_rate=live.optimizers[0].param_groups[0]["lr"],
            expected_learning_rate=live.expected_learning_rate,
            samples=self._samples * data_parallel_ranks or None,
            **self._logged,
            **parts,
        )
        self._samples = self._tokens = 0

    def checkpoint(self, command: JobCommand | None = None) -> Mapping[str, Any]:
        checkpointer, step = self._checkpointer, self._trainer.step
        if self._saved != step:
            with replaced(checkpointer, interval=1):
                self.save(step)
        with self.medic.window(CHECKPOINT):
            checkpointer.maybe_wait_for_saving()
        self.confirm_saved()
        return {"checkpoint": self.path_of(step).name, "directory": str(checkpointer.folder)}

    def _will_save(self, step: int, is_last: bool) -> bool:
        if self.no_restart_because or (is_last and self._checkpointer.last_save_model_only):
            return False
        return bool(self._checkpointer._should_save(step, is_last))

    @log_errors
    def _save_records(self, step: int) -> None:
        path, proof, parts = self.path_of(step), self.loop.proof, self._parts()
        self._health = proof.health(*parts)
        path.mkdir(parents=True, exist_ok=True)
        self.carried.save(path)
        write_rank_record(path, self.medic.rank, {**proof.record(step, *parts), "drawn": self._drawn})

    def _save_now(self, step: int, is_last: bool, is_scaled: bool) -> Any:
        result = self._save(step, is_last)
        if is_scaled:  # the rates are about to be scaled again
            self._checkpointer.maybe_wait_for_staging()
        self._saved = step
        self.save_begins(step, self._health)
        return result

    def has_saved(self, step: int) -> bool:
        future = getattr(self._checkpointer, "save_future", None)
        return (future is None or future.done()) and self.is_complete(self.path_of(step))

    def abandoned_name(self, name: str, number: int) -> str:
        # torchtitan takes any name with "step-" and a number for a checkpoint.
        return f"abandoned-{number}-of-{name.replace('step-', '')}"

    @property
    def directory(self) -> Path:
        return Path(getattr(self._checkpointer, "folder", self._trainer.config.dump_folder))

    @property
    def accumulation(self) -> int:
        trainer = self._trainer
        return int(trainer.gradient_accumulation_steps * getattr(trainer, "num_pipeline_parallel_microbatches", 1))

    def _parts(self) -> tuple[Modules, Optimizers]:
        trainer = self._trainer
        modules = {f"model.{number}": part for number, part in enumerate(trainer.model_parts)}
        return modules, {f"optimizer.{number}": part for number, part in enumerate(trainer.optimizers)}


def _why_no_restart(checkpointer: Any) -> str:
    if not checkpointer.enable:
        return "there are no checkpoints: --checkpoint.enable"
    if any(not hasattr(checkpointer, name) for name in _USED):
        return f"how a {type(checkpointer).__name__} keeps its checkpoints is not known; use CheckpointManager"
    if checkpointer.load_only:
        return "no checkpoints are written: --checkpoint.load_only"
    if "://" in checkpointer.folder:
        return f"the checkpoints are not in a file system: {checkpointer.folder}"
    return ""
