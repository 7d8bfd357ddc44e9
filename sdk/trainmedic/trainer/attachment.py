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

HUNG = (
    "the training loop hung in a step and was interrupted, so its state is incomplete; repeat the command once it runs"
)
_NEEDS_RESTART = "it needs a restart of the training loop, which is not set up here; see {}"


def log_errors(hook: Hook) -> Hook:
    """Log errors of a hook, except `DamagedCheckpoint`."""

    @functools.wraps(hook)
    def guarded(callback: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return hook(callback, *arguments, **options)
        except DamagedCheckpoint:
            raise
        except Exception:  # a framework would end the training for any error
            log.exception("%s: %s failed; training continues", callback.medic.job, hook.__qualname__)
            return None

    return guarded  # type: ignore[return-value]


class Attachment:
    """Commands and measurements of one framework's training.

    ``end_loop`` ends its loop for a rollback. ``restart_handlers`` (by action, with ``in_force`` for `Medic.on`) need a
    restartable loop; ``restarter`` names, for messages, the functions that run one.
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
        """Set the loop for commands that need a restart.

        None makes them unsupported and answers a waiting rate change.
        """
        self.loop = loop
        if loop is None:
            self.live.loop_ends(is_final=True)
        else:
            self.live.loss_log = loop.proof.losses.log
        self._register_restarts()

    def _register_restarts(self) -> None:
        no_loop = _NEEDS_RESTART.format(self._restarter)
        reason = self.loop.framework.no_restart_because if self.loop is not None else no_loop
        for action, handler in {"job.rollback": self._roll_back, **self._restart_handlers}.items():
            if reason:
                self.medic.cannot(action, reason)
            else:
                in_force = self._in_force if action in self._restart_handlers else None
                self.medic.on(action, how="restart", in_force=in_force)(handler)

    def training_begins(
        self, optimizer: Any, scheduler: Any, directory: Path, checkpoint: Path | None, writes: bool
    ) -> None:
        self.live.loop_begins(optimizer, scheduler)
        _join_ranks(self.medic)
        self.live.recall(directory, checkpoint, writes)

    def measure(self, trained: Sequence[Any], knows_all_waiting: bool = True) -> None:
        """Measure steps, and layers' norms if requested.

        ``knows_all_waiting``: the loop waits for other ranks only in wrappers.
        """
        models = trained if knows_all_waiting else ()
        self._end_measuring()
        self.meter = StepMeter(models, self.medic.world_size)
        self._layer_norms = LayerNorms(trained, self.live.optimizers, self.medic)
        if self.loop is not None:
            self.loop.meter = self.meter

    def training_ends(self) -> None:
        self.disarm()
        self._end_measuring()
        self.live.loop_ends(is_final=self.loop is None or not self.loop.restarts.is_requested)
        if self.loop is not None:
            self.loop.ends()

    def _end_measuring(self) -> None:
        self.meter.close()
        if self._layer_norms is not None:
            self._layer_norms.close()

    def parts_of_step(self, step: int) -> Mapping[str, Any]:
        self.meter.step_ends()
        return self.meter.take(self.medic.progress.steps_covered_by(step))

    def arm(self) -> None:
        if self.loop is not None:
            self.loop.restarts.arm()

    def disarm(self) -> None:
        if self.loop is not None:
            self.loop.restarts.disarm()

    def between_steps(self, work: Callable[[], None]) -> None:
        self.disarm()
        try:
            work()
        finally:
            self.arm()

    def carry_out(self, step: int) -> None:
        """Record a step, carry out commands, and wait for a pause to end."""
        if self.loop is not None:
            self.loop.stepped(step)
        self.live.step_done()
        self.medic.commands(step)
        if self.live.pause.lasts and self.loop is not None:
            self.loop.proof.finish(PAUSED)
        self.live.pause.wait(step)

    def saved(self, step: int) -> None:
        self.medic.saved(step)
        self.live.checkpoint_written(step)

    def evaluated(self, metrics: Mapping[str, Any], step: int, is_of_tokens: bool = False) -> None:
        loss, perplexity = loss_and_perplexity(metrics, is_of_tokens)
        others = other_metrics(metrics)
        if loss is not None or perplexity is not None or others:
            self.medic.report_evaluation(loss, perplexity, step, **others)

    @property
    def restart_is_due(self) -> bool:
        return self.loop is not None and self.loop.restarts.is_requested

    def stop(self) -> None:
        self.live.pause.end()
        if self.loop is not None:
            self.loop.restarts.stop()

    def _roll_back(self, command: JobCommand) -> None:
        assert self.loop is not None  # the handler is registered only with a loop
        if self.loop.roll_back(command):
            self._end_loop()
            self.live.pause.end()


def _join_ranks(medic: Medic) -> None:
    """Let the ranks agree; every rank calls it at the start. Raises ConfigurationError.

    If they cannot, no rank carries out commands: one alone would block the others.
    """
    if medic.share is not None or not distributed.is_needed():
        return
    try:
        distributed.share(medic)
    finally:
        if medic.share is None:
            for action in ACTIONS:
                medic.cannot(action, "the ranks of this job cannot agree on commands; see its log")
