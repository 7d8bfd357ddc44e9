"""A Trainer whose training loop is restarted: by commands, and after a crash.

`TrainerLoop` does what a restart needs in every framework: it chooses the checkpoint to start from, puts later ones
aside, and counts rollbacks for the budget. Not here: when the loop is restarted
(``trainmedic.recovery.restarts``), and how a framework starts its loop and keeps its checkpoints (the subclasses
in ``huggingface.loop`` and ``lightning.loop``). The callbacks call it for commands.
"""

from __future__ import annotations

import abc
import functools
import logging
from pathlib import Path
from typing import Any, ClassVar, Mapping

from trainmedic.client import Medic
from trainmedic.errors import Rejected
from trainmedic.job.command import JobCommand
from trainmedic.job.parameters import Rollback
from trainmedic.recovery.checkpoints import SavedCheckpoint, choose, newest_first
from trainmedic.recovery.restarts import LoopRestart, LoopRestarter, RestartLimits, agree_on_checkpoint
from trainmedic.recovery.rollback_budget import RollbackBudget

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
        # Path and time of the checkpoints that an earlier training has left in the directory. Nothing goes back to
        # those, as they hold another model's weights.
        self._foreign: frozenset[tuple[Any, Any]] = frozenset()
        self.restarts = LoopRestarter(medic, self._newest, self._choose_checkpoint, limits)

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

    # --- around the framework's loop --------------------------------------------------------------------

    def _start_fresh(self) -> None:
        """Begin without a checkpoint: the checkpoints in the directories belong to an earlier training."""
        self._foreign = frozenset((checkpoint.path, checkpoint.at) for checkpoint in self._all_checkpoints())
        self.budget.reset()

    def _prepare(self, restart: LoopRestart) -> Path:
        """The checkpoint that the loop starts from for `restart`, with later ones put aside. Raises OSError."""
        ranks = self._medic.group("restart")
        ranks.poll()  # until every rank is here, one may still be writing its part of a checkpoint
        checkpoint = Path(ranks.choose(lambda: str(self._available(restart))))
        if self._writes:
            self._put_aside(self._step_of(checkpoint))
        log.warning("%s: the training loop starts again from %s", self._medic.job, checkpoint)
        return checkpoint

    def _available(self, restart: LoopRestart) -> Path:
        """The checkpoint of `restart`, or the newest if that one is gone; a rollback takes no other than its own."""
        if self._is_complete(restart.checkpoint):
            return restart.checkpoint
        newest = self._newest()
        if newest is None or _is_rollback(restart):
            raise FileNotFoundError(f"{restart.checkpoint} is not there any more, or not complete")
        return newest

    def _put_aside(self, after: int) -> None:
        """Rename the checkpoints of later steps, so that nothing goes on from them."""
        renamed = []
        for checkpoint in self._all_checkpoints():
            if checkpoint.step > after:
                path, number = checkpoint.path, 1
                while (new := path.with_name(self.abandoned_name.format(name=path.name, number=number))).exists():
                    number += 1
                path.rename(new)
                renamed.append(new.name)
        if renamed:
            log.warning("%s: put aside as %s", self._medic.job, ", ".join(renamed))

    def _newest(self) -> Path | None:
        complete = newest_first(self._checkpoints())
        return complete[0].path if complete else None

    def _checkpoints(self) -> list[SavedCheckpoint]:
        """The checkpoints of this training."""
        return [each for each in self._all_checkpoints() if (each.path, each.at) not in self._foreign]

    @functools.cached_property
    def budget(self) -> RollbackBudget:
        """The rollbacks of this training. It is made late, as Lightning knows its directories only while it fits."""
        return RollbackBudget(self.directories[0], self._limits.rollbacks, writes=self._writes)

    # --- called by the callback -------------------------------------------------------------------------

    def stepped(self, step: int) -> None:
        """Take note that a step is complete."""
        self._step = step
        self.restarts.stepped(step, self._finish)

    def roll_back(self, command: JobCommand) -> None:
        """Choose the checkpoint on all ranks together, and ask for a restart from there. Raises Rejected."""
        rollback = command.parameters
        assert isinstance(rollback, Rollback)
        if rollback.skip_batches and self._no_skip_because:
            raise Rejected(self._no_skip_because)
        checkpoint = agree_on_checkpoint(command.group, lambda: self._choose_checkpoint(rollback), self._is_complete)
        output = {
            "checkpoint": checkpoint.path.name,
            "checkpoint_step": checkpoint.step,
            "left_step": self._step,
            "saved_at": checkpoint.at.isoformat(),
        }
        self.restarts.ask(LoopRestart(checkpoint.path, command, rollback.skip_batches, output=output))

    def _choose_checkpoint(self, rollback: Rollback) -> SavedCheckpoint:
        checkpoint = choose(self._checkpoints(), rollback, self._step)
        self.budget.check(checkpoint.step, self._step)
        return checkpoint

    def _finish(self, restart: LoopRestart) -> Mapping[str, Any]:
        """What the answer says in addition, now that the loop runs again and `restart` is done."""
        if not _is_rollback(restart):
            return {}
        spent = self.budget.spend(restart.output["checkpoint_step"], restart.output["left_step"])
        return {**spent, "skipped_batches": self._skipped_batches()}


def _is_rollback(restart: LoopRestart) -> bool:
    return restart.command is not None and restart.command.action == "job.rollback"
