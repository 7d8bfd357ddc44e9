"""Public names of ``recovery.changes``."""

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
    note = AppliedChanges.set_factors
    settle = AppliedChanges.drop_earlier_run

    @property
    def left_out(self) -> list[list[int]]:
        """Skipped batches: epoch, first, and one after the last."""
        return self.skipped
