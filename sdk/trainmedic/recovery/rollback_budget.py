"""How often a job may go back without getting further.

A rollback that does not help would be ordered again and again, so rollbacks are counted. Those that land at or
before the point from which an earlier one started belong together, and share a root, the earliest checkpoint
that they went back to. A rollback to a checkpoint from beyond that point is for a new problem, and the count starts
at one again. After ``limit`` of them the next is rejected, so that the playbook escalates.

The count is kept in a small file beside the checkpoints, so that a restart does not forget it. Not here: which
checkpoint is meant (``checkpoints``).
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Mapping

from trainmedic.errors import Rejected
from trainmedic.recovery.checkpoints import write_durably

log = logging.getLogger("trainmedic")

FILE = ".trainmedic-rollbacks.json"
LIMIT = 3


@dataclass(frozen=True)
class RollbackCount:
    """Rollbacks that belong together."""

    root_step: int = -1
    """The earliest step that one of them went back to."""
    furthest_step: int = -1
    """The furthest step that one of them started from."""
    rollbacks: int = 0
    """How many they are."""

    def is_continued_by(self, target_step: int) -> bool:
        """Whether a rollback to that step belongs together with those that are counted."""
        return self.rollbacks > 0 and target_step <= self.furthest_step

    def after(self, target_step: int, left_step: int) -> RollbackCount:
        """The count with one more rollback, from ``left_step`` to ``target_step``."""
        if not self.is_continued_by(target_step):
            return RollbackCount(target_step, left_step, 1)
        return RollbackCount(min(self.root_step, target_step), max(self.furthest_step, left_step), self.rollbacks + 1)


class RollbackBudget:
    """Counts the rollbacks of one job, and rejects those beyond the limit.

    ``directory`` holds the file; without one, the count ends with the process. ``limit`` None allows any number.
    ``writes`` is for the one rank that writes the file; the others count along.
    """

    def __init__(self, directory: Path | None = None, limit: int | None = LIMIT, writes: bool = True) -> None:
        if limit is not None and limit < 0:
            raise ValueError(f"a budget of {limit} rollbacks: it is 0 or more, or None for no limit")
        self.limit = limit
        self._file = directory / FILE if directory is not None else None
        self._writes = writes
        self.spent = _read(self._file)

    def check(self, target_step: int, left_step: int) -> None:
        """Raises Rejected where one more rollback, to that step, is one too many."""
        then = self.spent.after(target_step, left_step)
        if self.limit is not None and then.rollbacks > self.limit:
            raise Rejected(
                f"{self.spent.rollbacks} rollbacks since the checkpoint of step {then.root_step} have not brought "
                f"the training past step {self.spent.furthest_step}; the budget is {self.limit}"
            )

    def spend(self, target_step: int, left_step: int) -> Mapping[str, Any]:
        """Count one that was carried out, and return what goes into its answer."""
        self.spent = self.spent.after(target_step, left_step)
        self._write()
        return {
            "rollback_number": self.spent.rollbacks,
            "rollback_budget": self.limit,
            "root_step": self.spent.root_step,
        }

    def reset(self) -> None:
        """Reset the count, because training begins from nothing, or what was counted belongs to an earlier training."""
        if self.spent != RollbackCount():
            self.spent = RollbackCount()
            self._write()

    def _write(self) -> None:
        if self._file is None or not self._writes:
            return
        try:
            # The fields' names are those of the file.
            write_durably(self._file, json.dumps(asdict(self.spent)).encode())
        except OSError as error:
            log.warning("%s cannot be written; a restart will forget the rollbacks: %s", self._file, error)


def _read(file: Path | None) -> RollbackCount:
    """The count in the file. If it cannot be read the count is 0, so that the job can still be repaired."""
    if file is None:
        return RollbackCount()
    try:
        fields = json.loads(file.read_bytes())
        values = [fields[name] for name in ("root_step", "furthest_step", "rollbacks")]
        if all(type(value) is int for value in values):
            return RollbackCount(*values)
        raise ValueError("its members are not whole numbers")
    except FileNotFoundError:
        return RollbackCount()
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s cannot be read; rollbacks are counted from 0: %s", file, error)
        return RollbackCount()
