"""The checkpoints of a torchtitan training, in the folder of its ``CheckpointManager``.

Each is a directory ``step-150`` in the format of ``torch.distributed.checkpoint``, whose ``.metadata`` is written last;
torchtitan goes on from the one of the latest step that has it.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader

from trainmedic.trainer.step_directories import StepDirectories

log = logging.getLogger("trainmedic")

METADATA = ".metadata"
_POSITION = "train_state."  # begins the names of what torchtitan keeps of its place


def _is_complete(checkpoint: Path) -> bool:
    """Whether torchtitan can go on from it: it is whole, and holds more than the model's weights."""
    try:
        status = (checkpoint / METADATA).stat()
    except OSError:
        return False
    # Of a checkpoint of step 0 torchtitan loads the weights alone, whatever it holds.
    return LAYOUT.step_of(checkpoint) not in (None, 0) and _holds_position(
        checkpoint, status.st_mtime_ns, status.st_size
    )


@functools.lru_cache(maxsize=1024)
def _holds_position(checkpoint: Path, changed: int, size: int) -> bool:
    """``changed`` and ``size``, those of the metadata, are part of the cache's key."""
    try:
        names = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    except Exception as error:  # whatever unpickling a damaged file raises
        log.warning("%s cannot be read: %s", checkpoint / METADATA, error)
        return False
    return any(name.startswith(_POSITION) for name in names)


def _last_change(checkpoint: Path, is_complete: bool) -> float:
    return (checkpoint / METADATA if is_complete else checkpoint).stat().st_mtime


LAYOUT = StepDirectories("step-", 1, _is_complete, _last_change)
