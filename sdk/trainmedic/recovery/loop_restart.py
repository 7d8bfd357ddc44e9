"""One restart of a training loop: its checkpoint, settings and command."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Mapping

from trainmedic.errors import TrainmedicError
from trainmedic.job.command import JobCommand
from trainmedic.recovery.checkpoints import SavedCheckpoint


class LoopEnds(BaseException):
    """Ends a framework's loop between two steps. Not an Exception, so that nothing in between catches it."""


class DamagedCheckpoint(TrainmedicError):
    """The loop has loaded something other than what was saved. Raised before the first step, on all ranks together."""


@dataclass(frozen=True)
class LoopRestart:
    checkpoint: Path
    command: JobCommand | None = None
    """None after a crash."""
    skip_batches: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    previous: Mapping[str, Any] = field(default_factory=dict)
    """The former values of ``settings``, which are known to work."""
    output: Mapping[str, Any] = field(default_factory=dict)
    """The part of the command's answer that is known before the loop runs."""
    trouble_at: int | None = None
    """The first untrusted step of a rollback; None if unknown."""
    others: tuple[SavedCheckpoint, ...] = ()
    """Older checkpoints, best first, that replace this one if it is damaged."""

    @property
    def is_rollback(self) -> bool:
        return self.command is not None and self.command.action == "job.rollback"

    def to_next_best(self, why: str) -> LoopRestart:
        """Return the same rollback to the first of ``others``; ``why`` is the reason to report."""
        best, *rest = self.others
        unusable = [*self.output.get("unusable", ()), why]
        output = {**self.output, **told(best), "unusable": unusable}
        return replace(self, checkpoint=best.path, others=tuple(rest), output=output)


def told(checkpoint: SavedCheckpoint) -> dict[str, Any]:
    return {
        "checkpoint": checkpoint.name,
        "checkpoint_step": checkpoint.step,
        "saved_at": checkpoint.at.isoformat(),
    }
