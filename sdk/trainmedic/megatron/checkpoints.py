"""The checkpoints of a Megatron-LM training, in the directory that ``--save`` names.

Each is a directory ``iter_0000150``. Megatron-LM writes the number of the newest that is whole into a file, its
tracker, after all ranks have written theirs, and loads the one that is named there. So one of a later iteration is
half-written.
"""

from __future__ import annotations

from pathlib import Path

from trainmedic.recovery.checkpoints import write_durably
from trainmedic.trainer.step_directories import StepDirectories

TRACKER = "latest_checkpointed_iteration.txt"


def tracked(directory: Path) -> int:
    """The iteration that the tracker names; -1 where there is none, or only weights to begin with (``release``)."""
    try:
        return int((directory / TRACKER).read_text())
    except (OSError, ValueError):
        return -1


def track(directory: Path, iteration: int) -> None:
    """Let Megatron-LM load that iteration from now on, also when the job is started again. Raises OSError."""
    write_durably(directory / TRACKER, str(iteration).encode())


def _is_complete(checkpoint: Path) -> bool:
    step = LAYOUT.step_of(checkpoint)
    return step is not None and checkpoint.is_dir() and step <= tracked(checkpoint.parent)


def _last_change(checkpoint: Path, is_complete: bool) -> float:
    return max(file.stat().st_mtime for file in (checkpoint, *checkpoint.iterdir()))


LAYOUT = StepDirectories("iter_", 7, _is_complete, _last_change)
