"""One restart of a training loop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Mapping

from trainmedic.errors import TrainmedicError
from trainmedic.job.command import JobCommand
from trainmedic.recovery.checkpoints import SavedCheckpoint


class LoopEnds(BaseException):
    """Ends a framework's loop between steps. Not an Exception, so that ``except Exception`` does not catch it."""


class DamagedCheckpoint(TrainmedicError):
    """The loop loaded something other than what was saved. Raised on all ranks before the first step."""


@dataclass(frozen=True)
class LoopRestart:
    checkpoint: Path
    command: JobCommand | None = None  # None after a crash
    skip_batches: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the framework, changed by the command
    previous: Mapping[str, Any] = field(default_factory=dict)  # the former ``settings``
    output: Mapping[str, Any] = field(default_factory=dict)  # known part of the answer
    trouble_at: int | None = None  # first untrusted step
    others: tuple[SavedCheckpoint, ...] = ()  # older checkpoints, best first

    @property
    def is_rollback(self) -> bool:
        return self.command is not None and self.command.action == "job.rollback"

    def to_next_best(self, why: str) -> LoopRestart:
        """Return the restart from the first of ``others``. ``why``: reason against this checkpoint."""
        best, *rest = self.others
        unusable = [*self.output.get("unusable", ()), why]
        output = {**self.output, **checkpoint_output(best), "unusable": unusable}
        return replace(self, checkpoint=best.path, others=tuple(rest), output=output)


def checkpoint_output(checkpoint: SavedCheckpoint) -> dict[str, Any]:
    return {
        "checkpoint": checkpoint.name,
        "checkpoint_step": checkpoint.step,
        "saved_at": checkpoint.at.isoformat(),
    }
