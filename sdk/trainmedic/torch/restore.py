"""Return to a checkpoint by a rollback or after a restart, the same on all ranks."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any, Mapping, Sequence

from trainmedic.errors import Refusal, Rejected, described
from trainmedic.job.group import Group
from trainmedic.job.parameters import Rollback
from trainmedic.job.reported_values import number
from trainmedic.recovery import checkpoints
from trainmedic.recovery.changes import ACCUMULATION, BATCH_SIZE, LEARNING_RATE, scaled_whole
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.choice import Choice, agree, choose
from trainmedic.recovery.health import Onset, onset_of, problem
from trainmedic.recovery.rollback_budget import RollbackCount
from trainmedic.torch import randomness
from trainmedic.torch.checkpoints.checkpoint_storage import (
    CheckpointDirectory,
    CheckpointStorage,
    UnusableCheckpoint,
)
from trainmedic.torch.checkpoints.checkpoint_tiers import without_memory
from trainmedic.torch.checkpoints.joint_checkpoints import JointCheckpointDirectory
from trainmedic.torch.checkpoints.loading import CheckpointLoading, LoadedCheckpoint, RunState
from trainmedic.torch.loss_course import CompletedRollback, begin_comparison
from trainmedic.torch.sources.batch_sources import NOT_REPLAYED, REPLAYED, BatchSource, ForwardSource
from trainmedic.torch.training_state import TrainingState

log = logging.getLogger("trainmedic")

# Texts of the answer's ``data``, except the errors CANNOT_SKIP… and BETWEEN_EPOCHS.
BETWEEN_EPOCHS = (
    "the loop counts its epochs by itself, so its code between two of them, such as scheduler.step(), does not run "
    "again after epoch {}; use: for epoch in run.epochs(count)"
)
NO_POSITION = "the checkpoint does not hold the data position; training continues with the next batches"
UNKNOWN_BATCHES = "not known: the loop draws its own batches"
OTHER_BATCHES = "the same samples again, in other batches: their size, or what loads them, has changed since"
UNKNOWN_STREAM = (
    "not known: the stream goes on, or starts where carried state, as of attach(also=...) or random generators, puts it"
)
CANNOT_SKIP_IN_STREAM = (
    "the loader is a stream that carried state, as of attach(also=...) or random generators, may put back, so it is "
    "not known which batches come next, and none can be skipped: pass a loader that can go back, such as one with "
    "state_dict and load_state_dict, to attach(loader=...), or roll back without skip_batches"
)
CANNOT_SKIP = (
    "the loop draws its own batches, so none of them can be skipped: pass their source, or the function that draws "
    "one, to attach(loader=...)"
)
FETCHED_AHEAD = (
    f"{NOT_REPLAYED}: the loop fetches each batch during the step before, so it continues with a batch from before "
    "the rollback and misses the first one after the checkpoint; fetch each right before its step"
)
PERHAPS_AHEAD = (
    "not known: the loop has fetched more than one batch by the end of its first step; if the last one is for the next "
    "step, training continues with it and misses the first one after the checkpoint"
)


class CheckpointRestore:
    def __init__(self, training: TrainingState) -> None:
        self._training = training
        self._loading = CheckpointLoading(training)
        # Checkpoints of an earlier training, by path and time. Rollbacks skip them, unless this training resumes from
        # one.
        self._foreign = _existing_checkpoints(training.storage)
        disk = getattr(training.storage, "disk", training.storage)  # without memory
        if isinstance(disk, JointCheckpointDirectory):
            disk.check_rank_count = training.check_rank_count

    def choose(self, rollback: Rollback, onset: Onset | None = None) -> Choice:
        """Return checkpoints for a fault that began at ``onset``. Raises Rejected."""
        # The interrupter's thread calls it too. It must not read losses, so it passes no onset.
        training = self._training
        if training.batch_source is None and rollback.skip_batches:
            raise Rejected(CANNOT_SKIP)
        if rollback.skip_batches and self._may_be_put_back():
            raise Rejected(CANNOT_SKIP_IN_STREAM)
        own = [
            checkpoint
            for checkpoint in self._storage.checkpoints()
            if (str(checkpoint.path), checkpoint.at) not in self._foreign
        ]
        choice = choose(own, rollback, training.global_step, onset, training.budget.spent)
        training.budget.check(choice.best.step, training.global_step)
        return choice

    def roll_back(self, rollback: Rollback, group: Group) -> Mapping[str, Any]:
        """Return to the best loadable checkpoint; return the answer's output.

        After any error but HalfLoaded no rank has changed.
        """
        training = self._training
        if self._foreign and training.rollbacks == 0:
            training.budget.reset()  # counted for the earlier training
        progress = training.medic.progress
        onset = onset_of(rollback, progress)
        choice = agree(group, lambda: self.choose(rollback, onset))
        left_step, loss = training.global_step, number(progress.loss)
        loaded, output = self._load(choice.candidates, group, rollback.skip_batches)
        checkpoint = loaded.checkpoint
        training.rollbacks += 1
        progress.go_back(checkpoint.step, output.get("loss_at_checkpoint"))
        self._compare_losses(loaded.run_state, output["data"], rollback.skip_batches, onset)
        training.rank_comparison.reset_after_rollback()
        output.update(self._record_rollback(checkpoint, left_step))
        if loss is not None:
            output["loss_before"] = loss
        if loaded.unusable:
            output["unusable"] = loaded.unusable
        if choice.passed_over:
            output["passed_over"] = choice.passed_over_json()
        source, lone = training.batch_source, training.lone_epoch
        if source is not None and lone is not None and source.epoch < lone:
            output["between_epochs"] = BETWEEN_EPOCHS.format(source.epoch)
            log.warning("%s: %s", self._job, output["between_epochs"])
        output["left_step"] = left_step
        output["verified"] = {"parameters": loaded.verified}
        if carried := output.pop("carried", None):
            output["verified"]["carried"] = carried
        log.warning("%s: went back from step %d to the checkpoint of step %d", self._job, left_step, checkpoint.step)
        return output

    def _compare_losses(self, run_state: RunState | None, data: str, skipped: int, onset: Onset | None) -> None:
        training, state = self._training, run_state or {}
        # From the losses and from the comparison of the ranks' weights.
        faults = [None if onset is None else onset.step, training.rank_comparison.trouble_at]
        rollback = CompletedRollback(
            step=training.global_step,
            data=data,
            skipped=skipped,
            accumulation=training.accumulation,
            accumulation_then=(state.get("losses") or {}).get("accumulation", training.accumulation),
            is_scaled_otherwise=state.get("lr_scale", training.rate.scale) != training.rate.scale,
            trouble_at=min((step for step in faults if step is not None), default=None),
            has_state=run_state is not None,
            has_random=state.get("random") is not None,
            may_be_same=data in (UNKNOWN_BATCHES, UNKNOWN_STREAM),
        )
        begin_comparison(training.loss_log, rollback, training.parts.modules().values())

    def resume(self) -> int | None:
        training = self._training
        if training.storage is None:
            return None
        group = training.medic.group("resume")
        candidates = checkpoints.as_seen_by_rank_0(group, self._candidates_for_resume)
        if not candidates:
            training.changes.forget()
            training.budget.reset()
            return None
        try:
            loaded, output = self._load(candidates, group, resumed=True)
        except UnusableCheckpoint as error:
            raise UnusableCheckpoint(f"{error}; to start afresh, move them away") from error
        self._foreign = frozenset()  # this training continues theirs
        if different := output.get("carried", {}).get("different"):
            log.error("%s: carried state differs from what was saved: %s", self._job, different)
        if loaded.unusable:
            log.warning("%s: resumed from an older checkpoint: %s", self._job, "; ".join(loaded.unusable))
        if output["data"].startswith((NOT_REPLAYED, UNKNOWN_STREAM)):
            log.warning("%s: resumed from step %d; batches: %s", self._job, training.global_step, output["data"])
        return training.global_step

    def warn_of_foreign_checkpoints(self) -> None:
        if self._foreign:
            message = (
                "%s: %s holds %d checkpoints of an earlier training, which this one did not resume; it will "
                "overwrite and delete them. To keep them, stop it and call run.resume(), or give it another directory"
            )
            log.warning(message, self._job, self._storage.directory, len(self._foreign))

    def _candidates_for_resume(self) -> list[SavedCheckpoint]:
        ordered = checkpoints.healthy_first(self._storage.checkpoints())
        healthy = [checkpoint for checkpoint in ordered if not problem(checkpoint.health)]
        if any(checkpoint.step for checkpoint in healthy):
            # Prefer any other to step 0, from which they would all be overwritten.
            ordered = [checkpoint for checkpoint in ordered if checkpoint.step]
        newest = max(ordered, key=lambda checkpoint: (checkpoint.at, checkpoint.step), default=None)
        if newest is not None and (why := problem(newest.health)):
            others = "an older one is tried first" if healthy else "so are all others"
            log.warning("%s: the newest checkpoint, %s, is unhealthy, and %s: %s", self._job, newest.name, others, why)
        return ordered

    @property
    def _storage(self) -> CheckpointStorage:
        assert self._training.storage is not None
        return self._training.storage

    @property
    def _job(self) -> str:
        return self._training.medic.job

    def _load(
        self, candidates: Sequence[SavedCheckpoint], group: Group, skip_batches: int = 0, resumed: bool = False
    ) -> tuple[LoadedCheckpoint, dict[str, Any]]:
        """Load on all ranks; return the answer's output too."""
        loaded = self._loading.load_first(candidates, group)
        fault: Exception | None = None
        output: dict[str, Any] = {}
        try:
            if resumed:
                self._recall_changes(loaded, group)
            output = self._adopt_run_state(loaded, skip_batches, resumed)
        except Exception as error:  # any error: the other ranks wait for this report
            fault = error
        # Every rank must reach this poll, failed or not.
        self._loading.confirm_on_all_ranks(group, fault)
        return loaded, output

    def _recall_changes(self, loaded: LoadedCheckpoint, group: Group) -> None:
        changes, budget = self._training.changes, self._training.budget
        changes.recall(None if loaded.run_state is None else loaded.run_state.get("changes"), loaded.checkpoint.step)
        if group.world_size > 1:  # only rank 0 writes the files
            state = group.choose(lambda: {"changes": changes.state(), "spent": asdict(budget.spent)})
            changes.restore(state["changes"])
            budget.spent = RollbackCount(**state["spent"])

    def _adopt_run_state(self, loaded: LoadedCheckpoint, skip_batches: int, resumed: bool) -> dict[str, Any]:
        training, checkpoint, run_state = self._training, loaded.checkpoint, loaded.run_state
        loaded_scale = None if run_state is None else run_state["lr_scale"]
        training.rate.loaded(loaded_scale, training.changes.scale(LEARNING_RATE))
        if resumed:
            training.loss_log.restore(None if run_state is None else run_state.get("losses"), checkpoint.step)
            if run_state is not None and run_state.get("follows_schedule"):
                training.rate.schedule.expect_followed()
            self._keep_global_batch(run_state)
            self._reapply_changes()
        training.reset_to(checkpoint)
        output: dict[str, Any] = {
            "step": checkpoint.step,
            "checkpoint": checkpoint.name,
            "saved_at": checkpoint.at.isoformat(),
        }
        output["data"], left_out = UNKNOWN_BATCHES, 0
        if training.batch_source is not None:
            output["data"], left_out = self._move_batch_source(training.batch_source, run_state, skip_batches, resumed)
            output["skipped_batches"] = skip_batches
        self._move_batch_log(run_state, output["data"], left_out, resumed)
        if not training.rate.has_none:
            output["learning_rate"] = training.rate.value
        if run_state is not None:
            output["carried"] = training.carried.put_back(run_state.get("carried"))
            # Last, because moving the batch source may draw random numbers.
            if run_state["random"] is not None:
                randomness.restore(run_state["random"])
            output["loss_at_checkpoint"] = run_state["loss"]
        return output

    def _move_batch_source(
        self, source: BatchSource, run_state: RunState | None, skip_batches: int, resumed: bool
    ) -> tuple[str, int]:
        """Return the answer's text, and the number of newly skipped batches."""
        state = run_state["feed"] if run_state is not None else None  # the stored name of the batch source's state
        if resumed:
            for epoch, start, stop in self._training.changes.skipped:
                source.skipped.add(epoch, start, stop)
        data = NO_POSITION
        if state is not None:
            data = source.restore(state) if source.can_restore(state) else source.start_epoch(state["epoch"])
        left_out = source.skip(skip_batches) if skip_batches else 0
        order = self._training.fetch_order
        if order.is_ahead:
            data = FETCHED_AHEAD
        elif order.may_be_ahead:
            data = PERHAPS_AHEAD
        elif data == REPLAYED and self._batches_differ(run_state):
            data = OTHER_BATCHES
        elif not data.startswith(REPLAYED) and self._may_be_put_back():
            data = UNKNOWN_STREAM
        return data, left_out

    def _may_be_put_back(self) -> bool:
        source = self._training.batch_source
        if not isinstance(source, ForwardSource) or source.goes_back:
            return False
        return source.uses_random or self._training.carried.may_hold_position

    def _move_batch_log(self, run_state: RunState | None, data: str, left_out: int, resumed: bool) -> None:
        training, batch_log = self._training, self._training.batch_log
        batches = (run_state or {}).get("batches")
        if resumed:
            batch_log.restore(batches)
            if self._batches_differ(run_state):
                batch_log.forget(OTHER_BATCHES)
            return
        drawn = batches["drawn"] if batches else None
        epoch = training.batch_source.epoch if training.batch_source is not None else 0
        not_comparable = "" if data.startswith(REPLAYED) else data
        batch_log.go_back(drawn, epoch, left_out, not_comparable)

    def _batches_differ(self, run_state: RunState | None) -> bool:
        form = ((run_state or {}).get("batches") or {}).get("make")
        return form is not None and list(form) != self._training.batch_form

    def _keep_global_batch(self, run_state: RunState | None) -> None:
        training = self._training
        accumulation = training.accumulation_after(run_state)
        if accumulation != training.script_accumulation:
            message = "%s: with %d ranks %d batches make a step, so that the global batch stays what it was"
            log.warning(message, self._job, training.medic.world_size, accumulation)
            training.script_accumulation = accumulation
            training.set_accumulation(accumulation)

    def _reapply_changes(self) -> None:
        training, source, changes = self._training, self._training.batch_source, self._training.changes
        try:
            training.set_accumulation(
                scaled_whole(training.script_accumulation, changes.factors(ACCUMULATION), "the accumulation")
            )
            factors = changes.factors(BATCH_SIZE)
            if source is not None and training.script_batch_size is not None and factors:
                source.set_batch_size(
                    scaled_whole(training.script_batch_size, factors, "the batch size", round_down=True)
                )
            if source is not None and source.workers is not None:
                count = changes.workers_for(source.workers)
                if count != source.workers:
                    source.set_workers(count)
                elif changes.workers_at_most:  # the script has no more workers, so nothing remains to undo
                    changes.set_workers(None, training.global_step)
        except Refusal as error:
            log.warning("%s: changes by commands no longer fit: %s", self._job, error)

    def _record_rollback(self, checkpoint: SavedCheckpoint, left_step: int) -> Mapping[str, Any]:
        """Count a completed rollback; return that part of the answer."""
        training = self._training
        budget = training.budget.spend(checkpoint.step, left_step)
        training.changes.went_back(checkpoint.step)
        if training.batch_source is not None:
            training.changes.skipped = [list(span) for span in training.batch_source.skipped.ranges]
            training.changes.save()
        try:
            reason = {"why": "a rollback went back to it", "step": checkpoint.step, "left_step": left_step}
            self._storage.rolled_back_to(checkpoint, reason)
        except Exception as error:  # also of a user's storage: the rollback is complete
            note = f"cannot pin its checkpoint, or put all later ones aside: {described(error)}"
            log.error("%s: %s", self._job, note)
            return {**budget, "note": f"{note}. Until it is, a restart may use a later one"}
        return budget


def _existing_checkpoints(storage: CheckpointStorage | None) -> frozenset[tuple[str, Any]]:
    disk = without_memory(storage)
    if not isinstance(disk, CheckpointDirectory):
        return frozenset()
    try:
        return frozenset((str(checkpoint.path), checkpoint.at) for checkpoint in disk.checkpoints())
    except OSError:
        return frozenset()
