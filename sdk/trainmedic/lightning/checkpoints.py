"""The checkpoints of a Lightning Trainer: which are there, and which are complete.

They are files, or directories where each rank writes its part, in the directories of the Trainer's
``ModelCheckpoint`` callbacks. Their step is in their name, as ``step=<n>``, or is read from the file. Not here:
which one a rollback means (``trainmedic.recovery.checkpoints``). `LightningFramework` and the `Callback` call it.
"""

from __future__ import annotations

import functools
import pickle
import re
import zipfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Iterable, NamedTuple

import torch

from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.health import CheckpointHealth

SUFFIX = ".ckpt"
_STEP = re.compile(r"step=(\d{1,18})")


def path_of(directory: Path, step: int) -> Path:
    """The path of a checkpoint that is written for a command."""
    return directory / f"trainmedic-step={step}{SUFFIX}"


def in_directories(directories: Iterable[Path]) -> list[SavedCheckpoint]:
    """All checkpoints whose step is known, oldest step first. A directory that is not there holds none."""
    paths = {path for directory in directories for path in directory.glob(f"*{SUFFIX}") if not path.is_symlink()}
    present = []
    for path in paths:
        step = step_of(path) if is_complete(path) else None
        try:
            at = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
        except OSError:  # it was removed just now
            continue
        if step is not None:
            present.append(SavedCheckpoint(step, at, path, health=_content(path).health))
    return sorted(present, key=lambda checkpoint: (checkpoint.step, checkpoint.at))


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint is complete: a file if it ends with its table of contents and holds more than the model's
    weights, a directory if the file is there that is written last."""
    if checkpoint.is_dir():
        return (checkpoint / ".metadata").is_file() or (checkpoint / "latest").is_file()
    return zipfile.is_zipfile(checkpoint) and _content(checkpoint).has_optimizers


def step_of(checkpoint: Path) -> int | None:
    """The step by its name, or else by what it says itself; None where neither can be read."""
    match = _STEP.search(checkpoint.name)
    return _content(checkpoint).step if match is None else int(match[1])


class _Content(NamedTuple):
    """What a file says of itself; of a directory, and of a file that cannot be read safely, nothing is known."""

    has_optimizers: bool = True
    """Whether Lightning can go on from it, which it cannot with ``save_weights_only``."""
    step: int | None = None
    health: CheckpointHealth | None = None
    """What the callback has kept in it to judge it by."""


def _content(checkpoint: Path) -> _Content:
    try:
        status = checkpoint.stat()
    except OSError:  # it was removed just now
        return _Content(has_optimizers=False)
    return _Content() if checkpoint.is_dir() else _read(checkpoint, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1024)
def _read(checkpoint: Path, changed: int, size: int) -> _Content:
    """Read a file without the tensors' numbers. ``changed`` and ``size`` are part of the cache's key, so that a
    replaced file is read again."""
    try:
        content = torch.load(checkpoint, map_location="meta", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, pickle.UnpicklingError):
        return _Content()  # it is damaged, or holds objects of other classes
    content = content if isinstance(content, dict) else {}
    callbacks = content.get("callbacks")
    states = callbacks.values() if isinstance(callbacks, dict) else ()
    kept = next((state["health"] for state in states if isinstance(state, dict) and "health" in state), None)
    step = content.get("global_step")
    health = CheckpointHealth.from_json(kept)
    return _Content("optimizer_states" in content, step if isinstance(step, int) else None, health)
