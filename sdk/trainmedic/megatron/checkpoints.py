"""Checkpoints of Megatron-LM in ``--save``: ``iter_0000150``.

Its tracker file, written last, names the newest complete one.
"""

from __future__ import annotations

from pathlib import Path

from trainmedic.recovery.checkpoints import write_durably
from trainmedic.trainer.step_directories import StepDirectories

TRACKER = "latest_checkpointed_iteration.txt"


def read_tracker(directory: Path) -> int:
    """Return the tracker's iteration; -1 without one, or for initial weights (``release``)."""
    try:
        return int((directory / TRACKER).read_text())
    except (OSError, ValueError):
        return -1


def write_tracker(directory: Path, iteration: int) -> None:
    write_durably(directory / TRACKER, str(iteration).encode())


def _is_complete(checkpoint: Path) -> bool:
    step = LAYOUT.step_of(checkpoint)
    return step is not None and checkpoint.is_dir() and step <= read_tracker(checkpoint.parent)


def _last_change(checkpoint: Path, is_complete: bool) -> float:
    return max(file.stat().st_mtime for file in (checkpoint, *checkpoint.iterdir()))


LAYOUT = StepDirectories("iter_", 7, _is_complete, _last_change)
