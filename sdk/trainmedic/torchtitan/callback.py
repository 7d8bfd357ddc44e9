"""What is called at which point of a step of a torchtitan training.

A step is reported when its ``train_step`` has returned, and commands are carried out in ``should_continue_training``,
which torchtitan calls between two steps, on every rank. Not here: going back (``loop``).
"""

from __future__ import annotations

import math
import time
from typing import Any, Callable, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist

from trainmedic.client import Medic
from trainmedic.job.command import JobCommand
from trainmedic.job.progress import CHECKPOINT, EVALUATION
from trainmedic.recovery.loop_restart import LoopEnds
from trainmedic.torch.checkpoints.digests import Modules, Optimizers
from trainmedic.torchtitan.loop import TitanLoop
from trainmedic.trainer.callback import log_errors
from trainmedic.trainer.self_saving import SelfSavingCallback

_FIXED = "training.local_batch_size, training.global_batch_size and dataloader.num_workers of torchtitan"


class TitanCallback(SelfSavingCallback[TitanLoop]):
    """Carries out commands between two steps of one ``Trainer``, for the `loop` around its ``train()``."""

    def __init__(self, medic: Medic, trainer: Any, loop: TitanLoop) -> None:
        super().__init__(medic, "trainmedic.torchtitan.protect", _FIXED)
        self.attach(loop)
        self._trainer = trainer
        self._logged: dict[str, float] = {}  # loss and norm of the present step, where torchtitan has logged them
        self._samples = self._tokens = 0  # that this rank has drawn since the last report
        self._saved: int | None = None  # the step of the last checkpoint
        self._has_begun = False
        self._is_loaded = False  # whether the loop that runs has begun, after it has loaded what it starts from
        self._continues: Callable[[], bool] = trainer.should_continue_training
        self._step: Callable[..., Any] = trainer.train_step
        self._batches: Callable[..., Iterator[Any]] = trainer.batch_generator
        self._load: Callable[..., Any] = trainer.checkpointer.load
        self._save: Callable[..., Any] = trainer.checkpointer.save
        self._log: Callable[..., Any] = trainer.metrics_processor.log
        if loop.no_restart_because:
            medic.cannot("job.checkpoint", loop.no_restart_because)
        else:
            medic.on("job.checkpoint")(self._checkpoint)

    def train(self, call: Callable[[], Any]) -> Any:
        """`call` the trainer's ``train()``, with this callback around its methods; returns what it returns."""
        trainer = self._trainer
        trainer.should_continue_training = self.continues
        trainer.train_step = self.train_step
        trainer.batch_generator = self.batches
        trainer.checkpointer.load = self.load
        trainer.checkpointer.save = self.save
        trainer.metrics_processor.log = self.log
        if trainer.config.validator.enable:
            trainer.validator.validate = self._in_window(EVALUATION, trainer.validator.validate)
        try:
            return self._required_loop.train(call)
        finally:
            self._loop_ends()

    # --- in place of torchtitan's methods ---------------------------------------------------------------

    def load(self, *arguments: Any, **options: Any) -> Any:
        """In place of ``CheckpointManager.load``, with which ``train()`` begins. No checkpoint holds a scaled rate."""
        self._is_loaded = False
        return self._live.unscaled(lambda: self._load(*arguments, **options))

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """In place of ``batch_generator``."""
        return self._batches(self._noted(self._required_loop.to_train_on(iter(loader))))

    def continues(self) -> bool:
        """In place of ``should_continue_training``: whether there is another step."""
        step = self._trainer.step
        if self._is_loaded:
            self._end_step(step)
        else:
            self._is_loaded = True
            self._begin()
        if not self._stops and self._required_loop.restarts.is_asked:
            raise LoopEnds
        return not self._stops and self._continues()

    def train_step(self, *arguments: Any, **options: Any) -> Any:
        """In place of ``train_step``."""
        self._logged = {}
        result = self._step(*arguments, **options)
        self._report(self._trainer.step)
        return result

    def log(self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float, **more: Any) -> Any:
        """In place of ``MetricsProcessor.log``."""
        self._note(global_avg_loss, grad_norm)
        return self._log(step, global_avg_loss, global_max_loss, grad_norm, **more)

    def save(self, curr_step: int, last_step: bool = False) -> Any:
        """In place of ``CheckpointManager.save``, which is called after each step, and does not save after all."""
        if not self._required_loop.saves(curr_step, last_step):
            return self._save(curr_step, last_step)
        is_scaled = self._live.lr_scale != 1.0
        with self.medic.window(CHECKPOINT):
            self._begins_saving(curr_step)
            result = self._live.unscaled(lambda: self._save_now(curr_step, last_step, is_scaled))
            self._note_saved()
        return result

    # --- at these points --------------------------------------------------------------------------------

    @log_errors
    def _begin(self) -> None:
        trainer, loop = self._trainer, self._required_loop
        if not self._has_begun:
            self._has_begun = True
            loop.start_fit()
            directory = loop.directories[0]
            start = directory / f"step-{trainer.step}" if trainer.step else None
            rates = list(trainer.optimizers), list(trainer.lr_schedulers)
            self._training_begins(*rates, directory, start, self.medic.rank == 0)
            loop.recall()
            self._measure(trainer.model_parts, knows_all_waiting=False)
        self._saved = trainer.step or None
        loop.begins(trainer.step, *self._parts())

    @log_errors
    def _end_step(self, step: int) -> None:
        self._note_saved()
        self._carry_out(step)

    @log_errors
    def _note(self, loss: float, grad_norm: float) -> None:
        self._logged = {"loss": self._on_all_stages(loss), "grad_norm": grad_norm}

    def _on_all_stages(self, loss: float) -> float:
        """The loss, which the last stage of a pipeline alone has, also on the rank that reports it."""
        trainer = self._trainer
        if not trainer.parallel_dims.pp_enabled:
            return loss
        shared = torch.tensor(loss if trainer.pp_has_last_stage else -math.inf, device=trainer.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=trainer.parallel_dims.get_mesh("pp").get_group())
        return shared.item()

    def _noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        proof = self._required_loop.proof
        while True:
            before, began = proof.before_draw(), time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._note_drawn(batch, before, time.perf_counter() - began)
            yield batch

    @log_errors
    def _note_drawn(self, batch: Any, before: Any, seconds: float) -> None:
        self._required_loop.proof.drawn(batch, 0, before)
        self._meter.add_batch(None, seconds)
        labels = batch[1]
        self._samples += len(labels)
        self._tokens += labels.numel()

    @log_errors
    def _report(self, step: int) -> None:
        draws_apart = self.medic.world_size // self._trainer.parallel_dims.non_data_parallel_size
        parts = {**self._parts_of_step(step), "tokens": self._tokens * draws_apart or None}
        self._required_loop.proof.losses.add(self._logged.get("loss"))
        self.medic.report(
            step=step,
            learning_rate=self._live.optimizers[0].param_groups[0]["lr"],
            expected_learning_rate=self._live.expected_learning_rate,
            samples=self._samples * draws_apart or None,
            **self._logged,
            **parts,
        )
        self._samples = self._tokens = 0

    def _in_window(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            with self.medic.window(kind):
                return call(*arguments, **options)

        return called

    def _parts(self) -> tuple[Modules, Optimizers]:
        trainer = self._trainer
        modules = {f"model.{number}": part for number, part in enumerate(trainer.model_parts)}
        return modules, {f"optimizer.{number}": part for number, part in enumerate(trainer.optimizers)}

    # --- checkpoints ------------------------------------------------------------------------------------

    @log_errors
    def _begins_saving(self, step: int) -> None:
        """Before torchtitan writes, so that the checkpoint is not seen as whole before all is there."""
        self._health = self._required_loop.proof.health(*self._parts())
        self._required_loop.keep(step, *self._parts())

    def _save_now(self, step: int, is_last: bool, is_scaled: bool) -> Any:
        result = self._save(step, is_last)
        if is_scaled:  # the rates are about to be scaled again
            self._trainer.checkpointer.maybe_wait_for_staging()
        self._saved = self._begun = step
        return result

    @property
    def _no_checkpoint_because(self) -> str:
        return self._required_loop.no_restart_because

    # --- commands ---------------------------------------------------------------------------------------

    def _checkpoint(self, command: JobCommand | None = None) -> Mapping[str, Any]:
        checkpointer, step = self._trainer.checkpointer, self._trainer.step
        if self._saved != step:
            interval, checkpointer.interval = checkpointer.interval, 1
            try:
                self.save(step)
            finally:
                checkpointer.interval = interval
        with self.medic.window(CHECKPOINT):
            checkpointer.maybe_wait_for_saving()
        self._note_saved()
        return {"checkpoint": f"step-{step}", "directory": str(checkpointer.folder)}
