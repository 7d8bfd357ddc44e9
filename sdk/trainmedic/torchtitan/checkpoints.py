"""Checkpoints of torchtitan: directories ``step-150``, of which ``.metadata`` is written last."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader

from trainmedic.trainer.step_directories import StepDirectories

log = logging.getLogger("trainmedic")

METADATA = ".metadata"
_POSITION = "train_state."  # prefix of the names of torchtitan's position


def _is_complete(checkpoint: Path) -> bool:
    try:
        status = (checkpoint / METADATA).stat()
    except OSError:
        return False
    if LAYOUT.step_of(checkpoint) in (None, 0):  # of step 0 torchtitan loads only the weights
        return False
    try:
        return _holds_position(checkpoint, status.st_mtime_ns, status.st_size)
    except OSError as error:  # perhaps not for long, so that it is not cached
        log.warning("%s cannot be read now: %s", checkpoint / METADATA, error)
        return False


@functools.lru_cache(maxsize=1024)
def _holds_position(checkpoint: Path, changed: int, size: int) -> bool:
    """Return whether torchtitan can resume from it. ``changed`` and ``size`` are cache keys. Raises OSError."""
    try:
        names = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    except OSError:
        raise
    except Exception as error:  # unpickling a damaged file may raise anything
        log.warning("%s cannot be read: %s", checkpoint / METADATA, error)
        return False
    return any(name.startswith(_POSITION) for name in names)


def _last_change(checkpoint: Path, is_complete: bool) -> float:
    return (checkpoint / METADATA if is_complete else checkpoint).stat().st_mtime


LAYOUT = StepDirectories("step-", 1, _is_complete, _last_change)
