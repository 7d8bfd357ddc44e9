"""A plain PyTorch training loop under Trainmedic's care: its batches, its steps, and what happens between them.

The loop stays the user's own::

    for batch in run.batches():
        with run.step() as step:
            ...
            step.report(loss=loss, grad_norm=norm)

At the end of each ``with`` lies the step boundary: there, and nowhere else, commands are carried out. A rollback
moves what ``batches`` gives next, so the loop never notices. Not here: the commands themselves (``handlers``),
going back to a checkpoint (``returning``), where batches come from (``feeds``), where checkpoints go (``storage``),
the making of a run (``attaching``).
"""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import Any, Iterator, Mapping

from trainmedic.client import Medic
from trainmedic.errors import ConfigurationError, Interrupted, Refusal
from trainmedic.job.interrupt import Interrupter
from trainmedic.job.parameters import Rollback
from trainmedic.job.progress import CHECKPOINT, number
from trainmedic.recovery.changes import AppliedChanges
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.pausing import LoopPause
from trainmedic.recovery.rollback_budget import RollbackBudget
from trainmedic.torch import randomness
from trainmedic.torch.batch_sources import BatchSource
from trainmedic.torch.checkpoint_storage import CheckpointStorage
from trainmedic.torch.learning_rate import LearningRate
from trainmedic.torch.restore import CheckpointRestore
from trainmedic.torch.state_parts import StateParts
from trainmedic.torch.steps import Step

log = logging.getLogger("trainmedic")

_EMPTY_EPOCHS = 3  # in a row, after which there is nothing left to train on


class Run:
    """A training run. Made by `trainmedic.torch.attach`; also a context manager that closes it.

    ``global_step`` is how many optimizer steps were done; a rollback sets it back. ``accumulation`` is how many
    batches make a step. ``stopping`` is true once the run was told to stop, which ends ``batches``.
    """

    def __init__(
        self,
        medic: Medic,
        parts: StateParts,
        rate: LearningRate,
        feed: BatchSource | None,
        storage: CheckpointStorage | None,
        budget: RollbackBudget,
        changes: AppliedChanges,
        accumulation: int,
        every: int | None,
        at_start: bool = False,
    ) -> None:
        self.medic = medic
        self.parts = parts
        self.rate = rate
        self.feed = feed
        self.storage = storage
        self.budget = budget
        self.changes = changes
        self.accumulation = self.own_accumulation = accumulation
        self.own_batch_size = feed.batch_size if feed is not None else None
        self.own_workers = feed.workers if feed is not None else None
        self.every = every
        self._begins = at_start  # whether a checkpoint is due before the next step
        self.global_step = 0
        self.stopping = False
        self.pause = LoopPause(medic)
        self.was_interrupted = False
        """Whether the step that the present boundary follows was interrupted, so that the state is not whole."""
        self.returning = CheckpointRestore(self)
        self._newest: SavedCheckpoint | None = None  # the checkpoint that holds the present state, if one does
        self._done = 0  # batches of the present step
        self._losses: list[Any] = []
        # With several ranks, where a step hangs on one of them the others wait for it in a collective: getting
        # one out of it leaves the rest there.
        self._interrupter = Interrupter(
            self._is_worth_interrupting, lambda: medic.stall().is_hang, enabled=medic.world_size == 1
        )
        self.begin, self.end = self._interrupter.arm, self._interrupter.disarm
        if self._interrupter.works:
            medic.on_arrival = self._interrupter.look
        self._progress = medic.progress
        self._samples: float | None = None  # of a step, as far as the loader says; looked up with the rates

    # --- the training loop's calls ----------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Number of the present epoch, from 0. A rollback may set it back."""
        return self.feed.epoch if self.feed is not None else 0

    @property
    def lr_scale(self) -> float:
        """What commands have multiplied the learning rate by; for loops that set the rate by hand."""
        return self.rate.scale

    def batches(self, epochs: int | None = None, steps: int | None = None) -> Iterator[Any]:
        """The batches, epoch after epoch, until ``epochs`` are over, ``steps`` are done or the run is to stop.

        Both count from the beginning of the training, so that a run that was resumed ends where it would have.
        """
        feed = self.feed
        if feed is None:
            raise ConfigurationError("batches() needs a loader: attach(..., loader=...)")
        if self._begins:
            self._save_at_start()
        empty = 0
        while not self.stopping and (steps is None or self.global_step < steps):
            epoch, place = feed.epoch, feed.place
            if epochs is not None and epoch >= epochs:
                break
            try:
                self.begin()
                try:
                    batch = feed.next()
                finally:
                    self.end()
            except StopIteration:
                empty = empty + 1 if place == 0 and not feed.left_out.holds(epoch, 0) else 0
                if empty >= _EMPTY_EPOCHS:
                    break
                continue
            except Interrupted:
                self._loading_was_interrupted(feed)
                continue
            empty = 0
            yield batch

    def step(self) -> Step:
        """``with run.step() as step:`` around the work on one batch; commands are carried out at its end."""
        if self._begins:
            self._save_at_start()
        return Step(self, self.global_step + 1, self._done + 1 >= self.accumulation)

    def checkpoint(self) -> SavedCheckpoint | None:
        """Write one now, between two steps; None without a place for it. Raises what the storage raises.

        In a job of several ranks each of them calls it.
        """
        return self.save() if self.storage is not None else None

    def resume(self) -> int | None:
        """Go on from the newest complete checkpoint; the step it is of, or None where there is none.

        What commands had changed is changed again. In a job of several ranks each of them calls it. Raises
        TrainmedicError where there are checkpoints and none of them can be loaded: beginning anew would sooner
        or later overwrite them.
        """
        return self.returning.resume()

    def state_dict(self) -> dict[str, Any]:
        """The run's own state: its step, place in the data, random generators, what was changed."""
        return {
            "v": 1,
            "step": self.global_step,
            "feed": self.feed.state() if self.feed is not None else None,
            "random": randomness.capture(),
            "lr_scale": self.rate.scale,
            "changes": self.changes.state(),
            "loss": number(self.medic.progress.loss),
        }

    def close(self) -> None:
        """End loading, and leave signals as they were. The medic stays connected."""
        if self.medic.on_arrival == self._interrupter.look:
            self.medic.on_arrival = None
        self._interrupter.close()
        if self.feed is not None:
            self.feed.stop_loading()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- a step's calls ---------------------------------------------------------------------------------

    def report(self, step: Step, loss: Any, grad_norm: Any, samples: float | None, more: Mapping[str, Any]) -> None:
        """Of a step of several batches, the last one reports, with the mean of the losses."""
        if self.accumulation > 1:
            if loss is not None:
                self._losses.append(loss.detach() if hasattr(loss, "detach") else loss)
            if not step.is_update:
                return
            if self._losses:
                loss, self._losses = sum(self._losses) / len(self._losses), []
        progress = self._progress
        number = progress.step = step.number
        if (
            time.perf_counter() < progress.next_look
            and samples is None
            and type(loss) is not float
            and type(grad_norm) is not float
            and not more
        ):
            return  # the next look counts this step as well
        if self.feed is not None and self.feed.batch_size is not None:
            self._samples = self.feed.batch_size * self.accumulation * self.medic.world_size
        if samples is None and self._samples is not None:
            samples = self._samples * progress.steps_to(number)
        more = {"learning_rate": self.rate.present, "expected_learning_rate": self.rate.expected, **more}
        self.medic.report(number, loss, grad_norm, samples=samples, **more)

    def complete(self, step: Step) -> None:
        """A batch is done. With the last one of a step comes the boundary."""
        self._done += 1
        if not step.is_update:
            return
        self._done = 0
        self.global_step = step.number
        self._newest = None
        if not step.is_reported:
            self.report(step, None, None, None, {})
        # Nearly every step ends here, and what it costs is what it touches: the step's work has emptied the caches.
        if not self.medic.is_quiet(step.number) or (self.every is not None and step.number % self.every == 0):
            self._boundary()

    def interrupted(self) -> None:
        """The step hung and was ended; what it had done by then is anybody's guess."""
        log.warning("%s: step %d hung and was interrupted", self.medic.job, self.global_step + 1)
        self._newest = None
        self._boundary(interrupted=True)

    # --- the boundary -----------------------------------------------------------------------------------

    def _boundary(self, interrupted: bool = False) -> None:
        """Nothing in here may end the training, but a state that is not whole. Raises HalfLoaded."""
        rollbacks = self.returning.rollbacks
        self.was_interrupted = interrupted
        try:
            for command in self.medic.commands(self.global_step):
                command.unsupported()
            if self.pause.lasts:
                self.pause.hold(self.global_step)
            if self.returning.rollbacks != rollbacks or self.returning.broken is not None:
                pass
            elif interrupted:
                self._go_on_after_interruption()
            elif self.every is not None and self.global_step % self.every == 0:
                self._save_regularly()
        except Exception:
            log.exception("%s: a step boundary failed; training goes on", self.medic.job)
        finally:
            self.was_interrupted = False
        if self.returning.broken is not None:
            raise self.returning.broken

    def _go_on_after_interruption(self) -> None:
        self._done = 0
        self._losses = []
        self.parts.forget_gradients()
        if not self.stopping:
            log.error("%s: the interrupted step was not rolled back; training goes on without it", self.medic.job)

    def _loading_was_interrupted(self, feed: BatchSource) -> None:
        """The loader hung. It is begun anew where it was, unless a rollback leads elsewhere."""
        log.warning("%s: the data loader hung and was interrupted", self.medic.job)
        rollbacks, state = self.returning.rollbacks, feed.state()
        feed.stop_loading()
        self._boundary(interrupted=True)
        if self.returning.rollbacks == rollbacks and not self.stopping:
            with randomness.preserved():
                feed.restore(state)

    def _is_worth_interrupting(self) -> bool:
        """Whether a command waits that helps a loop that hangs, and would be carried out. In another thread."""
        for command in self.medic.unanswered():
            if command.action == "job.stop":
                return True
            if isinstance(command.parameters, Rollback) and self.storage is not None:
                try:
                    self.returning.choose(command.parameters)
                except Refusal:
                    continue
                return True
        return False

    # --- checkpoints ------------------------------------------------------------------------------------

    def is_at(self, one: SavedCheckpoint) -> None:
        """The state is now that of a checkpoint."""
        self.parts.forget_gradients()
        self.global_step = self.medic.step = one.step
        self._done, self._losses = 0, []
        self._newest = one

    def save(self, prune: bool = True) -> SavedCheckpoint:
        """A checkpoint of the present state; the one that there is, if it was written or loaded just now."""
        assert self.storage is not None
        if self.returning.broken is not None:
            raise self.returning.broken
        if self._newest is not None:
            return self._newest
        with self.medic.window(CHECKPOINT):
            found = self.storage.save(self.global_step, self.parts, self.state_dict())
            self._newest = found
            self.medic.saved(found.step)
            try:
                if prune:
                    self.changes.settle()
                    self.storage.prune()
            except OSError as error:
                log.warning("%s: old checkpoints could not be deleted: %s", self.medic.job, error)
        return found

    def _save_at_start(self) -> None:
        """Before the first step, for what goes wrong before the first regular one; not where it was resumed.

        Nothing is deleted for it: whoever has only forgotten to resume has not done any work yet.
        """
        self._begins = False
        if self._newest is None:
            self._save_regularly(prune=False)

    def _save_regularly(self, prune: bool = True) -> None:
        if self.storage is None:
            return
        began = time.monotonic()
        try:
            self.save(prune)
        except Exception:
            seconds = time.monotonic() - began
            log.exception("%s: no checkpoint of step %d, after %.1f s", self.medic.job, self.global_step, seconds)
