"""Changes that have yet to prove that the job lives with them.

A change is on trial from the command that made it until a checkpoint of another step is complete, for which training
has gone on with it. A job that died and was started again meanwhile gets a second chance, because it may have died of
something else. Who calls it: ``changes``, which keeps the trial in its file.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import AbstractSet, Any, Mapping

WORKERS = "workers"
"""In place of a command's id: the number of workers that load data."""
_STARTS = 2


@dataclass(frozen=True)
class ChangeTrial:
    """The changes on trial, by command; none to begin with."""

    changes: frozenset[str] = frozenset()
    step: int = 0
    """The step after which the last of them was made."""
    starts: int = 0
    """How often the job was started again since."""

    @classmethod
    def of(cls, state: Any) -> ChangeTrial:
        """What `state` gave. What cannot be read is no trial."""
        try:
            return cls(frozenset(map(str, state["changes"])), int(state["step"]), int(state["starts"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            return cls()

    def state(self) -> Mapping[str, Any]:
        """The trial as plain JSON values."""
        return {**asdict(self), "changes": sorted(self.changes)}

    def with_changes(self, changes: AbstractSet[str], step: int) -> ChangeTrial:
        """The trial of these as well, made after ``step``. It begins anew."""
        return ChangeTrial(self.changes | changes, step) if changes else self

    def is_passed(self, step: int) -> bool:
        """Whether a checkpoint of ``step`` ends it."""
        return bool(self.changes) and step != self.step

    def started_again(self) -> ChangeTrial:
        return replace(self, starts=self.starts + 1)

    @property
    def is_failed(self) -> bool:
        """Whether the job has died too often meanwhile."""
        return self.starts >= _STARTS

    @property
    def failure(self) -> str:
        return (
            f"the job was started {self.starts} times and came to no checkpoint after what changed at step {self.step}"
        )
