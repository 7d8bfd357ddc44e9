"""The callback: a Trainer's part in the conversation with Trainmedic.

It reports each step, and carries out at the end of a step what can be done while the loop runs; of the Trainer
it changes the `TrainerControl`, and of the optimizer the learning rate. What needs the loop to start again it
hands to `restarts` (see ``trainmedic.huggingface.train``), where there is somebody who restarts it; otherwise
it says that it cannot do that. An error in here is logged, and never reaches the Trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping

from transformers import TrainerCallback

from trainmedic.client import Medic, connect
from trainmedic.errors import Rejected
from trainmedic.huggingface import checkpoints
from trainmedic.huggingface.loop import HuggingFaceLoop
from trainmedic.huggingface.step_reports import StepReports
from trainmedic.job.command import NOTHING_TO_UNDO, JobCommand
from trainmedic.trainer.live_commands import HUNG, NEEDS_RESTART, LiveCommands, harmless, join_ranks

_NEEDS_HELP = f"{NEEDS_RESTART}; see trainmedic.huggingface.train and trainmedic.huggingface.protect"
_NO_ACCUMULATION = (
    "the Trainer finds its place in the data by the gradient accumulation, so that cannot change alone; "
    "job.scale_batch changes it together with the micro-batch"
)


@dataclass(frozen=True)
class _Moment:
    """The end of a step, as the Trainer shows it."""

    args: Any
    state: Any
    control: Any


class Callback(TrainerCallback):  # type: ignore[misc]
    """``Trainer(callbacks=[trainmedic.huggingface.Callback(job="llm-1")])``.

    The options are those of `trainmedic.connect`; or give a connected ``medic``. Without the help of
    `trainmedic.huggingface.train` or `protect`, commands that need a restart are ``unsupported``.
    """

    def __init__(self, medic: Medic | None = None, **options: Any) -> None:
        self.medic = medic if medic is not None else connect(**options)
        self.health = StepReports(self.medic)
        self.loop: HuggingFaceLoop | None = None
        self._live = LiveCommands(self.medic)
        self._moment: _Moment | None = None
        self._saving: list[JobCommand] = []
        self._register()

    def attach(self, loop: HuggingFaceLoop | None) -> None:
        """From now on `loop` carries out what needs a restart; None: nobody does."""
        self.loop = loop
        self._register_restarts()

    # --- called by the Trainer --------------------------------------------------------------------------

    @harmless
    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self._live.loop_begins(objects["optimizer"], objects["lr_scheduler"])
        join_ranks(self.medic)
        output = Path(args.output_dir)
        newest = checkpoints.path_of(output, state.global_step) if state.global_step else None
        self._live.recall(newest is None, output, newest, writes=state.is_world_process_zero)
        if self.loop is not None:
            self.loop.restarts.arm()

    @harmless
    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.health.step_begins()

    @harmless
    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self.loop is None:
            self._boundary(args, state, control, objects["optimizer"])
            return
        self.loop.restarts.disarm()
        try:
            self._boundary(args, state, control, objects["optimizer"])
        finally:
            self.loop.restarts.arm()

    def _boundary(self, args: Any, state: Any, control: Any, optimizer: Any) -> None:
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        rate, expected = optimizer.param_groups[0]["lr"], self._live.expected_learning_rate
        self.health.step_ends(state.global_step, control.should_log, samples, rate, expected)
        if self.loop is not None:
            self.loop.stepped(state.global_step)
        self._moment = _Moment(args, state, control)
        try:
            self.medic.commands(state.global_step)
            self._live.pause.hold(state.global_step)
        finally:
            self._moment = None
        self.health.expect(control.should_evaluate, control.should_save)

    @harmless
    def on_epoch_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.health.step_begins()
        if self.loop is not None and self.loop.is_ending:
            # The strategy "epoch" takes the early end for an epoch's, and would keep what is to be thrown away.
            control.should_save = control.should_evaluate = False
        self.health.expect(control.should_evaluate, control.should_save)

    @harmless
    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.health.logged(logs["loss"], logs.get("grad_norm"))

    @harmless
    def on_evaluate(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.health.evaluated(control.should_save)

    @harmless
    def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        path = checkpoints.path_of(args.output_dir, state.global_step)
        if args.should_save and path.is_dir():
            skipped_batches = self.loop.skipped_batches if self.loop is not None else 0
            checkpoints.note(path, step=state.global_step, skipped_batches=skipped_batches)
        self.medic.saved(state.global_step)
        self.health.saved()
        waiting, self._saving = self._saving, []
        for command in waiting:
            command.applied(checkpoint=path.name, checkpoint_step=state.global_step)

    @harmless
    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self.loop is not None:
            self.loop.restarts.disarm()
        self.health.step_begins()
        for command in self._saving:
            command.failed("training ended before the checkpoint was written")
        self._saving.clear()

    # --- called by Medic.commands, at the end of a step -------------------------------------------------

    def _register(self) -> None:
        self.medic.on("job.checkpoint")(self._checkpoint)
        self.medic.on("job.stop")(self._stop)
        self.medic.cannot("job.accumulate", _NO_ACCUMULATION)
        self._register_restarts()

    def _register_restarts(self) -> None:
        for action, handler in (
            ("job.rollback", self._roll_back),
            ("job.scale_batch", self._scale_batch),
            ("job.dataloader_workers", self._set_workers),
        ):
            if self.loop is None or self.loop.no_restart_because:
                self.medic.cannot(action, _NEEDS_HELP if self.loop is None else self.loop.no_restart_because)
            else:
                self.medic.on(action, how="restart")(handler)

    def _checkpoint(self, command: JobCommand) -> None:
        if self.loop is not None and self.loop.is_ending:
            raise Rejected("the training loop is about to start again; ask once it runs")
        self._require_room(command)
        self._now.control.should_save = True
        self._saving.append(command)
        command.later()  # until it is written

    def _stop(self, command: JobCommand) -> Mapping[str, Any] | None:
        now = self._now
        now.control.should_training_stop = True
        self._live.pause.end()
        if self.loop is not None:
            self.loop.restarts.stop()
        if not command.params.get("checkpoint", True):
            return {"checkpoint": None}
        try:
            self._checkpoint(command)
        except Rejected as error:  # it stops all the same
            return {"checkpoint": None, "no_checkpoint": str(error)}
        return None

    def _roll_back(self, command: JobCommand) -> None:
        self._loop.roll_back(command)
        if self._moment is not None:  # else the loop hung, and has ended already
            control = self._moment.control
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False  # what it holds is to be thrown away
        self._live.pause.end()

    def _scale_batch(self, command: JobCommand) -> Mapping[str, Any] | None:
        if self._loop.has_own_batches(command):
            return NOTHING_TO_UNDO
        self._restart_from_here(command, lambda here: self._loop.scale_batch(command, here))
        return None

    def _set_workers(self, command: JobCommand) -> None:
        self._restart_from_here(command, lambda here: self._loop.set_workers(command, here))

    def _require_room(self, command: JobCommand) -> None:
        output_dir = self._now.args.output_dir
        command.group.choose(lambda: checkpoints.check_room(output_dir))

    def _restart_from_here(self, command: JobCommand, ask: Callable[[Path], None]) -> None:
        self._require_room(command)
        now = self._now
        ask(checkpoints.path_of(now.args.output_dir, now.state.global_step))
        now.control.should_training_stop = now.control.should_save = True
        self._live.pause.end()

    @property
    def _now(self) -> _Moment:
        if self._moment is None:
            raise Rejected(HUNG)
        return self._moment

    @property
    def _loop(self) -> HuggingFaceLoop:
        assert self.loop is not None
        return self.loop
