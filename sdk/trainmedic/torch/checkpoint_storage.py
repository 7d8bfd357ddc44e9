"""Where checkpoints are kept: the interface, and a directory of our own.

A checkpoint of `CheckpointDirectory` is ``step-00000150/`` with two files: ``training.pt``, the states of the model,
the optimizer and so on, and ``run.pt``, the run's own (step, place in the data, random generators). It is written
under another name, brought to the disk, renamed, and marked complete last; so one that is marked is whole, unless
the disk has lost it. What was written after a checkpoint that a rollback went back to is renamed to
``abandoned-…`` and deleted when training has saved something newer.

Not here: which checkpoint is meant (``checkpoints``), what a state consists of (``parts``), the user's own way of
keeping checkpoints (``own_checkpoints``).
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import shutil
import stat
import zipfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Mapping, Protocol, Sequence

import torch

from trainmedic.errors import TrainmedicError
from trainmedic.recovery import checkpoints
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.torch.state_parts import StateParts
from trainmedic.wire import envelope

log = logging.getLogger("trainmedic")

TRAINING, RUN = "training.pt", "run.pt"
_NAME = re.compile(r"step-(\d{8,18})\Z")
_LEFTOVER = re.compile(r"unfinished-\d+-step-\d+\Z|abandoned-\d+-step-\d+\Z")


# What torch.load raises for files that are missing, cut off, changed, or of another time.
_UNREADABLE = (
    *(OSError, EOFError, RuntimeError, ValueError, LookupError, AttributeError, ImportError, TypeError),
    *(pickle.UnpicklingError, zipfile.BadZipFile),
)


class UnusableCheckpoint(TrainmedicError):
    """A checkpoint cannot be loaded. Nothing was changed."""


class PartlyLoaded(UnusableCheckpoint):
    """It cannot be loaded, and may have changed something: only another that loads whole makes that good."""


class HalfLoaded(TrainmedicError):
    """A checkpoint was loaded in part, or on some ranks only. There is nothing left that one could train on."""


class CheckpointStorage(Protocol):
    """Checkpoints, however they are kept. Methods raise OSError or what the user's functions raise."""

    directory: Path | None
    """Where small files about the run may be kept."""

    def found(self) -> Sequence[SavedCheckpoint]:
        """Those that are there, in any order, the half-written ones included where they can be seen."""
        ...

    def save(self, step: int, parts: StateParts, run: Mapping[str, Any]) -> SavedCheckpoint:
        """Write a checkpoint; it is complete when this returns."""
        ...

    def load(self, found: SavedCheckpoint, parts: StateParts) -> Mapping[str, Any] | None:
        """Load it into `parts`; the run's own state, or None where it was not kept.

        Raises Unusable where it could not be read: then nothing was changed. PartLoaded, or anything else, may
        have left the parts half loaded; after PartLoaded an older one can be tried.
        """
        ...

    def went_back(self, target: SavedCheckpoint, why: Mapping[str, Any]) -> None:
        """Training goes on from `target`: later ones are of a course that was abandoned, and it is not to go."""
        ...

    def prune(self) -> None:
        """Delete those that need not be kept."""
        ...


class CheckpointDirectory:
    """Checkpoints in a directory of their own. ``keep`` of them stay; None deletes none."""

    def __init__(self, directory: str | Path, keep: int | None = 3) -> None:
        self.directory: Path | None = Path(directory)
        self._root = Path(directory)
        self._keep = keep

    def found(self) -> list[SavedCheckpoint]:
        try:
            entries = [Path(entry.path) for entry in os.scandir(self._root) if _NAME.match(entry.name)]
        except FileNotFoundError:
            return []
        return [self._look_at(path) for path in entries]

    def save(self, step: int, parts: StateParts, run: Mapping[str, Any]) -> SavedCheckpoint:
        self._root.mkdir(parents=True, exist_ok=True)
        path = self._root / f"step-{step:08d}"
        unfinished = self._root / f"unfinished-{os.getpid()}-{path.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            unfinished.mkdir()
            files = {}
            for name, content in ((TRAINING, parts.capture()), (RUN, run)):
                files[name] = write_file(unfinished / name, content)
            if path.exists():  # half-written, or of the same step and so of the same worth
                shutil.rmtree(path)
            unfinished.rename(path)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        checkpoints.flush_directory(self._root)
        at = datetime.now(timezone.utc)
        checked = torch.serialization.get_crc32_options()
        facts = {"step": step, "at": envelope.write_time(at), "files": files, "checksums": checked}
        try:
            checkpoints.mark_complete(path, facts)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return SavedCheckpoint(step, at, path)

    def load(self, found: SavedCheckpoint, parts: StateParts) -> Mapping[str, Any]:
        checked = bool((checkpoints.completion(found.path) or {}).get("checksums"))
        training = read_file(found.path / TRAINING, checked)
        run: Mapping[str, Any] = read_file(found.path / RUN, checked)
        wrong = parts.misfit(training)
        if wrong:
            raise UnusableCheckpoint(f"{found.path.name} is of another training: {wrong}")
        try:
            parts.restore(training)
        except Exception as error:  # whatever a load_state_dict raises; the parts before it are loaded by now
            raise PartlyLoaded(f"{found.path.name} was loaded in part: {type(error).__name__}: {error}") from error
        return run

    def went_back(self, target: SavedCheckpoint, why: Mapping[str, Any]) -> None:
        for one in self.found():
            if one.path != target.path and checkpoints.is_pinned(one.path):
                checkpoints.unpin(one.path)
            if one.path != target.path and (not one.complete or one.at > target.at):
                one.path.rename(self._free_name(one.path))
        checkpoints.pin(target.path, why)

    def prune(self) -> None:
        if self._keep is None:
            return
        found = self.found()
        pinned = [one.path for one in found if self._stays_pinned(one, found)]
        gone = [one.path for one in checkpoints.surplus(found, self._keep, pinned)]
        # An unfinished one of another process is a leftover: two processes do not train the same run.
        gone += [Path(entry.path) for entry in os.scandir(self._root) if _LEFTOVER.match(entry.name)]
        for path in gone:
            (path / checkpoints.COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(path)

    def _stays_pinned(self, one: SavedCheckpoint, found: Sequence[SavedCheckpoint]) -> bool:
        """Not once there are enough from beyond the step that was left for it: the trouble is over, and a late
        rollback should find out that its checkpoint is gone, rather than go back that far."""
        why = checkpoints.pin_reason(one.path)
        left = None if why is None else why.get("left_step")
        if type(left) is not int:
            return why is not None
        beyond = [other for other in found if other.complete and other.step > left]
        return len(beyond) < max(self._keep or 0, checkpoints.NEVER_DELETED)

    def _look_at(self, path: Path) -> SavedCheckpoint:
        step = int(path.name.partition("-")[2])
        facts = checkpoints.completion(path)
        if facts is not None:
            try:
                at = envelope.read_time(facts["at"])
                sizes = all((path / name).stat().st_size == size for name, size in facts["files"].items())
                return SavedCheckpoint(int(facts["step"]), at, path, complete=sizes)
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                pass
        return SavedCheckpoint(step, datetime.fromtimestamp(0, timezone.utc), path, complete=False)

    def _free_name(self, path: Path) -> Path:
        number = 1
        while (new := path.with_name(f"abandoned-{number}-{path.name}")).exists():
            number += 1
        return new


def write_file(path: Path, content: Any) -> int:
    """A file that is on the disk when this returns; its size."""
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def read_file(path: Path, checked: bool) -> Any:
    """What `write_file` wrote, all of it in memory. Raises Unusable.

    The archive has checksums, which loading does not look at.
    PyTorch's safe loading knows tensors, numbers and containers. A state that holds other objects is unpickled
    where the file is this user's alone, as the program that wrote it: whoever can change it can change that too.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip() if checked else None
            if damaged is not None:
                raise ValueError(f"{damaged} was damaged")
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            if not _is_ours_alone(path):
                raise
            return torch.load(path, map_location="cpu", weights_only=False)
    except _UNREADABLE as error:
        raise UnusableCheckpoint(f"{path.parent.name}/{path.name} cannot be read: {_first_line(error)}") from error


def _is_ours_alone(path: Path) -> bool:
    for one in (path, path.parent, path.parent.parent):
        status = one.stat()
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return False
    return True


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
