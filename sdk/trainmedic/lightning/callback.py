"""The callback: a Lightning Trainer's part in the conversation with Trainmedic.

It reports each optimizer step, and carries out between two of them what can be done while the loop runs. What
needs the fit to start again it hands to `loop` (see ``trainmedic.lightning.fit``), where there is somebody who
restarts it; otherwise it says that it cannot do that. An error in here is logged, and never reaches Lightning.

``trainer.should_stop`` is each rank's own: it is set where every rank has taken the same command at the same step.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Mapping

import torch

from trainmedic.client import Medic, connect
from trainmedic.errors import Rejected
from trainmedic.job.command import NOTHING_TO_UNDO, JobCommand
from trainmedic.job.parameters import Accumulate, Stop
from trainmedic.job.progress import CHECKPOINT, EVALUATION, Window
from trainmedic.lightning import checkpoints
from trainmedic.lightning.frameworks import LightningCallback
from trainmedic.lightning.loop import LightningLoop, directory_of
from trainmedic.recovery.changes import scaled_whole
from trainmedic.torch import randomness
from trainmedic.trainer.live_commands import HUNG, NEEDS_RESTART, LiveCommands, harmless, join_ranks

_NEEDS_HELP = f"{NEEDS_RESTART}; see trainmedic.lightning.fit"
_YOURS = "in Lightning the data loader is made by the program, not by the Trainer, so its {} cannot be changed"


class Callback(LightningCallback):  # type: ignore[misc]
    """``Trainer(callbacks=[trainmedic.lightning.Callback(job="llm-1")])``.

    The options are those of `trainmedic.connect`; or give a connected ``medic``. Without the help of
    `trainmedic.lightning.fit`, a rollback is ``unsupported``. The gradient's norm is measured at each step;
    ``grad_norm=False`` leaves it out.
    """

    def __init__(self, medic: Medic | None = None, grad_norm: bool = True, **options: Any) -> None:
        super().__init__()
        self.medic = medic if medic is not None else connect(**options)
        self.loop: LightningLoop | None = None
        self._live = LiveCommands(self.medic)
        self._wants_norm = grad_norm
        self._norm: Any = None
        self._losses: list[Any] = []
        self._samples = 0
        self._step = -1
        self._is_at_boundary = False
        self._window: Window | None = None
        self._trainer: Any = None
        self._accumulated: set[str] = set()  # by which commands, since the process began
        self._accumulation: tuple[JobCommand, int] | None = None
        self._random: Mapping[str, Any] | None = None
        self._register()

    def attach(self, loop: LightningLoop | None) -> None:
        """From now on `loop` carries out what needs a restart; None: nobody does."""
        self.loop = loop
        self._register_rollback()

    # --- called by Lightning ----------------------------------------------------------------------------

    @harmless
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.loop is not None:
            self.loop.begins()

    @harmless
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._trainer, self._step = trainer, trainer.global_step
        self._live.loop_begins(trainer.optimizers, [config.scheduler for config in trainer.lr_scheduler_configs])
        if self.loop is not None:
            self.loop.knows_epochs()
        join_ranks(self.medic)
        came_from = Path(trainer.ckpt_path) if trainer.ckpt_path else None
        self._live.recall(came_from is None, self._directories()[0], came_from, writes=trainer.is_global_zero)
        self._register_accumulation(trainer, pl_module)
        if self._random is not None and trainer.world_size == 1:
            randomness.restore(self._random)
        self._random = None
        if self.loop is not None:
            self.loop.restarts.arm()

    @harmless
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._close()
        if self.loop is not None and self.loop.replay is not None:
            self._catch_up(trainer, self.loop.replay.take_left_out())

    @harmless
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._wants_norm:
            gradients = [
                each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None
            ]
            self._norm = torch.nn.utils.get_total_norm(gradients) if gradients else None

    @harmless
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            self._losses.append(loss.detach())
        self._samples += _samples(batch)
        if trainer.global_step == self._step:
            return  # in the middle of an accumulation
        self._step = trainer.global_step
        self._report(trainer)
        if self.loop is None:
            self._boundary(trainer)
            return
        self.loop.restarts.disarm()
        try:
            self.loop.stepped(self._step)
            self._boundary(trainer)
        finally:
            self.loop.restarts.arm()

    def _boundary(self, trainer: Any) -> None:
        self._is_at_boundary = True
        try:
            self.medic.commands(self._step)
            self._live.pause.hold(self._step)
            self._accumulate_when_it_fits(trainer)
        finally:
            self._is_at_boundary = False

    @harmless
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._open(EVALUATION)

    @harmless
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    @harmless
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._open(CHECKPOINT)  # until the next batch; Lightning does not say when it is written
        self.medic.saved(trainer.global_step)

    @harmless
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.loop is not None:
            self.loop.restarts.disarm()
        self._close()
        if self._accumulation is not None:
            self._accumulation[0].failed("training ended before the accumulation could change")
            self._accumulation = None

    def state_dict(self) -> dict[str, Any]:
        """Called by Lightning for a checkpoint: it does not keep the random state itself."""
        return {"random": randomness.capture()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._random = state_dict.get("random")

    # --- called by Medic.commands, between two steps ----------------------------------------------------

    def _register(self) -> None:
        self.medic.on("job.checkpoint")(self._checkpoint)
        self.medic.on("job.stop")(self._stop)
        self.medic.on("job.accumulate")(self._accumulate)
        self.medic.cannot("job.scale_batch", _YOURS.format("batch size"))
        self.medic.cannot("job.dataloader_workers", _YOURS.format("workers"))
        self._register_rollback()

    def _register_accumulation(self, trainer: Any, pl_module: Any) -> None:
        if trainer.strategy.handles_gradient_accumulation:
            self.medic.cannot("job.accumulate", "the strategy accumulates by itself")
        elif not pl_module.automatic_optimization:
            self.medic.cannot("job.accumulate", "the model steps its optimizers itself (manual optimization)")

    def _directories(self) -> list[Path]:
        """Where checkpoints go that a command asks for, first."""
        return self.loop.directories() if self.loop is not None else [directory_of(self._trainer)]

    def _register_rollback(self) -> None:
        if self.loop is None:
            self.medic.cannot("job.rollback", _NEEDS_HELP)
        else:
            self.medic.on("job.rollback", how="restart")(functools.partial(self._roll_back, self.loop))

    def _checkpoint(self, command: JobCommand | None = None) -> Mapping[str, Any]:
        self._require_boundary()
        path = checkpoints.path_of(self._directories()[0], self._step)
        self._trainer.save_checkpoint(path)
        return {"checkpoint": path.name, "checkpoint_step": self._step, "directory": str(path.parent)}

    def _stop(self, command: JobCommand) -> Mapping[str, Any]:
        assert isinstance(command.parameters, Stop)
        self._require_boundary()
        output = self._checkpoint() if command.parameters.checkpoint else {"checkpoint": None}
        self._live.pause.end()
        if self.loop is not None:
            self.loop.restarts.stop()
            self.loop.end()
        else:
            self._trainer.should_stop = True
        return output

    def _require_boundary(self) -> None:
        if not self._is_at_boundary:
            raise Rejected(HUNG)

    def _roll_back(self, loop: LightningLoop, command: JobCommand) -> None:
        loop.roll_back(command)
        if loop.restarts.is_asked:
            loop.end()
        self._live.pause.end()

    def _accumulate(self, command: JobCommand) -> Mapping[str, Any] | None:
        """At the step after which the batches of the epoch make whole steps of the new length."""
        assert isinstance(command.parameters, Accumulate)
        if command.undo_of is not None and command.undo_of not in self._accumulated:
            return NOTHING_TO_UNDO  # it ended with an earlier process; this one has begun with the script's own
        if self._accumulation is not None:
            command.failed("another change of the accumulation waits for its step")
            return None
        own = self._trainer.accumulate_grad_batches
        wanted = scaled_whole(own, {command.id: command.parameters.factor}, "the number of accumulated batches")
        self._accumulation = command, wanted
        command.later()
        return None

    def _accumulate_when_it_fits(self, trainer: Any) -> None:
        if self._accumulation is None or trainer.should_stop:
            return
        command, wanted = self._accumulation
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready % wanted == 0:
            before, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, wanted
            if self.loop is not None and self.loop.replay is not None:
                self.loop.replay.group = wanted
            self._accumulation = None
            self._accumulated ^= {command.undo_of or command.id}
            command.applied(before=before, after=wanted)

    # --- reports ----------------------------------------------------------------------------------------

    def _report(self, trainer: Any) -> None:
        group = trainer.optimizers[0].param_groups[0]
        self.medic.report(
            step=self._step,
            loss=torch.stack(self._losses).mean() if self._losses else None,
            grad_norm=self._norm,
            learning_rate=group["lr"],
            expected_learning_rate=self._live.expected_learning_rate,
            samples=self._samples * trainer.world_size or None,
        )
        self._losses, self._samples, self._norm = [], 0, None

    def _catch_up(self, trainer: Any, batches: int) -> None:
        """Batches that were left out are done as far as Lightning's count of the epoch goes."""
        if batches:
            trainer.fit_loop._data_fetcher.fetched += batches
            progress = trainer.fit_loop.epoch_loop.batch_progress
            for counted in (progress.total, progress.current):
                counted.ready += batches
                counted.started += batches
                counted.processed += batches
                counted.completed += batches

    def _open(self, name: str) -> None:
        self._close()
        self._window = self.medic.window(name).__enter__()

    def _close(self) -> None:
        if self._window is not None:
            self._window.__exit__(None, None, None)
            self._window = None


def _samples(batch: Any) -> int:
    """The length of the first tensor in it."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    members = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((found for found in map(_samples, members) if found), 0)
