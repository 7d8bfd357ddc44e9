from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping

from transformers import TrainerCallback

from trainmedic.client import Medic, connect
from trainmedic.errors import Rejected
from trainmedic.huggingface import checkpoints
from trainmedic.huggingface.framework import HuggingFaceFramework
from trainmedic.huggingface.step_reports import StepReports
from trainmedic.job.command import JobCommand
from trainmedic.recovery.checkpoints import mark_complete
from trainmedic.torch.checkpoints.digests import Modules, Optimizers
from trainmedic.trainer.attachment import HUNG, Attachment, log_errors

_RESTARTER = "trainmedic.huggingface.train and trainmedic.huggingface.protect"
_NO_ACCUMULATION = (
    "the Trainer finds its place in the data by the gradient accumulation, so that cannot change alone; "
    "job.scale_batch changes it together with the micro-batch"
)


@dataclass(frozen=True)
class _StepEnd:
    args: Any
    state: Any
    control: Any

    @property
    def checkpoint(self) -> Path:
        return checkpoints.path_of(self.args.output_dir, self.state.global_step)


class Callback(TrainerCallback):  # type: ignore[misc]
    """Callback for ``Trainer(callbacks=[trainmedic.huggingface.Callback(job="llm-1")])``.

    Options are those of `trainmedic.connect`; or pass a connected ``medic``. Without `train` or `protect`, commands
    that need a restart are ``unsupported``.
    """

    def __init__(self, medic: Medic | None = None, **options: Any) -> None:
        super().__init__()  # a user's class may have further bases
        self.medic = medic if medic is not None else connect(**options)
        self.framework: HuggingFaceFramework | None = None  # None without `train` or `protect`
        self.reports = StepReports(self.medic)
        self._step_end: _StepEnd | None = None  # None unless commands are carried out between two steps
        self._saving: list[JobCommand] = []  # commands that wait for a checkpoint
        self._unreported: Path | None = None  # checkpoint of which other ranks may still write their part
        handlers = {"job.scale_batch": self._scale_batch, "job.dataloader_workers": self._set_workers}
        self._attachment = Attachment(self.medic, _RESTARTER, self._end_for_rollback, handlers, self._is_in_force)
        self.medic.on("job.checkpoint")(self._checkpoint)
        self.medic.on("job.stop")(self._stop)
        self.medic.cannot("job.accumulate", _NO_ACCUMULATION)

    def attach(self, framework: HuggingFaceFramework | None) -> None:
        """Set the framework for restarts; None makes commands that need one unsupported."""
        self.framework = framework
        self._attachment.attach(None if framework is None else framework.loop)
        if framework is None:
            self._fail_waiting_saves()

    def learning_rate(self, value: Any) -> Any:
        """Return the rate times commands' factor. Programs that write ``group["lr"]`` call it each time."""
        return self._attachment.live.learning_rate(value)

    @log_errors
    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        directory, attachment = Path(args.output_dir), self._attachment
        start = checkpoints.path_of(directory, state.global_step) if state.global_step else None
        writes = state.is_world_process_zero
        attachment.training_begins(objects["optimizer"], objects["lr_scheduler"], directory, start, writes)
        self.medic.progress.skips_overflows = getattr(objects["optimizer"], "scaler", None) is not None
        if self.framework is not None:
            self.framework.loop.begins(state.global_step, *_parts(objects))
        # Without a loop, the ranks' wait before counting tokens is not observed.
        knows_all_waiting = self.framework is not None or not getattr(args, "average_tokens_across_devices", False)
        attachment.measure([objects.get("model")], knows_all_waiting)
        attachment.arm()

    @log_errors
    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.reports.step_begins()

    @log_errors
    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        step_end = _StepEnd(args, state, control)
        self._attachment.between_steps(functools.partial(self._end_step, step_end, objects["optimizer"]))

    def _end_step(self, step_end: _StepEnd, optimizer: Any) -> None:
        args, control, step = step_end.args, step_end.control, step_end.state.global_step
        self._report_saved(args)
        self._unreported = None  # every rank has written before it could take another step
        self.reports.step_ends(
            control.should_log,
            step=step,
            samples=args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            learning_rate=optimizer.param_groups[0]["lr"],
            expected_learning_rate=self._attachment.live.expected_learning_rate,
            epoch=step_end.state.epoch,
            **self._attachment.parts_of_step(step),
        )
        self._step_end = step_end
        try:
            self._attachment.carry_out(step)
        finally:
            self._step_end = None
        self.reports.expect(control.should_evaluate, control.should_save)

    @log_errors
    def on_epoch_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.reports.step_begins()
        if self._attachment.restart_is_due:
            # The strategy "epoch" would save state that is to be discarded.
            control.should_save = control.should_evaluate = False
        if self.framework is not None and self.framework.passes_over_epoch:
            # To the Trainer the data has ended; and it would overwrite the checkpoint from which it started.
            control.should_training_stop = control.should_save = control.should_evaluate = False
        self.reports.expect(control.should_evaluate, control.should_save)

    @log_errors
    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.reports.logged(logs["loss"], logs.get("grad_norm"))

    @log_errors
    def on_evaluate(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.reports.evaluated(control.should_save)
        is_of_tokens = _class_name(objects.get("model")).endswith(("ForCausalLM", "LMHeadModel"))
        self._attachment.evaluated(objects.get("metrics") or {}, state.global_step, is_of_tokens)

    @log_errors
    def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        path = checkpoints.path_of(args.output_dir, state.global_step)
        if path.is_dir():
            self._complete(path, args.should_save, state.global_step, objects)
        # A user's Trainer may save elsewhere, or only some files. Only the writing rank can tell.
        is_written = checkpoints.is_written(path, args.save_only_model) if args.should_save else True
        self._unreported = path if args.should_save else None
        self._report_saved(args)
        self.reports.saved()
        waiting, self._saving = self._saving, []
        for command in waiting:
            _answer_save(command, path, is_written)

    def _report_saved(self, args: Any) -> None:
        path = self._unreported
        if path is not None and checkpoints.is_written(path, args.save_only_model, args.world_size):
            self._unreported = None
            self._attachment.saved(checkpoints.step_of(path))

    @log_errors
    def _complete(self, path: Path, writes: bool, step: int, objects: Mapping[str, Any]) -> None:
        if self.framework is None:
            if writes:
                mark_complete(path, {"step": step, "skipped_batches": 0})
            return
        modules, optimizers = _parts(objects)
        self.framework.save_records(path, modules, optimizers)
        if writes:
            health = self.framework.loop.proof.health(modules, optimizers).to_json()
            facts = {"step": step, "skipped_batches": self.framework.skipped_batches, "health": health}
            mark_complete(path, facts)

    @log_errors
    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self._attachment.training_ends()
        self.reports.step_begins()
        self._fail_waiting_saves()

    def _fail_waiting_saves(self) -> None:
        for command in self._saving:
            _answer_missing(command, "training ended before the checkpoint was written")
        self._saving.clear()

    def _checkpoint(self, command: JobCommand) -> None:
        if self._attachment.restart_is_due:
            raise Rejected("the training loop is about to restart; repeat the command once it runs")
        self._require_room(command)
        self._required_step_end.control.should_save = True
        self._saving.append(command)
        command.later()  # `on_save` answers

    def _stop(self, command: JobCommand) -> Mapping[str, Any] | None:
        self._required_step_end.control.should_training_stop = True
        self._attachment.stop()
        if not command.params.get("checkpoint", True):
            return {"checkpoint": None}
        try:
            self._checkpoint(command)
        except Rejected as error:  # the job stops anyway
            return {"checkpoint": None, "no_checkpoint": str(error)}
        return None  # `on_save` answers

    def _end_for_rollback(self) -> None:
        if self._step_end is not None:  # else the loop hung, and has ended already
            control = self._step_end.control
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False  # the loop's state is to be discarded

    def _scale_batch(self, command: JobCommand) -> None:
        self._restart_from_here(command, self._required_framework.scale_batch)

    def _is_in_force(self, command_id: str) -> bool | None:
        return self.framework.is_in_force(command_id) if self.framework is not None else None

    def _set_workers(self, command: JobCommand) -> None:
        self._restart_from_here(command, self._required_framework.set_workers)

    def _restart_from_here(self, command: JobCommand, request: Callable[[JobCommand, Path], bool]) -> None:
        self._require_room(command)
        step_end = self._required_step_end
        if not request(command, step_end.checkpoint):
            return
        step_end.control.should_training_stop = step_end.control.should_save = True
        self._attachment.live.pause.end()

    def _require_room(self, command: JobCommand) -> None:
        output_dir = self._required_step_end.args.output_dir
        command.group.choose(lambda: checkpoints.check_room(output_dir))

    @property
    def _required_framework(self) -> HuggingFaceFramework:
        assert self.framework is not None
        return self.framework

    @property
    def _required_step_end(self) -> _StepEnd:
        if self._step_end is None:
            raise Rejected(HUNG)
        return self._step_end


def _answer_save(command: JobCommand, path: Path, is_written: bool) -> None:
    if is_written:
        command.applied(checkpoint=path.name, checkpoint_step=checkpoints.step_of(path))
    else:
        _answer_missing(command, f"{path} is missing, or lacks files that the Trainer needs to resume from it")


def _answer_missing(command: JobCommand, reason: str) -> None:
    if command.action == "job.stop":  # the job stops anyway
        command.applied(checkpoint=None, no_checkpoint=reason)
    else:
        command.failed(reason)


def _class_name(model: Any) -> str:
    while hasattr(model, "module") or hasattr(model, "_orig_mod"):
        model = getattr(model, "_orig_mod", None) or model.module
    return type(model).__name__


def _parts(objects: Mapping[str, Any]) -> tuple[Modules, Optimizers]:
    return {"model": objects["model"]}, {"optimizer": objects["optimizer"]}
