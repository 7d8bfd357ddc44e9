"""Restarts of a framework's training loop. ``recovery.restarts`` decides when to restart."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping

from trainmedic.client import Medic
from trainmedic.errors import Rejected
from trainmedic.job.command import JobCommand
from trainmedic.job.parameters import Rollback
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.choice import Choice, agree, choose
from trainmedic.recovery.health import Onset, onset_of
from trainmedic.recovery.loop_restart import DamagedCheckpoint, LoopRestart, checkpoint_output
from trainmedic.recovery.restarts import LoopRestarter, RestartLimits, require_on_all_ranks
from trainmedic.recovery.rollback_budget import RollbackBudget
from trainmedic.torch.checkpoints.digests import Modules, Optimizers
from trainmedic.torch.learning_rate import marked_scale
from trainmedic.torch.loss_course import CompletedRollback
from trainmedic.torch.meters.step_meter import StepMeter
from trainmedic.trainer.framework import Framework
from trainmedic.trainer.rollback_proof import RollbackProof

log = logging.getLogger("trainmedic")


class TrainerLoop:
    def __init__(self, medic: Medic, framework: Framework, limits: RestartLimits) -> None:
        self.framework = framework
        # `RollbackProof.record` in the loaded checkpoint. The framework sets it; None without one.
        self.record: Mapping[str, Any] | None = None
        self.meter: StepMeter | None = None
        self.restarts = LoopRestarter(medic, self._newest, self._choose, limits)
        self.proof = RollbackProof(medic, lambda: framework.accumulation)
        self._medic = medic
        self._limits = limits
        self._step = 0
        # Path and time of checkpoints of earlier trainings and of damaged ones, which are never used.
        self._foreign: frozenset[tuple[Any, Any]] = frozenset()
        self._started_from = Path()  # checkpoint of the last restart
        self._pending_comparison: Callable[[], None] | None = None

    def start_fresh(self) -> None:
        """Begin a new training: ignore existing checkpoints, and reset the count of rollbacks."""
        self._foreign = frozenset((checkpoint.path, checkpoint.at) for checkpoint in self.framework.all_checkpoints())
        self.budget.reset()
        self._medic.progress.begin_training(time.perf_counter())

    def prepare(self, restart: LoopRestart) -> Path:
        """Put later checkpoints aside; return the one to restart from. Raises OSError."""
        ranks = self._medic.group("restart")
        ranks.poll()  # a rank may still be writing its part of a checkpoint
        checkpoint = self._started_from = Path(ranks.choose(lambda: str(self._available(restart))))
        step = self.framework.step_of(checkpoint)
        self._medic.progress.record.forget_after(step)
        if self.framework.writes:
            self.put_aside(step)
        log.warning("%s: restarting the training loop from %s", self._medic.job, checkpoint)
        self.framework.prepare(checkpoint, restart)
        return checkpoint

    def _available(self, restart: LoopRestart) -> Path:
        """Return the checkpoint, or the newest after a crash. Raises FileNotFoundError."""
        if self.framework.is_complete(restart.checkpoint):
            return restart.checkpoint
        newest = self._newest()
        if newest is None or restart.is_rollback:
            raise FileNotFoundError(f"{restart.checkpoint} no longer exists, or is incomplete")
        return newest

    def put_aside(self, after: int) -> None:
        """Rename later checkpoints, so that nothing resumes from them. Raises OSError."""
        self.framework.resume_from(after)
        renamed = [self._rename(each.path) for each in self.framework.all_checkpoints() if each.step > after]
        if renamed:
            log.warning("%s: put aside as %s", self._medic.job, ", ".join(renamed))

    def _rename(self, path: Path) -> str:
        number = 1
        while (new := path.with_name(self.framework.abandoned_name(path.name, number))).exists():
            number += 1
        path.rename(new)
        return new.name

    def _put_aside_damaged(self, damaged: Path) -> None:
        self._foreign |= {(each.path, each.at) for each in self.framework.all_checkpoints() if each.path == damaged}
        if self.framework.writes:
            try:
                log.error("%s: %s is damaged, and put aside as %s", self._medic.job, damaged, self._rename(damaged))
            except OSError as error:
                log.error("%s: %s is damaged, and cannot be put aside: %s", self._medic.job, damaged, error)

    @contextlib.contextmanager
    def attempting(self) -> Iterator[None]:
        """End a running proof of a rollback, with an error, if the block raises."""
        try:
            yield
        except BaseException as error:
            self.proof.finish(f"the loop raised {type(error).__name__}", is_error=True)
            raise

    def _newest(self) -> Path | None:
        ordered = self.framework.restart_order(self._checkpoints())
        return ordered[0].path if ordered else None

    def _checkpoints(self) -> list[SavedCheckpoint]:
        return [each for each in self.framework.all_checkpoints() if (each.path, each.at) not in self._foreign]

    @functools.cached_property
    def budget(self) -> RollbackBudget:
        # Made late: Lightning knows its directories only during fit.
        return RollbackBudget(self.framework.directories[0], self._limits.rollbacks, writes=self.framework.writes)

    def begins(self, step: int, modules: Modules, optimizers: Optimizers) -> None:
        """Record that the loop begins, on every rank.

        Raises DamagedCheckpoint if a restart has loaded other data than saved.
        """
        self.restarts.note_loaded()
        restart = self.restarts.starting
        if restart is None:
            self.proof.check_resumed(self.record, modules, optimizers)
            self.proof.losses.restore(self.record, step)
        elif different := self.proof.check_loaded(self.record, modules, optimizers):
            damaged = self._started_from
            self._put_aside_damaged(damaged)
            raise DamagedCheckpoint(f"{damaged.name} was loaded otherwise than it was saved: {different}")
        else:
            self.begin_comparison(restart, step, modules.values(), optimizers.values())

    def begin_comparison(
        self, restart: LoopRestart, step: int, models: Iterable[Any], optimizers: Iterable[Any]
    ) -> None:
        """Compare losses; defer it with `Framework.knows_batches_late`."""
        self._pending_comparison = functools.partial(self._compare_losses, restart, step, models, optimizers)
        if not self.framework.knows_batches_late:
            self.compare_losses()

    def compare_losses(self) -> None:
        begin, self._pending_comparison = self._pending_comparison, None
        if begin is not None:
            begin()

    def _compare_losses(
        self, restart: LoopRestart, step: int, models: Iterable[Any], optimizers: Iterable[Any]
    ) -> None:
        record, accumulation, scale = self.record or {}, self.framework.accumulation, marked_scale(optimizers)
        rollback = CompletedRollback(
            step=step,
            data=self.framework.data,
            skipped=restart.skip_batches,
            accumulation=accumulation,
            accumulation_then=(record.get("losses") or {}).get("accumulation", accumulation),
            is_scaled_otherwise=record.get("lr_scale", scale) != scale,
            trouble_at=restart.trouble_at,
        )
        self.proof.losses.go_back(rollback, models)
        if restart.settings:
            self.proof.losses.log.note_course_change(step)

    def stepped(self, step: int) -> None:
        self._step = step
        self.proof.losses.step_ends(step)
        restart = self.restarts.stepped(step)
        if restart is not None:
            self._complete(restart)
        self.proof.step_done(step)

    def ends(self) -> None:
        restarts = self.restarts.is_requested
        self.proof.finish("the loop restarts for another command" if restarts else "training ended")

    def roll_back(self, command: JobCommand) -> bool:
        """Choose a checkpoint on all ranks and request a restart; return whether to end the loop. Raises Rejected."""
        rollback, progress = command.parameters, self._medic.progress
        assert isinstance(rollback, Rollback)
        if rollback.skip_batches and self.framework.no_skip_because:
            raise Rejected(self.framework.no_skip_because)
        onset = onset_of(rollback, progress)
        choice = agree(command.group, lambda: self._choose(rollback, onset))
        checkpoint = choice.best
        require_on_all_ranks(command.group, checkpoint, self.framework.is_complete)
        output = {**checkpoint_output(checkpoint), "left_step": self._step}
        if choice.passed_over:
            output["passed_over"] = choice.passed_over_json()
        older = tuple(each for each in choice.candidates if each.step < checkpoint.step)
        trouble_at = None if onset is None else onset.step
        skip = self.framework.round_up_skip(rollback.skip_batches)
        restart = LoopRestart(checkpoint.path, command, skip, output=output, trouble_at=trouble_at)
        return self.restarts.request(replace(restart, others=older))

    def _choose(self, rollback: Rollback, onset: Onset | None = None) -> Choice:
        """Choose the checkpoint. Raises Rejected.

        The interrupter's thread, which must not read losses, passes no onset.
        """
        choice = choose(self._checkpoints(), rollback, self._step, onset, self.budget.spent)
        self.budget.check(choice.best.step, self._step)
        return choice

    def _complete(self, restart: LoopRestart) -> None:
        """Answer the command after its restart's first step."""
        output = {**restart.output, **self._finish(restart)}
        command = restart.command
        if command is None or command.is_answered:
            return
        self._medic.step = self._step
        if restart.is_rollback:
            self.proof.answer(command, output)
        else:
            command.applied(output)

    def _finish(self, restart: LoopRestart) -> Mapping[str, Any]:
        """Count a rollback; return the rest of the answer."""
        if not restart.is_rollback:
            return self.framework.outcome(restart)
        step = restart.output["checkpoint_step"]
        spent = self.budget.spend(step, restart.output["left_step"])
        data = {"skipped_batches": self.framework.newly_skipped, "data": self.framework.data}
        return {**spent, "step": self._step, **data, **self.framework.outcome(restart)}
