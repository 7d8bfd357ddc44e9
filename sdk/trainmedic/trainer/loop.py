"""A Trainer whose training loop is restarted: by commands, and after a crash.

`TrainerLoop` does what a restart needs in every framework: it chooses the checkpoint to start from, puts later ones
aside, and counts rollbacks for the budget. Not here: when the loop is restarted
(``trainmedic.recovery.restarts``), and how a framework starts its loop and keeps its checkpoints (the subclasses
in ``huggingface.loop`` and ``lightning.loop``). The callbacks call it for commands.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Iterable, Iterator, Mapping

from trainmedic.client import Medic
from trainmedic.errors import Rejected
from trainmedic.job.command import JobCommand
from trainmedic.job.parameters import Rollback
from trainmedic.recovery.checkpoints import SavedCheckpoint, healthy_first
from trainmedic.recovery.choice import Choice, agree, choose
from trainmedic.recovery.health import Onset, onset_of
from trainmedic.recovery.loop_restart import DamagedCheckpoint, LoopRestart, told
from trainmedic.recovery.restarts import LoopRestarter, RestartLimits, require_on_all_ranks
from trainmedic.recovery.rollback_budget import RollbackBudget
from trainmedic.torch.checkpoints.digests import Modules, Optimizers
from trainmedic.torch.meters.step_meter import StepMeter
from trainmedic.trainer.rollback_proof import RollbackProof

log = logging.getLogger("trainmedic")


class TrainerLoop(abc.ABC):
    """The training of one Trainer, from its first step to the last, restarts included."""

    abandoned_name: ClassVar[str]
    """The new name of a checkpoint that is put aside, with ``{name}`` and ``{number}``."""

    def __init__(self, medic: Medic, limits: RestartLimits, writes: bool) -> None:
        """``writes`` is for the one rank that changes what is in the directories of the checkpoints."""
        self.no_restart_because = ""
        """Why this Trainer cannot be restarted at all; empty where it can."""
        self._no_skip_because = ""
        """Why a rollback cannot leave out batches; empty where it can."""
        self._medic = medic
        self._limits = limits
        self._writes = writes
        self._step = 0
        # What this rank has kept in the checkpoint from which the loop has begun; None where there is nothing.
        self._kept: Mapping[str, Any] | None = None
        # Path and time of the checkpoints that an earlier training has left in the directory, and of those that are
        # damaged. Nothing goes back to those.
        self._foreign: frozenset[tuple[Any, Any]] = frozenset()
        self._started_from = Path()  # the checkpoint of the last restart
        self.meter: StepMeter | None = None
        """What is told of the batches, while the loop runs with a callback."""
        self.restarts = LoopRestarter(medic, self._newest, self._choose, limits)
        self.proof = RollbackProof(medic, lambda: self._accumulation)

    # --- what each framework implements -----------------------------------------------------------------

    @property
    @abc.abstractmethod
    def directories(self) -> list[Path]:
        """The directories of the checkpoints. The first one gets those that commands ask for, and this package's
        files."""

    @abc.abstractmethod
    def _all_checkpoints(self) -> list[SavedCheckpoint]:
        """Every checkpoint in the directories, foreign and half-written ones too, by ascending step."""

    @abc.abstractmethod
    def _is_complete(self, checkpoint: Path) -> bool:
        """Whether the loop can start from it."""

    @abc.abstractmethod
    def _step_of(self, checkpoint: Path) -> int:
        """The step at which it was written."""

    @abc.abstractmethod
    def _skipped_batches(self) -> int:
        """How many batches were left out since the last restart."""

    @property
    @abc.abstractmethod
    def _accumulation(self) -> int:
        """How many batches make a step."""

    @property
    @abc.abstractmethod
    def _data(self) -> str:
        """Which batches come after the last restart, for the answer; as `BatchSource.restore` says it."""

    # --- around the framework's loop --------------------------------------------------------------------

    def _start_fresh(self) -> None:
        """Begin without a checkpoint: the checkpoints in the directories belong to an earlier training."""
        self._foreign = frozenset((checkpoint.path, checkpoint.at) for checkpoint in self._all_checkpoints())
        self.budget.reset()
        self._medic.progress.begin_training(time.perf_counter())

    def _prepare(self, restart: LoopRestart) -> Path:
        """The checkpoint that the loop starts from for `restart`, with later ones put aside. Raises OSError."""
        ranks = self._medic.group("restart")
        ranks.poll()  # until every rank is here, one may still be writing its part of a checkpoint
        checkpoint = self._started_from = Path(ranks.choose(lambda: str(self._available(restart))))
        self._medic.progress.record.forget_after(self._step_of(checkpoint))
        if self._writes:
            self._put_aside(self._step_of(checkpoint))
        log.warning("%s: the training loop starts again from %s", self._medic.job, checkpoint)
        return checkpoint

    def _available(self, restart: LoopRestart) -> Path:
        """The checkpoint of `restart`, or the newest if that one is gone; a rollback takes no other than its own."""
        if self._is_complete(restart.checkpoint):
            return restart.checkpoint
        newest = self._newest()
        if newest is None or restart.is_rollback:
            raise FileNotFoundError(f"{restart.checkpoint} is not there any more, or not complete")
        return newest

    def _put_aside(self, after: int) -> None:
        """Rename the checkpoints of later steps, so that nothing goes on from them."""
        renamed = [self._rename(each.path) for each in self._all_checkpoints() if each.step > after]
        if renamed:
            log.warning("%s: put aside as %s", self._medic.job, ", ".join(renamed))

    def _rename(self, path: Path) -> str:
        number = 1
        while (new := path.with_name(self._abandoned(path.name, number))).exists():
            number += 1
        path.rename(new)
        return new.name

    def _abandoned(self, name: str, number: int) -> str:
        """The new name of a checkpoint that is put aside."""
        return self.abandoned_name.format(name=name, number=number)

    def _disown(self, damaged: Path) -> None:
        """Nothing goes on from this checkpoint any more, a later process neither. Every rank has loaded it by now."""
        self._foreign |= {(each.path, each.at) for each in self._all_checkpoints() if each.path == damaged}
        if self._writes:
            try:
                log.error("%s: %s is damaged, and put aside as %s", self._medic.job, damaged, self._rename(damaged))
            except OSError as error:
                log.error("%s: %s is damaged, and cannot be put aside: %s", self._medic.job, damaged, error)

    @contextlib.contextmanager
    def _attempting(self) -> Iterator[None]:
        """Around the framework's loop: what waits to be compared is answered if that raises an error."""
        try:
            yield
        except BaseException as error:
            self.proof.finish(f"the loop raised {type(error).__name__}", is_error=True)
            raise

    def _newest(self) -> Path | None:
        complete = healthy_first(self._checkpoints())
        return complete[0].path if complete else None

    def _checkpoints(self) -> list[SavedCheckpoint]:
        """The checkpoints of this training."""
        return [each for each in self._all_checkpoints() if (each.path, each.at) not in self._foreign]

    @functools.cached_property
    def budget(self) -> RollbackBudget:
        """The rollbacks of this training. It is made late, as Lightning knows its directories only while it fits."""
        return RollbackBudget(self.directories[0], self._limits.rollbacks, writes=self._writes)

    # --- called by the callback -------------------------------------------------------------------------

    def begins(self, step: int, modules: Modules, optimizers: Optimizers) -> None:
        """Take note, on every rank, that the loop begins with these after so many steps.

        Raises DamagedCheckpoint where a restart has loaded something else than was saved.
        """
        self.restarts.has_loaded()
        restart = self.restarts.starting
        if restart is None:
            self.proof.resumed(self._kept, modules, optimizers)
            self.proof.losses.resumes(self._kept, step)
        elif different := self.proof.loaded(self._kept, modules, optimizers):
            damaged = self._started_from
            self._disown(damaged)
            raise DamagedCheckpoint(f"{damaged.name} was loaded otherwise than it was saved: {different}")
        else:
            self._compare_losses(restart, step, modules.values(), optimizers.values())

    def _compare_losses(
        self, restart: LoopRestart, step: int, models: Iterable[Any], optimizers: Iterable[Any]
    ) -> None:
        """Compare the losses from here on with those that came after this step before."""
        losses, course = self.proof.losses, (self._accumulation, self._data, restart.skip_batches, restart.trouble_at)
        losses.go_back(self._kept, step, models, optimizers, *course)
        if restart.settings:
            losses.log.course_changes(step)

    def stepped(self, step: int) -> None:
        """Take note that a step is complete."""
        self._step = step
        self.proof.losses.step_ends(step)
        self.restarts.stepped(step, self._finish, self._answer)
        self.proof.step_done(step)

    def ends(self) -> None:
        """Take note that the loop ends."""
        again = self.restarts.is_asked
        self.proof.finish("the loop starts again for another command" if again else "training ended")

    def roll_back(self, command: JobCommand) -> bool:
        """Choose the checkpoint on all ranks together, and ask for a restart from there: `LoopRestarter.ask`. Raises
        Rejected."""
        rollback, progress = command.parameters, self._medic.progress
        assert isinstance(rollback, Rollback)
        if rollback.skip_batches and self._no_skip_because:
            raise Rejected(self._no_skip_because)
        onset = onset_of(rollback, progress)
        choice = agree(command.group, lambda: self._choose(rollback, onset))
        checkpoint = choice.best
        require_on_all_ranks(command.group, checkpoint, self._is_complete)
        output = {**told(checkpoint), "left_step": self._step}
        if choice.passed_over:
            output["passed_over"] = choice.told()
        older = tuple(each for each in choice.candidates if each.step < checkpoint.step)
        trouble_at = None if onset is None else onset.step
        restart = LoopRestart(checkpoint.path, command, rollback.skip_batches, output=output, trouble_at=trouble_at)
        return self.restarts.ask(replace(restart, others=older))

    def _choose(self, rollback: Rollback, onset: Onset | None = None) -> Choice:
        """Also called by the interrupter's thread, which must not read the losses, and so knows no onset."""
        choice = choose(self._checkpoints(), rollback, self._step, onset, self.budget.spent)
        self.budget.check(choice.best.step, self._step)
        return choice

    def _finish(self, restart: LoopRestart) -> Mapping[str, Any]:
        """What the answer says in addition, now that the loop runs again and `restart` is done."""
        if not restart.is_rollback:
            return {}
        step = restart.output["checkpoint_step"]
        spent = self.budget.spend(step, restart.output["left_step"])
        return {**spent, "step": self._step, "skipped_batches": self._skipped_batches(), "data": self._data}

    def _answer(self, command: JobCommand, output: Mapping[str, Any]) -> None:
        if command.action != "job.rollback":
            command.applied(output)
            return
        self.proof.answer(command, output)
