"""The base class of the callbacks for Trainers.

`MedicCallback` holds the connection to Trainmedic, and carries out commands between two steps. Its
subclasses in ``huggingface.callback`` and ``lightning.callback`` are what the frameworks call: they know the events,
and how a loop saves and ends. An error in a hook is logged (`log_errors`), and reaches the framework only where a
damaged checkpoint was loaded.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any, Callable, Generic, Mapping, Sequence, TypeVar

from trainmedic import distributed
from trainmedic.client import Medic
from trainmedic.job.command import JobCommand
from trainmedic.job.handlers import InForce
from trainmedic.job.parameters import ACTIONS
from trainmedic.recovery.loop_restart import DamagedCheckpoint
from trainmedic.torch.meters.layer_norms import LayerNorms
from trainmedic.torch.meters.step_meter import StepMeter
from trainmedic.torch.verification import PAUSED
from trainmedic.trainer.live_commands import LiveCommands
from trainmedic.trainer.loop import TrainerLoop

log = logging.getLogger("trainmedic")

Hook = TypeVar("Hook", bound=Callable[..., Any])
AnyLoop = TypeVar("AnyLoop", bound=TrainerLoop)
Handler = Callable[[JobCommand], Any]

HUNG = "the training loop hung in a step and was interrupted, so that its state is not whole; ask again once it runs"
_NEEDS_RESTART = "it needs a restart of the training loop, and nobody restarts this one; see {}"


def log_errors(hook: Hook) -> Hook:
    """Decorate a method that a framework calls: an error is logged, because it must not end the training.

    Only `DamagedCheckpoint` ends the loop: what it has loaded is nothing to train on.
    """

    @functools.wraps(hook)
    def guarded(callback: MedicCallback[Any], *arguments: Any, **options: Any) -> Any:
        try:
            return hook(callback, *arguments, **options)
        except DamagedCheckpoint:
            raise
        except Exception:  # the boundary to the framework, which would end the training for any error
            log.exception("%s: %s failed; training goes on", callback.medic.job, hook.__qualname__)
            return None

    return guarded  # type: ignore[return-value]


class MedicCallback(Generic[AnyLoop]):
    """The base of both public callbacks.

    ``restart_handlers`` carry out the commands that need a loop which starts again, by action, and ``in_force`` says
    of some of them what is in force (`Medic.on`); ``restarter`` names the functions that run such a loop, for the
    reason why these commands are unsupported without one.
    """

    def __init__(
        self,
        medic: Medic,
        restarter: str,
        restart_handlers: Mapping[str, Handler],
        in_force: Mapping[str, InForce] | None = None,
    ) -> None:
        super().__init__()
        self.medic = medic
        self.loop: AnyLoop | None = None
        self._live = LiveCommands(medic)
        self._meter = StepMeter((), medic.world_size)
        self._layer_norms: LayerNorms | None = None
        self._restarter = restarter
        self._restart_handlers = restart_handlers
        self._in_force = in_force or {}
        self._register_restarts()

    def attach(self, loop: AnyLoop | None) -> None:
        """Let `loop` carry out the commands that need a restart; with None they are unsupported, and a change of the
        rate that waits is answered, because the training is over. It may have ended by an error, of which a framework
        does not tell its callbacks."""
        self.loop = loop
        if loop is None:
            self._live.loop_ends(is_for_good=True)
        else:
            self._live.loss_log = loop.proof.losses.log
        self._register_restarts()

    def learning_rate(self, value: Any) -> Any:
        """Return ``value``, the rate that the program computed for the next update, times the factor that commands have
        set. A program that writes ``group["lr"]`` itself, as in a callback of its own, calls this each time."""
        return self._live.learning_rate(value)

    def _register_restarts(self) -> None:
        unattended = _NEEDS_RESTART.format(self._restarter)
        reason = self.loop.no_restart_because if self.loop is not None else unattended
        for action, handler in self._restart_handlers.items():
            if reason:
                self.medic.cannot(action, reason)
            else:
                self.medic.on(action, how="restart", in_force=self._in_force.get(action))(handler)

    def _training_begins(
        self, optimizer: Any, scheduler: Any, directory: Path, checkpoint: Path | None, writes: bool
    ) -> None:
        """Take note that the loop begins, from ``checkpoint`` if any; this run's checkpoints go to ``directory``."""
        self._live.loop_begins(optimizer, scheduler)
        _join_ranks(self.medic)
        self._live.recall(directory, checkpoint, writes)

    def _measure(self, trained: Sequence[Any], knows_all_waiting: bool = True) -> None:
        """Measure the steps from now on: what their time goes into, and where asked for, the norms of the layers.

        ``trained`` are the models; ``knows_all_waiting`` says that the ranks wait for each other nowhere unseen.
        """
        models = trained if knows_all_waiting else ()
        self._end_measuring()
        self._meter = StepMeter(models, self.medic.world_size)
        self._layer_norms = LayerNorms(trained, self._live.optimizers, self.medic)
        if self.loop is not None:
            self.loop.meter = self._meter

    def _loop_ends(self) -> None:
        """Take note that the loop ends, for good or to begin again."""
        self._end_measuring()
        self._live.loop_ends(is_for_good=self.loop is None or not self.loop.restarts.is_asked)

    def _end_measuring(self) -> None:
        self._meter.close()
        if self._layer_norms is not None:
            self._layer_norms.close()

    def _parts_of_step(self, step: int) -> Mapping[str, Any]:
        """The arguments of `Medic.report` that say what the time since the last report went into."""
        self._meter.step_ends()
        return self._meter.take(self.medic.progress.steps_to(step))

    def _arm(self) -> None:
        """Allow interrupting the loop until `_disarm`, if it hangs."""
        if self.loop is not None:
            self.loop.restarts.arm()

    def _disarm(self) -> None:
        if self.loop is not None:
            self.loop.restarts.disarm()

    def _between_steps(self, work: Callable[[], None]) -> None:
        """Call `work`, which is not interrupted: what a command changes must not be left half done."""
        self._disarm()
        try:
            work()
        finally:
            self._arm()

    def _carry_out(self, step: int) -> None:
        """A step is complete: carry out the commands that are due now, and return when no pause lasts."""
        if self.loop is not None:
            self.loop.stepped(step)
        self._live.step_done()
        self.medic.commands(step)
        if self._live.pause.lasts and self.loop is not None:
            self.loop.proof.finish(PAUSED)
        self._live.pause.wait(step)

    @property
    def _required_loop(self) -> AnyLoop:
        """The loop, for handlers that are registered only if there is one."""
        assert self.loop is not None
        return self.loop


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
