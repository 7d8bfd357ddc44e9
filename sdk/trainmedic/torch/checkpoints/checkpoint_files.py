"""Files of checkpoints, written durably and read with their checksums."""

from __future__ import annotations

import io
import logging
import os
import pickle
import stat
import zipfile
from pathlib import Path
from typing import Any

import torch

from trainmedic.errors import TrainmedicError
from trainmedic.recovery.checkpoints import write_durably
from trainmedic.torch.checkpoints.frozen_base import Split, frozen_file_of, identical_present_base, join
from trainmedic.torch.state_parts import StateParts

log = logging.getLogger("trainmedic")

TRAINING = "training.pt"


class UnusableCheckpoint(TrainmedicError):
    """A checkpoint cannot be loaded; nothing has changed."""


def write_file(path: Path, content: Any) -> int:
    """Write durably; return the size in bytes."""
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def add_file(path: Path, content: Any) -> None:
    """Write a file atomically into a framework's checkpoint. Raises OSError."""
    data = io.BytesIO()
    torch.save(content, data)
    write_durably(path, data.getvalue())


def write_training(directory: Path, split: Split) -> dict[str, int]:
    """Write states and frozen parameters; return sizes by file name."""
    sizes = {TRAINING: write_file(directory / TRAINING, split.trained)}
    if split.frozen is not None:
        if not split.link(directory):
            write_file(directory / split.file, split.frozen)
        sizes[split.file] = (directory / split.file).stat().st_size
    return sizes


def read_training(path: Path, parts: StateParts, checked: bool) -> dict[str, Any]:
    """Read `write_training`'s states; ``checked`` verifies checksums. Raises UnusableCheckpoint."""
    states: dict[str, Any] = read_file(path / TRAINING, checked)
    file = frozen_file_of(states)
    if file:
        try:
            frozen = read_file(path / file, checked)
        except UnusableCheckpoint as error:
            frozen = identical_present_base(parts, states)
            if frozen is None:
                raise
            log.warning("%s; using the identical present parameters instead", error)
        join(states, frozen)
    return states


def read_file(path: Path, checked: bool) -> Any:
    """Read a file; ``checked`` verifies checksums. Raises UnusableCheckpoint.

    Unsafe objects are unpickled only if no other user can write the file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip() if checked else None
            if damaged is not None:
                raise ValueError(f"{damaged} was damaged")
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            if not _only_we_can_write(path):
                raise
            return torch.load(path, map_location="cpu", weights_only=False)
    except MemoryError:  # the file may be intact, and an older one needs as much
        raise
    except Exception as error:  # zipfile and torch.load raise many types for damaged files
        raise UnusableCheckpoint(f"{path.parent.name}/{path.name} cannot be read: {_first_line(error)}") from error


def _only_we_can_write(path: Path) -> bool:
    for entry in (path, path.parent, path.parent.parent):
        status = entry.stat()
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return False
    return True


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
