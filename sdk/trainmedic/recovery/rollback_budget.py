"""Limit on rollbacks without progress.

A rollback continues the earlier ones if its checkpoint is not past the furthest step that they left.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Mapping

from trainmedic.errors import Rejected
from trainmedic.recovery.checkpoints import write_durably
from trainmedic.recovery.json_files import read_or_warn

log = logging.getLogger("trainmedic")

FILE = ".trainmedic-rollbacks.json"
LIMIT = 3  # rollbacks without progress


@dataclass(frozen=True)
class RollbackCount:
    root_step: int = -1  # the earliest step that they went back to
    furthest_step: int = -1  # the latest step from which one started
    rollbacks: int = 0

    def is_continued_by(self, target_step: int) -> bool:
        return self.rollbacks > 0 and target_step <= self.furthest_step

    def after(self, target_step: int, left_step: int) -> RollbackCount:
        if not self.is_continued_by(target_step):
            return RollbackCount(target_step, left_step, 1)
        return RollbackCount(min(self.root_step, target_step), max(self.furthest_step, left_step), self.rollbacks + 1)


class RollbackBudget:
    """Counts a job's rollbacks and rejects those above ``limit`` (None: unlimited).

    Without ``directory`` the count ends with the process. One rank ``writes``.
    """

    def __init__(self, directory: Path | None = None, limit: int | None = LIMIT, writes: bool = True) -> None:
        if limit is not None and limit < 0:
            raise ValueError(f"rollbacks: {limit} is out of range; use 0 or more, or None for no limit")
        self.limit = limit
        self._file = directory / FILE if directory is not None else None
        self._writes = writes
        warning = "%s cannot be read; rollbacks are counted from 0: %s"  # so that the job can be repaired
        self.spent = read_or_warn(self._file, _count_in, RollbackCount(), warning)

    def check(self, target_step: int, left_step: int) -> None:
        then = self.spent.after(target_step, left_step)
        if self.limit == 0:
            raise Rejected("the budget of rollbacks is 0")
        if self.limit is not None and then.rollbacks > self.limit:
            raise Rejected(
                f"{self.spent.rollbacks} rollbacks since the checkpoint of step {then.root_step} have not brought "
                f"the training past step {self.spent.furthest_step}; the budget is {self.limit}"
            )

    def spend(self, target_step: int, left_step: int) -> Mapping[str, Any]:
        self.spent = self.spent.after(target_step, left_step)
        self._write()
        return {
            "rollback_number": self.spent.rollbacks,
            "rollback_budget": self.limit,
            "root_step": self.spent.root_step,
        }

    def reset(self) -> None:
        if self.spent != RollbackCount():
            self.spent = RollbackCount()
            self._write()

    def _write(self) -> None:
        if self._file is None or not self._writes:
            return
        try:
            # The field names are those of the file.
            write_durably(self._file, json.dumps(asdict(self.spent)).encode())
        except OSError as error:
            log.warning(
                "%s cannot be written; a restart will use the earlier count of rollbacks: %s", self._file, error
            )


def _count_in(fields: Any) -> RollbackCount:
    values = [fields[name] for name in ("root_step", "furthest_step", "rollbacks")]
    if not all(type(value) is int for value in values):
        raise ValueError("its members are not whole numbers")
    return RollbackCount(*values)
