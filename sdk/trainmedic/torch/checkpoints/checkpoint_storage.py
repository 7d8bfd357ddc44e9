"""Storage of checkpoints: the interface, and a directory.

``step-00000150/`` has ``training.pt`` (the parts' states) and ``run.pt`` (the run's own). A rollback renames later ones
to ``abandoned-…``, deleted after the next save.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shutil
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Callable, Mapping, Protocol, Sequence, TypeVar

import torch

from trainmedic.errors import NotAgreed, TrainmedicError, described
from trainmedic.job.group import Group
from trainmedic.recovery import checkpoints
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.health import CheckpointHealth
from trainmedic.torch.checkpoints.checkpoint_files import UnusableCheckpoint as UnusableCheckpoint
from trainmedic.torch.checkpoints.checkpoint_files import read_file, read_training, write_file, write_training
from trainmedic.torch.checkpoints.frozen_base import FrozenBase
from trainmedic.torch.rank_agreement import FailedOnSomeRanks, on_all_ranks
from trainmedic.torch.state_parts import StateParts
from trainmedic.wire import envelope

log = logging.getLogger("trainmedic")

Prepared = TypeVar("Prepared")
Content = TypeVar("Content")

ALERT_TO_ROLLBACK = 120.0  # seconds from a fault's start to its rollback, with the shipped alert rules
RUN = "run.pt"
_SHARED = "another process writes checkpoints into this directory too; give each job its own directory"
_NAME = re.compile(r"step-(\d{8,18})\Z")
_LEFTOVER = re.compile(r"(?:unfinished|abandoned)-[0-9a-f-]+-step-\d+\Z")


class PartlyLoaded(UnusableCheckpoint):
    """A checkpoint cannot be loaded, and something may have changed. Only loading another repairs that."""


class HalfLoaded(TrainmedicError):
    """A checkpoint was loaded in part or on some ranks only. The training ends."""


class CheckpointStorage(Protocol):
    """Storage of checkpoints. Methods raise OSError or the user's errors."""

    directory: Path | None  # directory for small files, or None

    def checkpoints(self) -> Sequence[SavedCheckpoint]: ...

    def save(self, step: int, parts: StateParts, run: Mapping[str, Any]) -> SavedCheckpoint:
        """Write a checkpoint; complete on return."""
        ...

    def load(self, checkpoint: SavedCheckpoint, parts: StateParts) -> Mapping[str, Any] | None:
        """Load into `parts`; return the run's own state, None if the checkpoint lacks it.

        After UnusableCheckpoint nothing is changed; after PartlyLoaded an older one can be tried; others are fatal.
        """
        ...

    def rolled_back_to(self, checkpoint: SavedCheckpoint, reason: Mapping[str, Any]) -> None:
        """Protect ``checkpoint`` and no longer list later ones."""
        ...

    def prune(self) -> None: ...


class CheckpointDirectory:
    """Directory of the ``keep`` newest checkpoints (None: all). One rank ``watches`` for other writers."""

    def __init__(self, directory: str | Path, keep: int | None = 3, watches: bool = True) -> None:
        self._root = Path(directory)
        self.directory: Path | None = self._root
        self._keep = keep
        self._watches = watches
        self.in_memory: Callable[[], Sequence[SavedCheckpoint]] = tuple  # returns checkpoints in memory
        self._has_warned = False
        self._frozen = FrozenBase()
        self._writer_id = envelope.new_id()
        self._began = envelope.write_time(envelope.utc_now())  # compared as text, which sorts by time
        self._is_shared = False  # another process writes here too
        self._marks_at_start: Mapping[Path, Mapping[str, Any] | None] = {}
        self._names_at_start: frozenset[str] = frozenset()
        with contextlib.suppress(OSError):  # reported by the next access
            self._marks_at_start = self._completion_marks()
            self._names_at_start = frozenset(path.name for path in self._root.iterdir())

    def checkpoints(self) -> list[SavedCheckpoint]:
        """Return all but those of another process since the start."""
        marks = self._completion_marks().items()
        return [self._inspect(path, facts) for path, facts in marks if not self._is_of_another_process(path, facts)]

    def _completion_marks(self) -> dict[Path, Mapping[str, Any] | None]:
        """Return marks by path; None for incomplete checkpoints."""
        try:
            paths = [Path(entry.path) for entry in os.scandir(self._root) if _NAME.match(entry.name)]
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {path: checkpoints.completion(path) for path in paths}

    def _is_of_another_process(self, path: Path, facts: Mapping[str, Any] | None) -> bool:
        if not self._watches or facts is None or facts.get("writer") in (None, self._writer_id):
            return False
        if str(facts.get("at")) < self._began or facts == self._marks_at_start.get(path):
            return False
        if not self._is_shared:
            self._is_shared = True
            log.error("%s: %s; rollbacks ignore them", self._root, _SHARED)
        return True

    def save(self, step: int, parts: StateParts, run: Mapping[str, Any]) -> SavedCheckpoint:
        self._root.mkdir(parents=True, exist_ok=True)
        path = self._path_of(step)
        unfinished = self._unfinished_path(path)
        try:
            unfinished.mkdir()
            sizes = write_training(unfinished, self._frozen.split(parts, parts.capture(), run))
            sizes[RUN] = write_file(unfinished / RUN, run)
            at = self._publish(unfinished, path, step, sizes, health=run.get("health"))
        except BaseException:  # an interrupt must not leave a partial checkpoint either
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return SavedCheckpoint(step, at, path)

    def load(self, checkpoint: SavedCheckpoint, parts: StateParts) -> Mapping[str, Any]:
        path = checkpoint.path
        checked = bool((checkpoints.completion(path) or {}).get("checksums"))
        training = read_training(path, parts, checked)
        run: Mapping[str, Any] = read_file(path / RUN, checked)
        check_match(path, parts, training)
        try:
            parts.restore(training)
        except Exception as error:  # any error of load_state_dict; earlier parts are already loaded
            raise PartlyLoaded(f"{path.name} was loaded in part: {described(error)}") from error
        return run

    def rolled_back_to(self, checkpoint: SavedCheckpoint, reason: Mapping[str, Any]) -> None:
        present = self.checkpoints()
        fault: OSError | None = None
        paths = []
        # First, because a restart must find none of them, also after a kill. A rename needs no space, a pin does.
        for other in sorted(present, key=lambda other: other.at, reverse=True):
            path = other.path
            if path != checkpoint.path and (not other.complete or other.at > checkpoint.at):
                try:
                    path = path.rename(self._abandoned_path(path))
                except OSError as error:
                    fault = error
            paths.append(path)
        target = checkpoint.path if isinstance(checkpoint.path, Path) else None  # None in memory
        checkpoints.move_rollback_pin(target, paths, reason)
        if fault is not None:
            raise fault

    def prune(self) -> None:
        if self._keep is None:
            return
        present = self.checkpoints()
        pinned = [checkpoint for checkpoint in present if self._stays_pinned(checkpoint, present)]
        targets = [each.step for each in pinned if checkpoints.is_pinned_by_rollback(each.path)]
        back_to = min(targets, default=None)
        pinned_paths = [checkpoint.path for checkpoint in pinned]
        surplus = checkpoints.surplus(present, self._keep, pinned_paths, back_to)
        to_delete = [each.path for each in surplus]
        if not self._is_shared:  # else the other process deletes its own
            leftovers = [path for path in self._root.iterdir() if self._is_leftover(path.name)]
            to_delete += [path for path in leftovers if not checkpoints.is_pinned_by_user(path)]
        self._warn_if_too_few([each for each in present if each.path not in to_delete], len(to_delete))
        fault: OSError | None = None
        for path in to_delete:
            try:
                # Delete the mark first: a partly deleted checkpoint must not count as complete.
                (path / checkpoints.COMPLETE).unlink(missing_ok=True)
                shutil.rmtree(path)
            except OSError as error:  # the others can still be deleted
                fault = error
        if fault is not None:
            raise fault

    def _is_leftover(self, name: str) -> bool:
        # A new ``unfinished-`` directory of another process may still be written.
        is_own = name.startswith("abandoned-") or self._writer_id in name
        return bool(_LEFTOVER.match(name)) and (is_own or name in self._names_at_start)

    def _warn_if_too_few(self, staying: Sequence[SavedCheckpoint], surplus: int) -> None:
        complete = checkpoints.newest_first(staying)
        if self._has_warned or not surplus or len(complete) < checkpoints.NEVER_DELETED:
            return
        oldest = min(each.at for each in (*complete, *self.in_memory()))
        seconds = (complete[0].at - oldest).total_seconds()
        if seconds < ALERT_TO_ROLLBACK:
            self._has_warned = True
            needed = math.ceil(ALERT_TO_ROLLBACK * (len(complete) - 1) / max(seconds, 1.0)) + 1
            log.warning(
                "%s: the %d kept checkpoints reach back %.0f s, but an alert's rollback may come %.0f s after its "
                "start and is rejected if all checkpoints are newer: keep about %d, or write them less often",
                *(self._root, len(complete), seconds, ALERT_TO_ROLLBACK, needed),
            )

    def _stays_pinned(self, checkpoint: SavedCheckpoint, present: Sequence[SavedCheckpoint]) -> bool:
        """Return whether few checkpoints are newer than the step that the rollback left: the fault may recur."""
        reason = checkpoints.pin_reason(checkpoint.path)
        if reason is None:
            return False
        left_step = reason.get("left_step")
        if type(left_step) is not int:  # pinned by the user
            return True
        beyond = [other for other in present if other.complete and other.step > left_step]
        return len(beyond) < max(self._keep or 0, checkpoints.NEVER_DELETED)

    def _path_of(self, step: int) -> Path:
        return self._root / f"step-{step:08d}"

    def _unfinished_path(self, path: Path) -> Path:
        unfinished = self._root / f"unfinished-{self._writer_id}-{path.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        return unfinished

    def begin_parts(self, step: int) -> str:
        # Implements `PartWriter`, with the next three methods. The last two run in the thread of `BackgroundSaves`.
        unfinished = self._unfinished_path(self._path_of(step))
        unfinished.mkdir(parents=True)
        return unfinished.name

    def part_directory(self, name: str) -> Path:
        return self._root / name

    def write_part(self, unfinished: Path, parts: StateParts, held: Any, run: Mapping[str, Any]) -> None:
        write_training(unfinished, self._frozen.split(parts, held, run))
        write_file(unfinished / RUN, run)

    def finish_parts(self, unfinished: Path, step: int, at: datetime, health: Any) -> SavedCheckpoint:
        path = self._path_of(step)
        sizes = {file.name: file.stat().st_size for file in unfinished.iterdir()}
        self._publish(unfinished, path, step, sizes, at=envelope.write_time(at), health=health)
        return SavedCheckpoint(step, at, path)

    def _publish(self, unfinished: Path, path: Path, step: int, sizes: Mapping[str, int], **more: Any) -> datetime:
        """Rename and mark a written checkpoint; return its time."""
        if self._is_of_another_process(path, checkpoints.completion(path)):
            raise TrainmedicError(f"{path.name} is there already: {_SHARED}")
        if checkpoints.is_pinned_by_user(path):
            path.rename(self._abandoned_path(path))
        elif path.exists():  # incomplete, or of the same step and equivalent
            shutil.rmtree(path)
        unfinished.rename(path)
        checkpoints.flush_directory(self._root)
        checked = torch.serialization.get_crc32_options()  # ``torch.save`` writes checksums
        at = envelope.write_time(envelope.utc_now())
        facts = {"step": step, "at": at, "files": sizes, "checksums": checked, "writer": self._writer_id, **more}
        try:
            checkpoints.mark_complete(path, facts)
        except BaseException:  # an interrupt must not leave a partial checkpoint either
            shutil.rmtree(path, ignore_errors=True)
            raise
        return envelope.read_time(facts["at"])

    def _inspect(self, path: Path, facts: Mapping[str, Any] | None) -> SavedCheckpoint:
        step = int(path.name.partition("-")[2])
        if facts is not None:
            try:
                at = envelope.read_time(facts["at"])
                is_complete = all((path / name).stat().st_size == size for name, size in facts["files"].items())
                health = CheckpointHealth.from_json(facts.get("health"))
                return SavedCheckpoint(int(facts["step"]), at, path, complete=is_complete, health=health)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
                pass  # an invalid mark, or missing files
        return SavedCheckpoint(step, datetime.fromtimestamp(0, timezone.utc), path, complete=False)

    def _abandoned_path(self, path: Path) -> Path:
        number = 1
        while (new := path.with_name(f"abandoned-{number}-{path.name}")).exists():
            number += 1
        return new


def read_jointly(
    group: Group, name: str, prepare: Callable[[], Prepared], read: Callable[[Prepared], Content]
) -> tuple[Prepared, Content]:
    """Return both results once each succeeded on all ranks. Raises UnusableCheckpoint, NotAgreed and HalfLoaded."""
    try:
        prepared = on_all_ranks(group, prepare)
        try:
            return prepared, on_all_ranks(group, lambda: read(prepared))
        except NotAgreed as error:
            # This rank may have reported success, so the others may be loading now.
            raise HalfLoaded(f"it is not known whether the other ranks load {name}: {error}") from error
    except FailedOnSomeRanks as error:
        raise UnusableCheckpoint(f"{name} cannot be loaded: {error}") from error


def check_match(path: Path, parts: StateParts, states: Mapping[str, Any]) -> None:
    """Raise UnusableCheckpoint if the states are of other parts."""
    mismatch = parts.mismatch(states)
    if mismatch:
        raise UnusableCheckpoint(f"{path.name} is of another training: {mismatch}")
