"""One restart of a training loop: from which checkpoint, with which settings, for which command.

`LoopRestarter` carries it out; the loops of the Trainers make it. Not here: when a loop is restarted (``restarts``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Mapping

from trainmedic.errors import TrainmedicError
from trainmedic.job.command import JobCommand
from trainmedic.recovery.checkpoints import SavedCheckpoint


class LoopEnds(BaseException):
    """Ends a framework's loop between two steps. No error, so nothing in between may catch it."""


class DamagedCheckpoint(TrainmedicError):
    """What the loop has loaded is not what was saved. It is raised before the first step, on all ranks alike."""


@dataclass(frozen=True)
class LoopRestart:
    """The checkpoint and settings of one restart, and the command that asked for it."""

    checkpoint: Path
    """The checkpoint that it goes on from."""
    command: JobCommand | None = None
    """The command that is carried out by this; None after a crash."""
    skip_batches: int = 0
    """Batches that are left out after the checkpoint."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings that are changed before the start, by name."""
    previous: Mapping[str, Any] = field(default_factory=dict)
    """The values of ``settings`` until now, with which the loop is known to run."""
    output: Mapping[str, Any] = field(default_factory=dict)
    """The part of the command's answer that is known before the loop runs."""
    trouble_at: int | None = None
    """The first step that was not trusted, for which a rollback was ordered; None where none is known."""
    others: tuple[SavedCheckpoint, ...] = ()
    """The older checkpoints that a rollback may go to, best first, where this one turns out damaged."""

    @property
    def is_rollback(self) -> bool:
        return self.command is not None and self.command.action == "job.rollback"

    def to_next_best(self, why: str) -> LoopRestart:
        """The same rollback to the first of ``others``; ``why`` says what is wrong with this checkpoint."""
        best, *rest = self.others
        unusable = [*self.output.get("unusable", ()), why]
        output = {**self.output, **told(best), "unusable": unusable}
        return replace(self, checkpoint=best.path, others=tuple(rest), output=output)


def told(checkpoint: SavedCheckpoint) -> dict[str, Any]:
    """What the answer to a rollback says of the checkpoint that it goes to."""
    return {
        "checkpoint": checkpoint.name,
        "checkpoint_step": checkpoint.step,
        "saved_at": checkpoint.at.isoformat(),
    }
