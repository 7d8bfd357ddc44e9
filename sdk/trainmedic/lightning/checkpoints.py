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
from typing import Any, Iterable

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
    checkpoints = []
    for path in paths:
        complete = is_complete(path)
        step = step_of(path) if complete else None
        try:
            at = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
        except OSError:  # it was removed just now
            continue
        if step is not None:
            checkpoints.append(SavedCheckpoint(step, at, path, complete, _health_of(path) if complete else None))
    return sorted(checkpoints, key=lambda checkpoint: (checkpoint.step, checkpoint.at))


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint is complete: a file if it ends with its table of contents and holds more than the model's
    weights, a directory if the file is there that is written last."""
    if checkpoint.is_dir():
        return (checkpoint / ".metadata").is_file() or (checkpoint / "latest").is_file()
    try:
        status = checkpoint.stat()
        return zipfile.is_zipfile(checkpoint) and _holds_optimizers(checkpoint, status.st_mtime_ns, status.st_size)
    except OSError:
        return False


@functools.lru_cache(maxsize=1024)
def _holds_optimizers(checkpoint: Path, changed: int, size: int) -> bool:
    """Whether Lightning can go on from it, which it cannot with ``save_weights_only``. ``changed`` and ``size`` are
    part of the cache's key, so that a replaced file is read again."""
    content = _content(checkpoint)
    return content is None or "optimizer_states" in content


def _health_of(checkpoint: Path) -> CheckpointHealth | None:
    """What the callback has kept in it to judge it by; None where that cannot be read."""
    try:
        status = checkpoint.stat()
    except OSError:
        return None
    return None if checkpoint.is_dir() else _kept_health(checkpoint, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1024)
def _kept_health(checkpoint: Path, changed: int, size: int) -> CheckpointHealth | None:
    content = _content(checkpoint)
    callbacks = content.get("callbacks") if isinstance(content, dict) else None
    states = callbacks.values() if isinstance(callbacks, dict) else ()
    kept = next((state["health"] for state in states if isinstance(state, dict) and "health" in state), None)
    return CheckpointHealth.from_json(kept)


def step_of(checkpoint: Path) -> int | None:
    """The step by its name, or else by what it says itself; None where neither can be read."""
    match = _STEP.search(checkpoint.name)
    if match is not None:
        return int(match[1])
    if checkpoint.is_dir():
        return None
    content = _content(checkpoint)
    try:
        return None if content is None else int(content["global_step"])
    except (KeyError, TypeError, ValueError):
        return None


def _content(checkpoint: Path) -> Any:
    """The content of a file, without the tensors' numbers; None if it cannot be read safely, because it is damaged or
    holds objects of other classes."""
    try:
        return torch.load(checkpoint, map_location="meta", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, pickle.UnpicklingError):
        return None
