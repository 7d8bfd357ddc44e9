"""Going back to a checkpoint, by a rollback or after a restart: which one, loading it, and what the run makes of it.

In a job of several ranks all go back to the same one, or none does. A state that is half loaded, or loaded on
some ranks only, ends the training (`HalfLoaded`): going on would ruin it without a word. Not here: the loading
itself (``storage``), how often one may go back (``budget``).
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from trainmedic.errors import NotAgreed, Refusal
from trainmedic.job.group import Group
from trainmedic.job.parameters import Rollback
from trainmedic.job.progress import number
from trainmedic.recovery import checkpoints
from trainmedic.recovery.changes import ACCUMULATION, BATCH_SIZE, LEARNING_RATE, scaled_whole
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.rollback_budget import RollbackCount
from trainmedic.torch import randomness
from trainmedic.torch.batch_sources import BatchSource
from trainmedic.torch.checkpoint_storage import (
    CheckpointDirectory,
    CheckpointStorage,
    HalfLoaded,
    PartlyLoaded,
    UnusableCheckpoint,
)
from trainmedic.torch.rank_agreement import failures, first_line

if TYPE_CHECKING:
    from trainmedic.torch.run import Run

log = logging.getLogger("trainmedic")

NOT_KEPT = "the checkpoint does not hold the place in the data; it goes on with the batches that come"

State = Mapping[str, Any]


class CheckpointRestore:
    """Of one run. ``rollbacks`` counts those that were carried out; ``broken`` says why there is no going on."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.rollbacks = 0
        self.broken: HalfLoaded | None = None
        # What an earlier training has left, by path and time: unless the run goes on from it, nothing goes back to it.
        self._foreign = _present(run.storage)

    def choose(self, wanted: Rollback) -> list[SavedCheckpoint]:
        """The checkpoints that a rollback may go to, best first. Raises Rejected."""
        run = self._run
        found = [one for one in self._storage.found() if (str(one.path), one.at) not in self._foreign]
        fitting = checkpoints.candidates(found, wanted, run.global_step)
        run.budget.check(fitting[0].step, run.global_step)
        return fitting

    def roll_back(self, wanted: Rollback, group: Group) -> Mapping[str, Any]:
        """Go back to the best checkpoint that can be loaded; what the answer tells.

        Raises Refusal, Unusable and NotAgreed where nothing was changed on any rank, else HalfLoaded, which ends
        the training.
        """
        run = self._run
        if self._foreign and self.rollbacks == 0:
            run.budget.renew()  # what was spent was that training's
        fitting = checkpoints.as_seen_by_rank_0(group, lambda: self.choose(wanted))
        left, loss = run.global_step, number(run.medic.progress.loss)
        one, told, wrong = self._load(fitting, group, wanted.skip_batches)
        self.rollbacks += 1
        self._keep_account(one, left, told)
        if loss is not None:
            told["loss_before"] = loss
        if wrong:
            told["unusable"] = wrong
        told["left_step"] = left
        log.warning("%s: went back from step %d to the checkpoint of step %d", run.medic.job, left, one.step)
        return told

    def resume(self) -> int | None:
        """See `Run.resume`."""
        run = self._run
        if run.storage is None:
            return None
        group = run.medic.group("resume")
        found = checkpoints.as_seen_by_rank_0(group, lambda: checkpoints.newest_first(self._storage.found()))
        if not found:
            run.changes.forget()
            run.budget.renew()
            return None
        # Where others are there, that of step 0 will not do: from there they would all be overwritten.
        found = [one for one in found if one.step] or found
        try:
            _, _, wrong = self._load(found, group, resumed=True)
        except UnusableCheckpoint as error:
            raise UnusableCheckpoint(f"{error}; to begin anew in spite of them, move them away") from error
        self._foreign = frozenset()
        if wrong:
            log.warning("%s: resumed from an older checkpoint: %s", run.medic.job, "; ".join(wrong))
        return run.global_step

    @property
    def _storage(self) -> CheckpointStorage:
        assert self._run.storage is not None
        return self._run.storage

    def _load(
        self, fitting: Sequence[SavedCheckpoint], group: Group, skip_batches: int = 0, resumed: bool = False
    ) -> tuple[SavedCheckpoint, dict[str, Any], list[str]]:
        """Of the first of `fitting` that can be loaded: the checkpoint, what the answer tells, what was wrong
        with those before it."""
        fault: Exception | None = None
        is_loaded = False
        try:
            one, state, wrong = self._load_first(fitting)
            is_loaded = True
            if resumed:
                self._recall(state, group)
            told = self._take_over(one, state, skip_batches, resumed)
        except Exception as error:  # whatever it is, the other ranks have to hear of it
            if not is_loaded and isinstance(error, (Refusal, UnusableCheckpoint, NotAgreed)):
                raise  # the same on all ranks: nothing was changed
            fault = error
        self._confirm(group, fault)
        return one, told, wrong

    def _load_first(self, fitting: Sequence[SavedCheckpoint]) -> tuple[SavedCheckpoint, State | None, list[str]]:
        wrong: list[str] = []
        touched = False
        for one in fitting:
            try:
                return one, self._storage.load(one, self._run.parts), wrong
            except UnusableCheckpoint as error:
                log.error("%s: %s", self._run.medic.job, error)
                wrong.append(str(error))
                touched = touched or isinstance(error, PartlyLoaded)
        if touched:
            raise HalfLoaded("; ".join(wrong))
        raise UnusableCheckpoint(f"no checkpoint could be loaded: {'; '.join(wrong)}")

    def _confirm(self, group: Group, fault: Exception | None) -> None:
        """Whether all ranks are where they should be now. Raises HalfLoaded."""
        if fault is not None:
            log.error("%s: a checkpoint was loaded only in part", self._run.medic.job, exc_info=fault)
        try:
            wrong = failures(group.poll(None if fault is None else first_line(fault)), group)
        except NotAgreed as error:
            wrong = str(error)
        if wrong:
            self.broken = HalfLoaded(
                f"a checkpoint was loaded only in part ({wrong}), so that there is nothing left to train on; start "
                "the job again, to resume from one that is whole, and move away those that cannot be loaded"
            )
            raise self.broken from fault

    def _recall(self, state: State | None, group: Group) -> None:
        """What commands had changed before a restart, and the rollbacks that were counted: as rank 0 reads it."""
        run = self._run
        run.changes.recall(None if state is None else state.get("changes"))
        if group.world_size > 1:
            kept = group.choose(lambda: {"changes": run.changes.state(), "spent": asdict(run.budget.spent)})
            run.changes.restore(kept["changes"])
            run.budget.spent = RollbackCount(**kept["spent"])

    def _take_over(self, one: SavedCheckpoint, state: State | None, skip_batches: int, resumed: bool) -> dict[str, Any]:
        """The parts were loaded; now the run's own state. What was changed by commands stays changed."""
        run = self._run
        run.rate.loaded(None if state is None else state["lr_scale"], run.changes.scale(LEARNING_RATE))
        if resumed:
            self._change_as_before()
        run.is_at(one)
        told: dict[str, Any] = {"step": one.step, "checkpoint": str(getattr(one.path, "name", one.path))}
        told["saved_at"] = one.at.isoformat()
        if run.feed is not None:
            told["data"] = self._move_feed(run.feed, state, skip_batches, resumed)
            told["skipped_batches"] = skip_batches
        told["learning_rate"] = run.rate.value
        if state is not None:
            if state["random"] is not None:
                randomness.restore(state["random"])
            told["loss_at_checkpoint"] = state["loss"]
        return told

    def _move_feed(self, feed: BatchSource, state: State | None, skip_batches: int, resumed: bool) -> str:
        kept = state["feed"] if state is not None else None
        if resumed:
            for epoch, start, stop in self._run.changes.left_out:
                feed.left_out.add(epoch, start, stop)
        data = NOT_KEPT
        if kept is not None:
            data = feed.restore(kept) if feed.knows(kept) else feed.begin_anew(kept["epoch"])
        if skip_batches:
            feed.leave_out(skip_batches)
        return data

    def _keep_account(self, one: SavedCheckpoint, left: int, told: dict[str, Any]) -> None:
        """Of a rollback that was carried out. What fails in here does not undo it."""
        run = self._run
        told.update(run.budget.spend(one.step, left))
        if run.feed is not None:
            run.changes.left_out = [list(span) for span in run.feed.left_out.ranges]
            run.changes.save()
        try:
            why = {"why": "a rollback went back to it", "step": one.step, "left_step": left}
            self._storage.went_back(one, why)
        except OSError as error:
            log.warning("%s: the checkpoint that was gone back to could not be marked: %s", run.medic.job, error)

    def _change_as_before(self) -> None:
        """After a restart: batch size, accumulation and workers as commands had set them."""
        run, feed = self._run, self._run.feed
        try:
            run.accumulation = scaled_whole(run.own_accumulation, run.changes.factors(ACCUMULATION), "the accumulation")
            if feed is not None and run.own_batch_size is not None and run.changes.factors(BATCH_SIZE):
                factors = run.changes.factors(BATCH_SIZE)
                feed.set_batch_size(scaled_whole(run.own_batch_size, factors, "the batch size", round_down=True))
            if feed is not None and run.changes.workers is not None and feed.workers is not None:
                feed.set_workers(run.changes.workers)
        except Refusal as error:
            log.warning("%s: what commands had changed does not fit any more: %s", run.medic.job, error)


def _present(storage: CheckpointStorage | None) -> frozenset[tuple[str, Any]]:
    """The checkpoints in a directory of ours; whoever keeps his own knows which are of this training."""
    try:
        return (
            frozenset((str(one.path), one.at) for one in storage.found())
            if isinstance(storage, CheckpointDirectory)
            else frozenset()
        )
    except OSError:
        return frozenset()
