"""Checkpoints that the user's own functions write and load.

Not here: the interface that this implements (``checkpoint_storage``).
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from trainmedic.errors import Rejected
from trainmedic.recovery import checkpoints
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.health import CheckpointHealth
from trainmedic.torch.checkpoints.checkpoint_storage import PartlyLoaded, UnusableCheckpoint
from trainmedic.torch.state_parts import StateParts
from trainmedic.wire import envelope

log = logging.getLogger("trainmedic")

ABANDONED = ".trainmedic-abandoned.json"
HEALTH = ".trainmedic-health.json"
_MOST = 100  # spans that are kept, one for each rollback
_MOST_HEALTH = 500  # checkpoints
_NEAR = timedelta(minutes=1)  # between the time that the user's function gives and that of the call which wrote it


@dataclass(frozen=True)
class _KeptHealth:
    """What was known when the user's function wrote a checkpoint."""

    step: int
    began: datetime
    saved: datetime
    health: Any
    """As `CheckpointHealth.to_json` gives it."""

    def is_of(self, checkpoint: SavedCheckpoint) -> bool:
        """Whether that is the one: of the same step there may be another, of an abandoned course."""
        return checkpoint.step == self.step and self.began - _NEAR <= checkpoint.at <= self.saved + _NEAR

    def to_json(self) -> list[Any]:
        return [self.step, envelope.write_time(self.began), envelope.write_time(self.saved), self.health]

    @classmethod
    def from_json(cls, members: Any) -> _KeptHealth:
        """Raises ValueError, TypeError, AttributeError."""
        step, began, saved, health = members
        return cls(int(step), envelope.read_time(began), envelope.read_time(saved), health)


class OwnCheckpoints:
    """The user's own way of saving and loading.

    ``save(step, state)`` writes a checkpoint and returns when it is complete; ``state`` is the run's own (step,
    position in the data, random generators), a dict that ``torch.save`` takes, to be kept along with it.
    ``load(checkpoint)`` loads one into place and returns that ``state``, or None where it was not kept; then the run
    knows its step only, and goes on with the data that come. Where it raises, the next older one is tried; where
    none can be loaded the training ends, for it may be half loaded, unless it was `trainmedic.Rejected` that was
    raised each time, which says that nothing was changed. ``found()`` lists what is there as
    `trainmedic.torch.SavedCheckpoint`, whose ``path`` is whatever ``load`` knows it by. ``directory`` is for small
    files about the run: the rollback budget, what commands have changed, and by what each checkpoint is judged
    (for which ``at`` is to be the time of saving, within a minute). Nothing is ever deleted or renamed.
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
        self._kept_health = self._recall_health()
        self.writes_files = True
        """Whether this process writes into ``directory``."""

    def checkpoints(self) -> list[SavedCheckpoint]:
        return [
            self._with_health(checkpoint)
            for checkpoint in self._list()
            if not any(start < checkpoint.at <= end for start, end in self._abandoned)
        ]

    def save(self, step: int, parts: StateParts, run: Mapping[str, Any]) -> SavedCheckpoint:
        began = envelope.utc_now()
        path = self._save(step, run)
        saved = envelope.utc_now()
        self._keep_health(_KeptHealth(step, began, saved, run.get("health")))
        return SavedCheckpoint(step, saved, path, health=CheckpointHealth.from_json(run.get("health")))

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

    def _with_health(self, checkpoint: SavedCheckpoint) -> SavedCheckpoint:
        """The same, with what was known when it was saved: where the user's function does not say it."""
        if checkpoint.health is not None:
            return checkpoint
        for kept in reversed(self._kept_health):
            if kept.is_of(checkpoint):
                return replace(checkpoint, health=CheckpointHealth.from_json(kept.health))
        return checkpoint

    def _keep_health(self, kept: _KeptHealth) -> None:
        self._kept_health = [*self._kept_health, kept][-_MOST_HEALTH:]
        if self.directory is None or not self.writes_files:
            return
        try:
            members = [each.to_json() for each in self._kept_health]
            checkpoints.write_durably(self.directory / HEALTH, json.dumps(members).encode())
        except OSError as error:  # it costs the judgement after a restart, and not the checkpoint
            log.warning("%s cannot be written: %s", self.directory / HEALTH, error)

    def _recall_health(self) -> list[_KeptHealth]:
        if self.directory is None:
            return []
        file = self.directory / HEALTH
        try:
            return [_KeptHealth.from_json(members) for members in json.loads(file.read_bytes())]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            log.warning("%s cannot be read; earlier checkpoints are not judged: %s", file, error)
            return []

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
