from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

from trainmedic.errors import is_explained
from trainmedic.job.progress import CHECKPOINT
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.health import CheckpointHealth, health_now
from trainmedic.recovery.memory_slots import Slot
from trainmedic.torch.checkpoints.checkpoint_tiers import TieredCheckpoints, without_memory
from trainmedic.torch.checkpoints.digests import Digests, KnownDigests, are_finite, digests_of, earlier_digests_of
from trainmedic.torch.checkpoints.joint_checkpoints import JointCheckpointDirectory, JointOwnCheckpoints
from trainmedic.torch.checkpoints.rank_states import RankState, compare_states
from trainmedic.torch.checkpoints.state_digests import tensors_of_parts
from trainmedic.torch.memory.memory_checkpoints import is_in_memory
from trainmedic.torch.rank_agreement import first_line
from trainmedic.torch.state_parts import is_sharded
from trainmedic.torch.training_state import TrainingState

log = logging.getLogger("trainmedic")


@dataclass(frozen=True)
class _RankComparison:
    digests: Digests | None  # None without verification
    rank_state: RankState | None  # None with one rank, without agreement, or if the storage keeps each rank's own


class CheckpointWriter:
    # Every rank calls each method at the same step, in the training thread: the ranks compare their states.

    def __init__(self, training: TrainingState) -> None:
        self._training = training

    def save(self, prune: bool = True) -> SavedCheckpoint:
        """Write a checkpoint, unless the state has one on disk. Raises the storage's errors."""
        training = self._training
        assert training.storage is not None
        if training.broken is not None:
            raise training.broken
        current = training.current_checkpoint
        if current is not None and not is_in_memory(current):
            return current
        medic = training.medic
        with medic.window(CHECKPOINT):
            training.loss_log.expect_from(training.global_step)
            compared = self._compare_ranks()
            checkpoint = training.storage.save(training.global_step, training.parts, self._run_state(compared))
            training.current_checkpoint = checkpoint
            medic.saved(checkpoint.step)
            training.changes.checkpoint_written(checkpoint.step)
            try:
                if prune:
                    training.changes.drop_earlier_run()
                    training.storage.prune()
            except Exception as error:  # any error of the user's storage; this checkpoint is written
                log.warning("%s: old checkpoints could not be deleted: %s", medic.job, first_line(error))
        return checkpoint

    def save_to_memory(self) -> None:
        training = self._training
        is_sound = training.broken is None and training.rank_comparison.agree is not False
        if training.memory is not None and is_sound:
            with training.medic.window(CHECKPOINT):
                training.loss_log.expect_from(training.global_step)
                progress = training.medic.progress
                training.memory.save(
                    training.global_step,
                    training.parts,
                    training.state_dict,
                    lambda: health_now(progress),
                    progress.pace.median_step_seconds(),
                )

    def save_when_due(self) -> None:
        """Write the periodic checkpoint, maybe in the background; log errors."""
        training, storage = self._training, self._training.storage
        background = storage.background if isinstance(storage, TieredCheckpoints) else None
        if background is None or training.current_checkpoint is not None or training.broken is not None:
            self.save_or_log()
            return
        if background.has_saved:
            training.changes.drop_earlier_run()
        try:
            with training.medic.window(CHECKPOINT):
                training.loss_log.expect_from(training.global_step)
                compared = self._compare_ranks()
                is_begun = background.start(training.global_step, training.parts, lambda: self._copy(compared))
        except Exception as error:  # any error of a state_dict costs only this checkpoint
            message, step = "%s: no checkpoint of step %d: %s", training.global_step
            log.warning(message, training.medic.job, step, first_line(error), exc_info=not is_explained(error))
            training.medic.save_failed(training.global_step, first_line(error))
            return
        if not is_begun:
            self.save_or_log()

    def _copy(self, compared: _RankComparison) -> Slot | None:
        training, run = self._training, self._run_state(compared)
        assert training.memory is not None
        health = CheckpointHealth.from_json(run["health"]) or CheckpointHealth()
        return training.memory.copy(training.global_step, training.parts, run, health, holds=True)

    def _compare_ranks(self) -> _RankComparison:
        training, medic = self._training, self._training.medic
        cache = KnownDigests()
        tensors = tensors_of_parts(training.parts) if training.verifies else None
        digests = None if tensors is None else digests_of(tensors, cache)
        if medic.world_size == 1:
            return _RankComparison(digests, None)
        if tensors is not None and not is_sharded(training.parts):
            compared = earlier_digests_of(tensors, cache)
            training.rank_comparison.compare(training.global_step, compared, training.memory)
        return _RankComparison(digests, self._rank_state(cache))

    def _rank_state(self, cache: KnownDigests) -> RankState | None:
        training, medic = self._training, self._training.medic
        comparison, disk = training.rank_comparison, without_memory(training.storage)
        if isinstance(disk, JointOwnCheckpoints) and not is_sharded(training.parts):
            return RankState(medic.rank, comparison.differing, (), {})  # `JointOwnCheckpoints.load` reads no more
        states = disk.comparable(training.parts) if isinstance(disk, JointCheckpointDirectory) else None
        if states is None:
            return None
        group = medic.group(f"rank-states-{training.global_step}")
        state = compare_states(states, group, cache)
        if state is None:
            return None
        return replace(state, from_rank_0=tuple(part for part in state.parts if comparison.is_faulty(part)))

    def _run_state(self, compared: _RankComparison) -> dict[str, Any]:
        training = self._training
        is_finite = are_finite(training.parts.modules(), training.parts.optimizers())
        health = replace(health_now(training.medic.progress, is_finite), ranks_agree=training.rank_comparison.agree)
        rank_state = None if compared.rank_state is None else compared.rank_state.plain()
        own = {"health": health.to_json(), "digests": compared.digests, "rank_state": rank_state}
        return {**training.state_dict(), **own}

    def save_or_log(self, prune: bool = True) -> None:
        training = self._training
        if training.storage is None:
            return
        began = time.monotonic()
        try:
            self.save(prune)
        except Exception as error:  # any error of the user's storage costs only this checkpoint
            seconds, why = time.monotonic() - began, first_line(error)
            training.medic.save_failed(training.global_step, why)
            log.error(
                "%s: no checkpoint of step %d, after %.1f s: %s",
                training.medic.job,
                training.global_step,
                seconds,
                why,
                exc_info=not is_explained(error),
            )
