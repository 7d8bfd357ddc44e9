"""Checkpoints that the user's own functions write and load.

Not here: the interface that this implements (``storage``).
"""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from trainmedic.errors import Rejected
from trainmedic.recovery import checkpoints
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.torch.checkpoint_storage import PartlyLoaded, UnusableCheckpoint
from trainmedic.torch.state_parts import StateParts
from trainmedic.wire import envelope

log = logging.getLogger("trainmedic")

ABANDONED = ".trainmedic-abandoned.json"
_MOST = 100


class OwnCheckpoints:
    """The user's own way of saving and loading.

    ``save(step, state)`` writes a checkpoint and returns when it is complete; ``state`` is the run's own (step,
    place in the data, random generators), a dict that ``torch.save`` takes, to be kept along with it.
    ``load(found)`` loads one into place and returns that ``state``, or None where it was not kept; then the run
    knows its step only, and goes on with the data that come. Where it raises, the next older one is tried; where
    none can be loaded the training ends, for it may be half loaded, unless it was `trainmedic.Rejected` that was
    raised each time, which says that nothing was changed. ``found()`` lists what is there as
    `trainmedic.torch.SavedCheckpoint`, whose ``path`` is whatever ``load`` knows it by. ``directory`` is for small
    files about the run: the rollback budget, what commands have changed. Nothing is ever deleted or renamed.
    """

    def __init__(
        self,
        save: Callable[[int, Mapping[str, Any]], Any],
        load: Callable[[SavedCheckpoint], Mapping[str, Any] | None],
        found: Callable[[], Sequence[SavedCheckpoint]],
        directory: str | Path | None = None,
    ) -> None:
        self.directory = Path(directory) if directory is not None else None
        self._save = save
        self._load = load
        self._found = found
        # Between two times, what was saved is of a course that a rollback has abandoned.
        self._abandoned = self._recall()

    def found(self) -> list[SavedCheckpoint]:
        return [one for one in self._found() if not any(start < one.at <= end for start, end in self._abandoned)]

    def save(self, step: int, parts: StateParts, run: Mapping[str, Any]) -> SavedCheckpoint:
        path = self._save(step, run)
        return SavedCheckpoint(step, datetime.now(timezone.utc), path)

    def load(self, found: SavedCheckpoint, parts: StateParts) -> Mapping[str, Any] | None:
        try:
            return self._load(found)
        except Rejected as error:
            raise UnusableCheckpoint(f"{found.path} could not be loaded: {error}") from error
        except Exception as error:  # whatever the user's function raises: an older one may do
            raise PartlyLoaded(f"{found.path} could not be loaded: {type(error).__name__}: {error}") from error

    def went_back(self, target: SavedCheckpoint, why: Mapping[str, Any]) -> None:
        self._abandoned = [*self._abandoned, (target.at, datetime.now(timezone.utc))][-_MOST:]
        if self.directory is not None:
            times = [[envelope.write_time(one) for one in span] for span in self._abandoned]
            checkpoints.write_durably(self.directory / ABANDONED, json.dumps(times).encode())
        if isinstance(target.path, Path) and target.path.is_dir():
            for one in self._found():
                if isinstance(one.path, Path) and one.path != target.path and checkpoints.is_pinned(one.path):
                    checkpoints.unpin(one.path)
            checkpoints.pin(target.path, why)

    def prune(self) -> None:
        """What is deleted when is the user's business."""

    def _recall(self) -> list[tuple[datetime, datetime]]:
        if self.directory is None:
            return []
        file = self.directory / ABANDONED
        try:
            spans = json.loads(file.read_bytes())
            return [(envelope.read_time(start), envelope.read_time(end)) for start, end in spans]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read; checkpoints of an abandoned course count again: %s", file, error)
            return []
