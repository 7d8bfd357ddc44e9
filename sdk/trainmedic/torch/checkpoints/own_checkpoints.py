"""Checkpoints that the user's own functions write and load.

Not here: the interface that this implements (``checkpoint_storage``).
"""

from __future__ import annotations

import json
import logging
from datetime import datetime
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from trainmedic.errors import Rejected
from trainmedic.recovery import checkpoints
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.torch.checkpoints.checkpoint_storage import PartlyLoaded, UnusableCheckpoint
from trainmedic.torch.state_parts import StateParts
from trainmedic.wire import envelope

log = logging.getLogger("trainmedic")

ABANDONED = ".trainmedic-abandoned.json"
_MOST = 100  # spans that are kept, one for each rollback


class OwnCheckpoints:
    """The user's own way of saving and loading.

    ``save(step, state)`` writes a checkpoint and returns when it is complete; ``state`` is the run's own (step,
    position in the data, random generators), a dict that ``torch.save`` takes, to be kept along with it.
    ``load(checkpoint)`` loads one into place and returns that ``state``, or None where it was not kept; then the run
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
        self._list = found
        # Spans of time. Checkpoints that were saved in one of them were abandoned by a rollback.
        self._abandoned = self._recall()

    def checkpoints(self) -> list[SavedCheckpoint]:
        return [
            checkpoint
            for checkpoint in self._list()
            if not any(start < checkpoint.at <= end for start, end in self._abandoned)
        ]

    def save(self, step: int, parts: StateParts, run: Mapping[str, Any]) -> SavedCheckpoint:
        path = self._save(step, run)
        return SavedCheckpoint(step, envelope.utc_now(), path)

    def load(self, checkpoint: SavedCheckpoint, parts: StateParts) -> Mapping[str, Any] | None:
        path = checkpoint.path
        try:
            return self._load(checkpoint)
        except Rejected as error:
            raise UnusableCheckpoint(f"{path} could not be loaded: {error}") from error
        except Exception as error:  # whatever the user's function raises: an older one may do
            raise PartlyLoaded(f"{path} could not be loaded: {type(error).__name__}: {error}") from error

    def rolled_back_to(self, checkpoint: SavedCheckpoint, reason: Mapping[str, Any]) -> None:
        self._abandoned = [*self._abandoned, (checkpoint.at, envelope.utc_now())][-_MOST:]
        if self.directory is not None:
            times = [[envelope.write_time(moment) for moment in span] for span in self._abandoned]
            checkpoints.write_durably(self.directory / ABANDONED, json.dumps(times).encode())
        if isinstance(checkpoint.path, Path) and checkpoint.path.is_dir():
            for path in [checkpoint.path for checkpoint in self._list()]:
                if isinstance(path, Path) and path != checkpoint.path and checkpoints.is_pinned(path):
                    checkpoints.unpin(path)
            checkpoints.pin(checkpoint.path, reason)

    def prune(self) -> None:
        """Delete nothing, because the user's checkpoints are the user's to delete."""

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
