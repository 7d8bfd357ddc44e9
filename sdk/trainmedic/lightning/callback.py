from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, Mapping

import torch

from trainmedic import distributed
from trainmedic.client import Medic, connect
from trainmedic.errors import ConfigurationError, Rejected, TrainmedicError
from trainmedic.job.command import JobCommand
from trainmedic.job.parameters import Accumulate, Stop
from trainmedic.job.progress import CHECKPOINT, EVALUATION
from trainmedic.lightning import checkpoints
from trainmedic.lightning.framework import LightningFramework, directory_of
from trainmedic.lightning.written_checkpoints import WrittenCheckpoints, writes_later
from trainmedic.recovery.changes import scaled_whole
from trainmedic.torch import randomness
from trainmedic.torch.checkpoints.digests import Modules, Optimizers
from trainmedic.trainer.attachment import HUNG, Attachment, log_errors

try:  # the library has two names, and may be installed under both; each accepts the other's callbacks
    from lightning.pytorch import Callback as LightningCallback
except ImportError:
    from pytorch_lightning import Callback as LightningCallback

_ACCUMULATE = "job.accumulate"
_NO_LOADER = "in Lightning the data loader is made by the program, not by the Trainer, so its {} cannot be changed"

_PATIENCE, _POLL_INTERVAL = 60.0, 0.05  # seconds for a background checkpoint, and between two looks at it
_CANNOT_MOVE = (
    "a connected Callback cannot go to another process, as with strategy='ddp_spawn': leave it out of the Trainer, and "
    "give trainmedic.lightning.fit(..., job=...) the job's name, so that each process connects by itself"
)


class Callback(LightningCallback):  # type: ignore[misc]
    """Callback for ``Trainer(callbacks=[trainmedic.lightning.Callback(job="llm-1")])``.

    Options are those of `trainmedic.connect`; or pass a connected ``medic``. Without `fit`, a rollback is
    ``unsupported``. ``grad_norm=False`` omits the gradient's norm.
    """

    def __init__(self, medic: Medic | None = None, grad_norm: bool = True, **options: Any) -> None:
        super().__init__()  # a user's class may have further bases
        self.medic = medic if medic is not None else connect(**options)
        self.framework: LightningFramework | None = None  # None outside of `fit`
        self._attachment = Attachment(self.medic, "trainmedic.lightning.fit", self._end_loop)
        self._written = WrittenCheckpoints(self.medic, self._attachment.saved)
        self._wants_norm = grad_norm
        # Of the present step.
        self._norm: Any = None
        self._losses: list[Any] = []
        self._samples = 0
        self._step = -1  # the last reported one
        self._is_between_steps = False  # False for commands after a hung step, whose state is incomplete
        self._window = contextlib.ExitStack()  # the open window, if any
        self._trainer: Any = None
        self._accumulated_by: set[str] = set()  # IDs of the commands that changed it in this process
        self._next_accumulation: tuple[JobCommand, int] | None = None  # that waits for its step
        self._has_refused_accumulation = False
        self._random: Mapping[str, Any] | None = None  # loaded, to be restored at the start
        self.medic.on("job.checkpoint")(self._checkpoint)
        self.medic.on("job.stop")(self._stop)
        self.medic.on(_ACCUMULATE, in_force=self._is_accumulation_in_force)(self._accumulate)
        self.medic.cannot("job.scale_batch", _NO_LOADER.format("batch size"))
        self.medic.cannot("job.dataloader_workers", _NO_LOADER.format("workers"))

    def attach(self, framework: LightningFramework | None) -> None:
        """Set the framework for restarts; None makes commands that need one unsupported."""
        self.framework = framework
        self._attachment.attach(None if framework is None else framework.loop)
        if framework is None:
            self._written.report_newest()  # by now Lightning has waited for writes in the background
            self._written.stop()
            self._fail_waiting_accumulation()

    def learning_rate(self, value: Any) -> Any:
        """Return the rate times commands' factor. Programs that write ``group["lr"]`` call it each time."""
        return self._attachment.live.learning_rate(value)

    def __getstate__(self) -> Any:
        raise ConfigurationError(_CANNOT_MOVE)

    @log_errors
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._trainer = trainer
        self._written.watch(trainer)
        if self.framework is not None:
            self.framework.start_fit()

    @log_errors
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._trainer, self._step, attachment = trainer, trainer.global_step, self._attachment
        self._losses, self._samples, self._norm = [], 0, None  # of a step interrupted by an error
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        start = Path(trainer.ckpt_path) if trainer.ckpt_path else None
        attachment.training_begins(trainer.optimizers, schedulers, self._directory, start, trainer.is_global_zero)
        self.medic.progress.skips_overflows = getattr(trainer.precision_plugin, "scaler", None) is not None
        attachment.measure([trainer.strategy.model])
        if self.framework is not None:
            self.framework.resumable.on_drawn = attachment.meter.add_batch
        self._register_accumulation(trainer, pl_module)
        if self._random is not None:
            randomness.restore(self._random)
        self._random = None
        if self.framework is not None:
            self.framework.begins(trainer.global_step, *_parts(trainer))
        attachment.arm()

    @log_errors
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._window.close()
        if self.framework is not None:
            self.framework.batch_begins()

    @log_errors
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._wants_norm:
            gradients = [
                each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None
            ]
            self._norm = torch.nn.utils.get_total_norm(gradients) if gradients else None

    @log_errors
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            self._losses.append(loss.detach())
        self._samples += _samples(batch)
        if trainer.global_step == self._step:
            return  # a batch within an accumulation
        self._step = trainer.global_step
        self._report(trainer)
        self._attachment.between_steps(self._end_step)

    def _end_step(self) -> None:
        self._is_between_steps = True
        self._written.report_newest()
        try:
            self._attachment.carry_out(self._step)
            self._change_accumulation_if_possible()
        finally:
            self._is_between_steps = False

    @log_errors
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._window.close()
        self._window.enter_context(self.medic.window(EVALUATION))

    @log_errors
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._window.close()
        metrics = {} if trainer.sanity_checking else trainer.callback_metrics
        self._attachment.evaluated(metrics, trainer.global_step)

    @log_errors
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._attachment.training_ends()
        self._window.close()
        self._fail_waiting_accumulation()

    @log_errors
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":  # after the callbacks that write a last checkpoint
            self._written.stop()

    @log_errors
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.framework is None:  # else it may restart; see `attach`
            self._attachment.training_ends()
            self._window.close()
            self._written.stop()
            self._fail_waiting_accumulation()

    def _fail_waiting_accumulation(self) -> None:
        if self._next_accumulation is not None:
            self._next_accumulation[0].failed("training ended before the accumulation could change")
            self._next_accumulation = None

    def state_dict(self) -> dict[str, Any]:
        """Return all ranks' states, because Lightning stores only rank 0's."""
        if self.framework is None or self._trainer is None:
            return {"ranks": _of_all_ranks({"random": randomness.capture(), "data": None})}
        proof = self.framework.loop.proof
        modules, optimizers = _parts(self._trainer)
        own = {
            "random": randomness.capture(),
            "data": self.framework.resumable.state(),
            "held": self.framework.held(),
            **proof.rank_record(self._trainer.global_step, optimizers),
        }
        state: dict[str, Any] = {"ranks": _of_all_ranks(own)}
        if self._trainer.is_global_zero:  # it writes the weights
            state["health"] = proof.health(modules, optimizers).to_json()
            state["digests"] = proof.digests(modules, optimizers)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        ranks, (rank, world_size) = state_dict.get("ranks"), _rank_and_world_size()
        if ranks is None:  # written by an earlier version
            self._random = state_dict.get("random") if world_size == 1 else None
            return
        # State of another number of ranks is useless.
        own = ranks[rank] if len(ranks) == world_size else {}
        self._random = own.get("random")
        if self.framework is not None:
            record = {name: own.get(name) for name in ("batches", "losses", "lr_scale") if name in own}
            record["digests"] = state_dict.get("digests")
            self.framework.load(record, own.get("data"), own.get("held"))

    def _checkpoint(self, command: JobCommand | None = None) -> Mapping[str, Any]:
        self._require_between_steps()
        path = checkpoints.path_of(self._directory, self._step)
        with self.medic.window(CHECKPOINT):
            self._trainer.save_checkpoint(path)
            if self._trainer.is_global_zero:
                self._confirm(path)
        self._written.report_newest()
        return {"checkpoint": path.name, "checkpoint_step": self._step, "directory": str(path.parent)}

    def _confirm(self, path: Path) -> None:
        """Wait for a background write. Raises TrainmedicError."""
        until = time.monotonic() + _PATIENCE
        while not checkpoints.is_written(path):
            if not writes_later(self._trainer) or time.monotonic() >= until:
                raise TrainmedicError(f"{path.name} is missing, unfinished, or without the optimizers' states")
            time.sleep(_POLL_INTERVAL)

    def _stop(self, command: JobCommand) -> Mapping[str, Any]:
        assert isinstance(command.parameters, Stop)
        self._require_between_steps()
        output = self._checkpoint() if command.parameters.checkpoint else {"checkpoint": None}
        self._attachment.stop()
        self._end_loop()
        return output

    def _end_loop(self) -> None:
        if self.framework is not None:
            self.framework.end()
        else:
            self._trainer.should_stop = True

    def _require_between_steps(self) -> None:
        if not self._is_between_steps:
            raise Rejected(HUNG)

    @property
    def _directory(self) -> Path:
        return self.framework.directories[0] if self.framework is not None else directory_of(self._trainer)

    def _register_accumulation(self, trainer: Any, pl_module: Any) -> None:
        if trainer.strategy.handles_gradient_accumulation:
            self._refuse_accumulation("the strategy accumulates by itself")
        elif not pl_module.automatic_optimization:
            self._refuse_accumulation("the model steps its optimizers itself (manual optimization)")
        elif self._has_refused_accumulation:  # in an earlier fit; else the script may have registered its own handler
            self._has_refused_accumulation = False
            self.medic.on(_ACCUMULATE, in_force=self._is_accumulation_in_force)(self._accumulate)

    def _refuse_accumulation(self, reason: str) -> None:
        self._has_refused_accumulation = True
        self.medic.cannot(_ACCUMULATE, reason)

    def _accumulate(self, command: JobCommand) -> Mapping[str, Any] | None:
        """Change it at a step after which the epoch divides into whole steps."""
        assert isinstance(command.parameters, Accumulate)
        if self._next_accumulation is not None:
            command.failed("another change of the accumulation waits for its step")
            return None
        before = self._trainer.accumulate_grad_batches
        after = scaled_whole(before, {command.id: command.parameters.factor}, "the number of accumulated batches")
        self._next_accumulation = command, after
        command.later()
        return None

    def _is_accumulation_in_force(self, command_id: str) -> bool:
        return command_id in self._accumulated_by

    def _change_accumulation_if_possible(self) -> None:
        trainer = self._trainer
        if self._next_accumulation is None or trainer.should_stop:
            return
        command, after = self._next_accumulation
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready % after == 0:
            before, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, after
            self._next_accumulation = None
            self._accumulated_by ^= {command.undo_of or command.id}  # an undo removes its command
            command.applied(before=before, after=after)

    def _report(self, trainer: Any) -> None:
        group = trainer.optimizers[0].param_groups[0]
        loss = torch.stack(self._losses).mean() if self._losses else None
        if self.framework is not None:
            self.framework.loop.proof.losses.add(loss)
        self.medic.report(
            step=self._step,
            loss=loss,
            grad_norm=self._norm,
            learning_rate=group["lr"],
            expected_learning_rate=self._attachment.live.expected_learning_rate,
            samples=self._samples * trainer.world_size or None,
            epoch=trainer.current_epoch,
            **self._attachment.parts_of_step(self._step),
        )
        self._losses, self._samples, self._norm = [], 0, None


def _parts(trainer: Any) -> tuple[Modules, Optimizers]:
    optimizers = {f"optimizer-{number}": optimizer for number, optimizer in enumerate(trainer.optimizers)}
    return {"model": trainer.lightning_module}, optimizers


def _of_all_ranks(state: Mapping[str, Any]) -> list[Any]:
    _, world_size = _rank_and_world_size()
    states: list[Any] = [state] * world_size
    if world_size > 1:
        torch.distributed.all_gather_object(states, state)
    return states


def _rank_and_world_size() -> tuple[int, int]:
    if not distributed.is_needed():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _samples(batch: Any) -> int:
    """Return the first tensor's length, or 0."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    members: Any = ()
    if isinstance(batch, Mapping):
        members = batch.values()
    elif isinstance(batch, (list, tuple)):
        members = batch
    return next((length for length in map(_samples, members) if length), 0)
