"""What commands have changed, by the name under which scripts import it; the code is in ``recovery.changes``."""

from trainmedic.recovery.changes import ACCUMULATION, BATCH_SIZE, FILE, LEARNING_RATE
from trainmedic.recovery.changes import AppliedChanges as Changes

__all__ = ["ACCUMULATION", "BATCH_SIZE", "FILE", "LEARNING_RATE", "Changes"]
