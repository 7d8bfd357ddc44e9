"""Going back to a checkpoint, by a rollback or after a restart: which one, loading it, and going on from there.

In a job of several ranks all go back to the same one, or none does. A state that is half loaded, or loaded on
some ranks only, ends the training (`HalfLoaded`). Not here: the loading itself (``checkpoint_storage``), how often
one may go back (``recovery.rollback_budget``). Who calls it: `Run.resume`, the handler of ``job.rollback``, and the
interrupter's thread, which only asks whether a rollback would be carried out.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any, Mapping, Sequence

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
from trainmedic.torch.training_state import TrainingState

log = logging.getLogger("trainmedic")

NOT_KEPT = "the checkpoint does not hold the place in the data; it goes on with the batches that come"

KeptState = Mapping[str, Any]
"""What `TrainingState.state_dict` gave when the checkpoint was written."""


class CheckpointRestore:
    """Restores the checkpoints of one training."""

    def __init__(self, training: TrainingState) -> None:
        self._training = training
        # The checkpoints of an earlier training, by path and time. No rollback goes back to them, unless this training
        # resumes from one.
        self._foreign = _already_there(training.storage)

    def choose(self, rollback: Rollback) -> list[SavedCheckpoint]:
        """The checkpoints that a rollback may go to, best first. Raises Rejected."""
        training = self._training
        own = [
            checkpoint
            for checkpoint in self._storage.checkpoints()
            if (str(checkpoint.path), checkpoint.at) not in self._foreign
        ]
        candidates = checkpoints.candidates(own, rollback, training.global_step)
        training.budget.check(candidates[0].step, training.global_step)
        return candidates

    def roll_back(self, rollback: Rollback, group: Group) -> Mapping[str, Any]:
        """Go back to the best checkpoint that can be loaded, and return what the answer says.

        Raises Refusal, UnusableCheckpoint and NotAgreed where nothing was changed on any rank, else HalfLoaded,
        which ends the training.
        """
        training = self._training
        if self._foreign and training.rollbacks == 0:
            training.budget.reset()  # what was spent belongs to the earlier training
        candidates = checkpoints.as_seen_by_rank_0(group, lambda: self.choose(rollback))
        left_step, loss = training.global_step, number(training.medic.progress.loss)
        checkpoint, output, problems = self._load(candidates, group, rollback.skip_batches)
        training.rollbacks += 1
        output.update(self._record_rollback(checkpoint, left_step))
        if loss is not None:
            output["loss_before"] = loss
        if problems:
            output["unusable"] = problems
        output["left_step"] = left_step
        log.warning("%s: went back from step %d to the checkpoint of step %d", self._job, left_step, checkpoint.step)
        return output

    def resume(self) -> int | None:
        """Go on from the newest checkpoint; see `Run.resume`."""
        training = self._training
        if training.storage is None:
            return None
        group = training.medic.group("resume")
        candidates = checkpoints.as_seen_by_rank_0(group, lambda: checkpoints.newest_first(self._storage.checkpoints()))
        if not candidates:
            training.changes.forget()
            training.budget.reset()
            return None
        # Beside others the checkpoint of step 0 will not do: from there they would all be overwritten.
        candidates = [checkpoint for checkpoint in candidates if checkpoint.step] or candidates
        try:
            _, _, problems = self._load(candidates, group, resumed=True)
        except UnusableCheckpoint as error:
            raise UnusableCheckpoint(f"{error}; to begin anew in spite of them, move them away") from error
        self._foreign = frozenset()
        if problems:
            log.warning("%s: resumed from an older checkpoint: %s", self._job, "; ".join(problems))
        return training.global_step

    @property
    def _storage(self) -> CheckpointStorage:
        assert self._training.storage is not None
        return self._training.storage

    @property
    def _job(self) -> str:
        return self._training.medic.job

    # --- loading ----------------------------------------------------------------------------------------

    def _load(
        self, candidates: Sequence[SavedCheckpoint], group: Group, skip_batches: int = 0, resumed: bool = False
    ) -> tuple[SavedCheckpoint, dict[str, Any], list[str]]:
        """Load the first of `candidates` that can be: that checkpoint, what the answer says of it, and what was
        wrong with those before it."""
        fault: Exception | None = None
        is_loaded = False
        try:
            checkpoint, kept, problems = self._load_first(candidates)
            is_loaded = True
            if resumed:
                self._recall_changes(kept, group)
            output = self._take_over(checkpoint, kept, skip_batches, resumed)
        except Exception as error:  # whatever is raised, because the other ranks wait for this rank's report
            if not is_loaded and isinstance(error, (Refusal, UnusableCheckpoint, NotAgreed)):
                raise  # the storage raises it on all ranks alike, and nothing was changed
            fault = error
        # Every rank gets here, whether or not it failed, because the poll inside is a call of all ranks.
        self._confirm_on_all_ranks(group, fault)
        return checkpoint, output, problems

    def _load_first(self, candidates: Sequence[SavedCheckpoint]) -> tuple[SavedCheckpoint, KeptState | None, list[str]]:
        problems: list[str] = []
        is_changed = False
        for checkpoint in candidates:
            try:
                return checkpoint, self._storage.load(checkpoint, self._training.parts), problems
            except UnusableCheckpoint as error:
                log.error("%s: %s", self._job, error)
                problems.append(str(error))
                is_changed = is_changed or isinstance(error, PartlyLoaded)
        if is_changed:
            raise HalfLoaded("; ".join(problems))
        raise UnusableCheckpoint(f"no checkpoint could be loaded: {'; '.join(problems)}")

    def _confirm_on_all_ranks(self, group: Group, fault: Exception | None) -> None:
        """Ask all ranks whether they have loaded the checkpoint. Raises HalfLoaded if one has not."""
        if fault is not None:
            log.error("%s: a checkpoint was loaded only in part", self._job, exc_info=fault)
        try:
            failed = failures(group.poll(None if fault is None else first_line(fault)), group)
        except NotAgreed as error:
            failed = str(error)
        if failed:
            self._training.broken = HalfLoaded(
                f"a checkpoint was loaded only in part ({failed}), so that there is nothing left to train on; start "
                "the job again, to resume from one that is whole, and move away those that cannot be loaded"
            )
            raise self._training.broken from fault

    # --- going on from there ----------------------------------------------------------------------------

    def _recall_changes(self, kept: KeptState | None, group: Group) -> None:
        """After a restart, read what commands had changed and the count of rollbacks; on all ranks as rank 0 does."""
        changes, budget = self._training.changes, self._training.budget
        changes.recall(None if kept is None else kept.get("changes"))
        if group.world_size > 1:
            state = group.choose(lambda: {"changes": changes.state(), "spent": asdict(budget.spent)})
            changes.restore(state["changes"])
            budget.spent = RollbackCount(**state["spent"])

    def _take_over(
        self, checkpoint: SavedCheckpoint, kept: KeptState | None, skip_batches: int, resumed: bool
    ) -> dict[str, Any]:
        """The parts were loaded; now set the rest of the training, and return what the answer says.

        What commands have changed stays changed.
        """
        training = self._training
        training.rate.loaded(None if kept is None else kept["lr_scale"], training.changes.scale(LEARNING_RATE))
        if resumed:
            self._change_as_before()
        training.reset_to(checkpoint)
        output: dict[str, Any] = {
            "step": checkpoint.step,
            "checkpoint": checkpoint.name,
            "saved_at": checkpoint.at.isoformat(),
        }
        if training.batch_source is not None:
            output["data"] = self._move_batch_source(training.batch_source, kept, skip_batches, resumed)
            output["skipped_batches"] = skip_batches
        output["learning_rate"] = training.rate.value
        if kept is not None:
            # Last of all: moving the batch source may draw random numbers.
            if kept["random"] is not None:
                randomness.restore(kept["random"])
            output["loss_at_checkpoint"] = kept["loss"]
        return output

    def _move_batch_source(self, source: BatchSource, kept: KeptState | None, skip_batches: int, resumed: bool) -> str:
        """Go to the checkpoint's position in the data, and say which batches come now."""
        state = kept["feed"] if kept is not None else None  # the stored name of the batch source's state
        if resumed:
            for epoch, start, stop in self._training.changes.skipped:
                source.skipped.add(epoch, start, stop)
        data = NOT_KEPT
        if state is not None:
            data = source.restore(state) if source.knows(state) else source.start_epoch(state["epoch"])
        if skip_batches:
            source.skip(skip_batches)
        return data

    def _change_as_before(self) -> None:
        """After a restart, set batch size, accumulation and workers as commands had set them."""
        training, source, changes = self._training, self._training.batch_source, self._training.changes
        try:
            training.accumulation = scaled_whole(
                training.script_accumulation, changes.factors(ACCUMULATION), "the accumulation"
            )
            factors = changes.factors(BATCH_SIZE)
            if source is not None and training.script_batch_size is not None and factors:
                source.set_batch_size(
                    scaled_whole(training.script_batch_size, factors, "the batch size", round_down=True)
                )
            if source is not None and changes.workers is not None and source.workers is not None:
                source.set_workers(changes.workers)
        except Refusal as error:
            log.warning("%s: what commands had changed does not fit any more: %s", self._job, error)

    def _record_rollback(self, checkpoint: SavedCheckpoint, left_step: int) -> Mapping[str, Any]:
        """Count a rollback that was carried out, and return what the answer says of the budget.

        What fails in here does not undo it.
        """
        training = self._training
        budget = training.budget.spend(checkpoint.step, left_step)
        if training.batch_source is not None:
            training.changes.skipped = [list(span) for span in training.batch_source.skipped.ranges]
            training.changes.save()
        try:
            reason = {"why": "a rollback went back to it", "step": checkpoint.step, "left_step": left_step}
            self._storage.rolled_back_to(checkpoint, reason)
        except OSError as error:
            log.warning("%s: the checkpoint that was gone back to could not be marked: %s", self._job, error)
        return budget


def _already_there(storage: CheckpointStorage | None) -> frozenset[tuple[str, Any]]:
    """The checkpoints that are in a directory of ours when training begins.

    Users who keep their own know which of theirs belong to this training.
    """
    if not isinstance(storage, CheckpointDirectory):
        return frozenset()
    try:
        return frozenset((str(checkpoint.path), checkpoint.at) for checkpoint in storage.checkpoints())
    except OSError:
        return frozenset()
