"""A plain PyTorch training loop under Trainmedic's care: its batches, its steps, and what happens between them.

The loop stays the user's own::

    for batch in run.batches():
        with run.step() as step:
            ...
            step.report(loss=loss, grad_norm=norm)

At the end of each ``with`` lies the step boundary: there, and nowhere else, commands are carried out. A rollback
moves what ``batches`` gives next, so the loop never notices. Not here: the commands themselves (``handlers``),
where batches come from (``feeds``), where checkpoints go (``storage``), the making of a run (``attaching``).
"""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import Any, Iterator, Mapping, Sequence

from trainmedic import checkpoints
from trainmedic.budget import Budget
from trainmedic.changes import ACCUMULATION, BATCH_SIZE, LEARNING_RATE, Changes, whole
from trainmedic.checkpoints import Found
from trainmedic.client import Medic
from trainmedic.errors import ConfigurationError, Interrupted, Refusal
from trainmedic.interrupt import Interrupter
from trainmedic.parameters import Rollback
from trainmedic.pausing import Pause
from trainmedic.progress import CHECKPOINT, number
from trainmedic.torch import randomness
from trainmedic.torch.feeds import Feed
from trainmedic.torch.learning_rate import LearningRate
from trainmedic.torch.parts import Parts
from trainmedic.torch.steps import Step
from trainmedic.torch.storage import Storage, Unusable

log = logging.getLogger("trainmedic")

NOT_KEPT = "the checkpoint does not hold the place in the data; it goes on with the batches that come"
_EMPTY_EPOCHS = 3  # in a row, after which there is nothing left to train on


class Run:
    """A training run. Made by `trainmedic.torch.attach`; also a context manager that closes it.

    ``global_step`` is how many optimizer steps were done; a rollback sets it back. ``accumulation`` is how many
    batches make a step. ``stopping`` is true once the run was told to stop, which ends ``batches``.
    """

    def __init__(
        self,
        medic: Medic,
        parts: Parts,
        rate: LearningRate,
        feed: Feed | None,
        storage: Storage | None,
        budget: Budget,
        changes: Changes,
        accumulation: int,
        every: int | None,
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
        self.global_step = 0
        self.stopping = False
        self.pause = Pause(medic)
        self.was_interrupted = False
        """Whether the step that the present boundary follows was interrupted, so that the state is not whole."""
        self._newest: Found | None = None  # the checkpoint that holds the present state, if one does
        self._rollbacks = 0
        self._done = 0  # batches of the present step
        self._losses: list[Any] = []
        self._progress = medic.progress
        self._samples: float | None = None  # of a step, as far as the loader says; looked up with the rates
        self._interrupter = Interrupter(self._is_worth_interrupting, lambda: medic.stall().is_hang)
        medic.on_arrival = self._interrupter.look

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
        empty = 0
        while not self.stopping and (steps is None or self.global_step < steps):
            epoch, place = feed.epoch, feed.place
            if epochs is not None and epoch >= epochs:
                break
            try:
                with self._interrupter.armed():
                    batch = feed.next()
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
        return Step(self, self.global_step + 1, self._done + 1 >= self.accumulation)

    def checkpoint(self) -> Found | None:
        """Write one now, between two steps; None without a place for it. Raises what the storage raises."""
        return self.save() if self.storage is not None else None

    def resume(self) -> int | None:
        """Go on from the newest complete checkpoint; the step it is of, or None where there is none.

        What commands had changed is changed again. Raises TrainmedicError where there are checkpoints and none
        of them can be loaded: beginning anew would sooner or later overwrite them.
        """
        if self.storage is None:
            return None
        found = checkpoints.newest_first(self.storage.found())
        if not found:
            self.changes.forget()
            self.budget.renew()
            return None
        one, state, wrong = self._load_first(found)
        self.changes.recall(None if state is None else state.get("changes"))
        self._take_over(one, state, resumed=True)
        if wrong:
            log.warning("%s: resumed from an older checkpoint: %s", self.medic.job, "; ".join(wrong))
        return self.global_step

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

    def begin(self) -> None:
        self._interrupter.arm()

    def end(self) -> None:
        self._interrupter.disarm()

    def report(self, step: Step, loss: Any, grad_norm: Any, samples: float | None, more: Mapping[str, Any]) -> None:
        """Of a step of several batches, the last one reports, with the mean of the losses."""
        if self.accumulation > 1:
            if loss is not None:
                self._losses.append(loss.detach() if hasattr(loss, "detach") else loss)
            if not step.is_update:
                return
            if self._losses:
                loss, self._losses = sum(self._losses) / len(self._losses), []
        progress, now = self._progress, time.perf_counter()
        if not more and now < progress.next_look:
            # What a step costs here is what is touched in memory: the step's own work has emptied the caches.
            progress.note(step.number, loss, grad_norm, None, self._samples if samples is None else samples, now)
            return
        if self.feed is not None and self.feed.batch_size is not None:
            self._samples = self.feed.batch_size * self.accumulation * self.medic.world_size
        if samples is None:
            samples = self._samples
        more = {"learning_rate": self.rate.present, "expected_learning_rate": self.rate.expected, **more}
        self.medic.report(step.number, loss, grad_norm, samples=samples, **more)

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
        self._boundary()

    def interrupted(self) -> None:
        """The step hung and was ended; what it had done by then is anybody's guess."""
        log.warning("%s: step %d hung and was interrupted", self.medic.job, self.global_step + 1)
        self._newest = None
        self._boundary(interrupted=True)

    # --- the boundary -----------------------------------------------------------------------------------

    def _boundary(self, interrupted: bool = False) -> None:
        """Nothing in here may end the training."""
        rollbacks = self._rollbacks
        self.was_interrupted = interrupted
        try:
            for command in self.medic.commands(self.global_step):
                command.unsupported()
            if self.pause.lasts:
                self.pause.hold(self.global_step)
            if self._rollbacks != rollbacks:
                return
            if interrupted:
                self._go_on_after_interruption()
            elif self.every is not None and self.global_step % self.every == 0:
                self._save_regularly()
        except Exception:
            log.exception("%s: a step boundary failed; training goes on", self.medic.job)
        finally:
            self.was_interrupted = False

    def _go_on_after_interruption(self) -> None:
        self._done = 0
        self._losses = []
        self.parts.forget_gradients()
        if not self.stopping:
            log.error("%s: the interrupted step was not rolled back; training goes on without it", self.medic.job)

    def _loading_was_interrupted(self, feed: Feed) -> None:
        """The loader hung. It is begun anew where it was, unless a rollback leads elsewhere."""
        log.warning("%s: the data loader hung and was interrupted", self.medic.job)
        rollbacks, state = self._rollbacks, feed.state()
        feed.stop_loading()
        self._boundary(interrupted=True)
        if self._rollbacks == rollbacks and not self.stopping:
            with randomness.kept():
                feed.restore(state)

    def _is_worth_interrupting(self) -> bool:
        """Whether a command waits that helps a loop that hangs, and would be carried out. In another thread."""
        for command in self.medic.unanswered():
            if command.action == "job.stop":
                return True
            if isinstance(command.parameters, Rollback) and self.storage is not None:
                try:
                    self.choose(command.parameters)
                except Refusal:
                    continue
                return True
        return False

    # --- checkpoints ------------------------------------------------------------------------------------

    def save(self) -> Found:
        """A checkpoint of the present state; the one that there is, if it was written or loaded just now."""
        assert self.storage is not None
        if self._newest is not None:
            return self._newest
        with self.medic.window(CHECKPOINT):
            found = self.storage.save(self.global_step, self.parts, self.state_dict())
            self._newest = found
            self.medic.saved(found.step)
            try:
                self.storage.prune()
            except OSError as error:
                log.warning("%s: old checkpoints could not be deleted: %s", self.medic.job, error)
        return found

    def _save_regularly(self) -> None:
        if self.storage is None:
            return
        began = time.monotonic()
        try:
            self.save()
        except Exception:
            seconds = time.monotonic() - began
            log.exception("%s: no checkpoint of step %d, after %.1f s", self.medic.job, self.global_step, seconds)

    def choose(self, wanted: Rollback) -> list[Found]:
        """The checkpoints that a rollback may go to, best first. Raises Rejected."""
        assert self.storage is not None
        fitting = checkpoints.candidates(self.storage.found(), wanted, self.global_step)
        self.budget.check(fitting[0].step, self.global_step)
        return fitting

    def roll_back(self, fitting: Sequence[Found], skip_batches: int) -> Mapping[str, Any]:
        """Go back to the first of `fitting` that can be loaded; what the answer tells. Raises Unusable."""
        left, loss = self.global_step, number(self.medic.progress.loss)
        one, state, wrong = self._load_first(fitting)
        self._rollbacks += 1
        told = self._take_over(one, state, skip_batches)
        self._keep_account(one, left, told)
        if loss is not None:
            told["loss_before"] = loss
        if wrong:
            told["unusable"] = wrong
        told["left_step"] = left
        return told

    def _load_first(self, fitting: Sequence[Found]) -> tuple[Found, Mapping[str, Any] | None, list[str]]:
        assert self.storage is not None
        wrong: list[str] = []
        for one in fitting:
            try:
                return one, self.storage.load(one, self.parts), wrong
            except Unusable as error:
                log.error("%s: %s", self.medic.job, error)
                wrong.append(str(error))
        raise Unusable(f"no checkpoint could be loaded: {'; '.join(wrong)}")

    def _take_over(
        self, one: Found, state: Mapping[str, Any] | None, skip_batches: int = 0, resumed: bool = False
    ) -> dict[str, Any]:
        """The parts were loaded; now the run's own state. What was changed by commands stays changed."""
        self.rate.loaded(None if state is None else state["lr_scale"], self.changes.scale(LEARNING_RATE))
        if resumed:
            self._change_as_before()
        self.parts.forget_gradients()
        self.global_step = self.medic.step = one.step
        self._done, self._losses = 0, []
        told: dict[str, Any] = {"step": one.step, "checkpoint": str(getattr(one.path, "name", one.path))}
        told["saved_at"] = one.at.isoformat()
        if self.feed is not None:
            told["data"] = self._move_feed(self.feed, state, skip_batches, resumed)
            told["skipped_batches"] = skip_batches
        told["learning_rate"] = self.rate.value
        if state is not None:
            randomness.restore(state["random"])
            told["loss_at_checkpoint"] = state["loss"]
        self._newest = one
        return told

    def _move_feed(self, feed: Feed, state: Mapping[str, Any] | None, skip_batches: int, resumed: bool) -> str:
        kept = state["feed"] if state is not None else None
        if resumed:
            for epoch, start, stop in self.changes.left_out:
                feed.left_out.add(epoch, start, stop)
        data = NOT_KEPT
        if kept is not None:
            data = feed.restore(kept) if feed.knows(kept) else feed.begin_anew(kept["epoch"])
        if skip_batches:
            feed.leave_out(skip_batches)
        return data

    def _keep_account(self, one: Found, left: int, told: dict[str, Any]) -> None:
        """Of a rollback that was carried out. What fails in here does not undo it."""
        assert self.storage is not None
        told.update(self.budget.spend(one.step, left))
        if self.feed is not None:
            self.changes.left_out = [list(span) for span in self.feed.left_out.ranges]
            self.changes.save()
        try:
            self.storage.went_back(one, {"why": "a rollback went back to it", "step": one.step, "left_step": left})
        except OSError as error:
            log.warning("%s: the checkpoint that was gone back to could not be marked: %s", self.medic.job, error)

    def _change_as_before(self) -> None:
        """After a restart: batch size, accumulation and workers as commands had set them."""
        feed = self.feed
        try:
            self.accumulation = whole(self.own_accumulation, self.changes.factors(ACCUMULATION), "the accumulation")
            if feed is not None and self.own_batch_size is not None and self.changes.factors(BATCH_SIZE):
                factors = self.changes.factors(BATCH_SIZE)
                feed.set_batch_size(whole(self.own_batch_size, factors, "the batch size", round_down=True))
            if feed is not None and self.changes.workers is not None and feed.workers is not None:
                feed.set_workers(self.changes.workers)
        except Refusal as error:
            log.warning("%s: what commands had changed does not fit any more: %s", self.medic.job, error)
