"""Checkpoints of a Lightning Trainer: files, or directories of all ranks."""

from __future__ import annotations

import functools
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
    return directory / f"trainmedic-step={step}{SUFFIX}"


def in_directories(directories: Iterable[Path]) -> list[SavedCheckpoint]:
    paths = {path for directory in directories for path in directory.glob(f"*{SUFFIX}") if not path.is_symlink()}
    present = []
    for path in paths:
        step = step_of(path) if is_complete(path) else None
        try:
            at = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
        except OSError:  # just removed
            continue
        if step is not None:
            present.append(SavedCheckpoint(step, at, path, health=_content(path).health))
    return sorted(present, key=lambda checkpoint: (checkpoint.step, checkpoint.at))


def is_complete(checkpoint: Path) -> bool:
    if checkpoint.is_dir():  # of a sharding strategy, or DeepSpeed
        return (checkpoint / ".metadata").is_file() or (checkpoint / "latest").is_file()
    return zipfile.is_zipfile(checkpoint) and _content(checkpoint).has_optimizers


def is_written(checkpoint: Path) -> bool:
    """Return whether a file is complete, or a directory exists."""
    return checkpoint.is_dir() or is_complete(checkpoint)


def step_of(checkpoint: Path) -> int | None:
    match = _STEP.search(checkpoint.name)
    return _content(checkpoint).step if match is None else int(match[1])


class _Content(NamedTuple):
    has_optimizers: bool = True
    step: int | None = None
    health: CheckpointHealth | None = None


def _content(checkpoint: Path) -> _Content:
    try:
        status = checkpoint.stat()
    except OSError:  # just removed
        return _Content(has_optimizers=False)
    return _Content() if checkpoint.is_dir() else _read(checkpoint, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1024)
def _read(checkpoint: Path, changed: int, size: int) -> _Content:
    """Read a file without tensors. By time and size, the cache misses replaced files."""
    try:
        content = torch.load(checkpoint, map_location="meta", mmap=True, weights_only=True)
    except Exception:  # torch raises many types for damaged files
        return _Content()  # damaged, or with objects of other classes, which Lightning may load: taken as complete
    content = content if isinstance(content, dict) else {}
    callbacks = content.get("callbacks")
    states = callbacks.values() if isinstance(callbacks, dict) else ()
    stored = next((state["health"] for state in states if isinstance(state, dict) and "health" in state), None)
    step = content.get("global_step")
    health = CheckpointHealth.from_json(stored)
    return _Content("optimizer_states" in content, step if isinstance(step, int) else None, health)
