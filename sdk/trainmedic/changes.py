"""What commands have changed, by the name under which scripts import it; the code is in ``recovery.changes``."""

from __future__ import annotations

from trainmedic.recovery.changes import (
    ACCUMULATION,
    BATCH_SIZE,
    FILE,
    LEARNING_RATE,
    AppliedChanges,
    check_workers,
)
from trainmedic.recovery.changes import scaled_whole as whole

__all__ = ["ACCUMULATION", "BATCH_SIZE", "FILE", "LEARNING_RATE", "Changes", "check_workers", "whole"]


class Changes(AppliedChanges):
    """`AppliedChanges`, with the names by which scripts may call its methods."""

    note = AppliedChanges.set_factors
    settle = AppliedChanges.drop_earlier_run

    @property
    def left_out(self) -> list[list[int]]:
        """The ranges of batches that are skipped: an epoch, the first batch and the one after the last, of each."""
        return self.skipped
