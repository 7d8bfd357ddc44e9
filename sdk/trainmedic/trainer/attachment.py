"""Trainmedic's part in a loop that a framework runs: it carries out commands between two steps.

`Attachment` holds the connection to Trainmedic. Who calls it: the framework's callback, or what is put in place of the
framework's functions, which knows when a step ends, and how the loop saves and ends. An error in these is logged
(`log_errors`), and reaches the framework only where a damaged checkpoint was loaded.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence, TypeVar

from trainmedic import distributed
from trainmedic.client import Medic
from trainmedic.job.command import JobCommand
from trainmedic.job.handlers import InForce
from trainmedic.job.parameters import ACTIONS
from trainmedic.recovery.loop_restart import DamagedCheckpoint
from trainmedic.torch.meters.layer_norms import LayerNorms
from trainmedic.torch.meters.step_meter import StepMeter
from trainmedic.torch.verification import PAUSED
from trainmedic.trainer.evaluations import loss_and_perplexity, other_metrics
from trainmedic.trainer.live_commands import LiveCommands
from trainmedic.trainer.loop import TrainerLoop

log = logging.getLogger("trainmedic")

Hook = TypeVar("Hook", bound=Callable[..., Any])
Handler = Callable[[JobCommand], Any]

HUNG = "the training loop hung in a step and was interrupted, so that its state is not whole; ask again once it runs"
_NEEDS_RESTART = "it needs a restart of the training loop, and nobody restarts this one; see {}"


def log_errors(hook: Hook) -> Hook:
    """Decorate a method that a framework calls: an error is logged, because it must not end the training.

    The method is one of an object with a ``medic``. Only `DamagedCheckpoint` ends the loop: what it has loaded is
    nothing to train on.
    """

    @functools.wraps(hook)
    def guarded(callback: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return hook(callback, *arguments, **options)
        except DamagedCheckpoint:
            raise
        except Exception:  # the boundary to the framework, which would end the training for any error
            log.exception("%s: %s failed; training goes on", callback.medic.job, hook.__qualname__)
            return None

    return guarded  # type: ignore[return-value]


class Attachment:
    """The attachment of one training.

    ``end_loop`` lets the framework's loop end for a rollback. ``restart_handlers`` carry out the other commands that
    need a loop which starts again, by action, and ``in_force`` says of some of them what is in force (`Medic.on`).
    ``restarter`` names the functions that run such a loop, for the reason why these commands are unsupported without
    one.
    """

    def __init__(
        self,
        medic: Medic,
        restarter: str,
        end_loop: Callable[[], None],
        restart_handlers: Mapping[str, Handler] | None = None,
        in_force: InForce | None = None,
    ) -> None:
        self.medic = medic
        self.loop: TrainerLoop | None = None
        self.live = LiveCommands(medic)
        self.meter = StepMeter((), medic.world_size)
        self._layer_norms: LayerNorms | None = None
        self._restarter = restarter
        self._end_loop = end_loop
        self._restart_handlers = restart_handlers or {}
        self._in_force = in_force
        self._register_restarts()

    def attach(self, loop: TrainerLoop | None) -> None:
        """Let `loop` carry out the commands that need a restart; with None they are unsupported, and a change of the
        rate that waits is answered, because the training is over. It may have ended by an error, of which a framework
        does not tell its callbacks."""
        self.loop = loop
        if loop is None:
            self.live.loop_ends(is_for_good=True)
        else:
            self.live.loss_log = loop.proof.losses.log
        self._register_restarts()

    def _register_restarts(self) -> None:
        unattended = _NEEDS_RESTART.format(self._restarter)
        reason = self.loop.framework.no_restart_because if self.loop is not None else unattended
        for action, handler in {"job.rollback": self._roll_back, **self._restart_handlers}.items():
            if reason:
                self.medic.cannot(action, reason)
            else:
                in_force = self._in_force if action in self._restart_handlers else None
                self.medic.on(action, how="restart", in_force=in_force)(handler)

    # --- when the loop begins and ends ------------------------------------------------------------------

    def training_begins(
        self, optimizer: Any, scheduler: Any, directory: Path, checkpoint: Path | None, writes: bool
    ) -> None:
        """Take note that the loop begins, from ``checkpoint`` if any; this run's checkpoints go to ``directory``."""
        self.live.loop_begins(optimizer, scheduler)
        _join_ranks(self.medic)
        self.live.recall(directory, checkpoint, writes)

    def measure(self, trained: Sequence[Any], knows_all_waiting: bool = True) -> None:
        """Measure the steps from now on: what their time goes into, and where asked for, the norms of the layers.

        ``trained`` are the models; ``knows_all_waiting`` says that the ranks wait for each other nowhere unseen.
        """
        models = trained if knows_all_waiting else ()
        self._end_measuring()
        self.meter = StepMeter(models, self.medic.world_size)
        self._layer_norms = LayerNorms(trained, self.live.optimizers, self.medic)
        if self.loop is not None:
            self.loop.meter = self.meter

    def training_ends(self) -> None:
        """Take note that the loop ends, for good or to begin again."""
        self.disarm()
        self._end_measuring()
        self.live.loop_ends(is_for_good=self.loop is None or not self.loop.restarts.is_asked)
        if self.loop is not None:
            self.loop.ends()

    def _end_measuring(self) -> None:
        self.meter.close()
        if self._layer_norms is not None:
            self._layer_norms.close()

    # --- at a step --------------------------------------------------------------------------------------

    def parts_of_step(self, step: int) -> Mapping[str, Any]:
        """The arguments of `Medic.report` that say what the time since the last report went into."""
        self.meter.step_ends()
        return self.meter.take(self.medic.progress.steps_to(step))

    def arm(self) -> None:
        """Allow interrupting the loop until `disarm`, if it hangs."""
        if self.loop is not None:
            self.loop.restarts.arm()

    def disarm(self) -> None:
        if self.loop is not None:
            self.loop.restarts.disarm()

    def between_steps(self, work: Callable[[], None]) -> None:
        """Call `work`, which is not interrupted: what a command changes must not be left half done."""
        self.disarm()
        try:
            work()
        finally:
            self.arm()

    def carry_out(self, step: int) -> None:
        """A step is complete: carry out the commands that are due now, and return when no pause lasts."""
        if self.loop is not None:
            self.loop.stepped(step)
        self.live.step_done()
        self.medic.commands(step)
        if self.live.pause.lasts and self.loop is not None:
            self.loop.proof.finish(PAUSED)
        self.live.pause.wait(step)

    def saved(self, step: int) -> None:
        """A checkpoint of that step is complete."""
        self.medic.saved(step)
        self.live.checkpoint_written(step)

    def evaluated(self, metrics: Mapping[str, Any], step: int, is_of_tokens: bool = False) -> None:
        """Report an evaluation. ``is_of_tokens`` as for `loss_and_perplexity`."""
        loss, perplexity = loss_and_perplexity(metrics, is_of_tokens)
        others = other_metrics(metrics)
        if loss is not None or perplexity is not None or others:
            self.medic.report_evaluation(loss, perplexity, step, **others)

    # --- commands ---------------------------------------------------------------------------------------

    @property
    def restart_is_due(self) -> bool:
        """The loop ends only to start again."""
        return self.loop is not None and self.loop.restarts.is_asked

    def stop(self) -> None:
        """The job was told to stop: no pause lasts, and the loop is not started again."""
        self.live.pause.end()
        if self.loop is not None:
            self.loop.restarts.stop()

    def _roll_back(self, command: JobCommand) -> None:
        assert self.loop is not None  # the handler is registered only if there is one
        if self.loop.roll_back(command):
            self._end_loop()
            self.live.pause.end()


def _join_ranks(medic: Medic) -> None:
    """Let the ranks agree on commands from now on; every rank calls it when training begins.

    If they cannot agree, no rank carries out commands: one rank alone would leave the others waiting for it.
    Raises ConfigurationError.
    """
    if medic.share is not None or not distributed.is_needed():
        return
    try:
        distributed.share(medic)
    finally:
        if medic.share is None:
            for action in ACTIONS:
                medic.cannot(action, "the ranks of this job cannot agree on commands; why is in its log")
