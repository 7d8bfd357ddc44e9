"""Checkpoints that the user's own functions write and load."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from trainmedic.errors import ConfigurationError, Rejected, described
from trainmedic.recovery import checkpoints
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.health import CheckpointHealth
from trainmedic.recovery.json_files import read_or_warn
from trainmedic.torch.checkpoints.checkpoint_storage import PartlyLoaded, UnusableCheckpoint
from trainmedic.torch.state_parts import StateParts
from trainmedic.wire import envelope

log = logging.getLogger("trainmedic")

ABANDONED = ".trainmedic-abandoned.json"
HEALTH = ".trainmedic-health.json"
_MOST_SPANS = 100  # of abandoned checkpoints, one per rollback
_MOST_HEALTHS = 500  # one per checkpoint
_TOLERANCE = timedelta(minutes=1)  # between the user's time of a checkpoint and the call of `save`


_Span = tuple[datetime, datetime]


@dataclass(frozen=True)
class _HealthRecord:
    step: int
    began: datetime  # when the user's ``save`` was called
    saved: datetime  # when it returned
    health: Any  # of `CheckpointHealth.to_json`

    def is_of(self, checkpoint: SavedCheckpoint) -> bool:
        earliest, latest = self.began - _TOLERANCE, self.saved + _TOLERANCE
        return checkpoint.step == self.step and earliest <= checkpoint.at <= latest

    def to_json(self) -> list[Any]:
        return [self.step, envelope.write_time(self.began), envelope.write_time(self.saved), self.health]

    @classmethod
    def from_json(cls, members: Any) -> _HealthRecord:
        """Parse `to_json`'s output. Raises ValueError, TypeError or AttributeError."""
        step, began, saved, health = members
        return cls(int(step), envelope.read_time(began), envelope.read_time(saved), health)


class OwnCheckpoints:
    """Storage by the user's own functions; nothing is ever deleted or renamed.

    Args:
        save: ``save(step, state)`` writes a checkpoint and returns when it is complete. ``state`` is the run's own
            (step, data position, random generators), a dict for ``torch.save``, to be stored with it.
        load: ``load(checkpoint)`` loads it and returns ``state``, or None without one; training then continues with
            the step only and with the next data. After an error the next older checkpoint is tried. If none can be
            loaded, the training ends, unless every error was `trainmedic.Rejected`: then nothing was changed.
        found: ``found()`` returns the existing `trainmedic.torch.SavedCheckpoint`; ``path`` is any value for ``load``
            and ``at`` the time of saving, with a time zone, within a minute.
        directory: Directory for small files: the rollback budget, changes by commands, health of checkpoints.
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
        # Spans of time in which checkpoints were abandoned by a rollback.
        warning = "%s cannot be read; abandoned checkpoints count again: %s"
        self._abandoned: list[_Span] = read_or_warn(self._file(ABANDONED), _spans_in, [], warning)
        self._has_unwritten = False  # spans
        warning = "%s cannot be read; the health of earlier checkpoints is unknown: %s"
        self._health_records: list[_HealthRecord] = read_or_warn(self._file(HEALTH), _health_records_in, [], warning)
        self.writes_files = True  # False on ranks that leave ``directory`` to another rank

    def checkpoints(self) -> list[SavedCheckpoint]:
        found = list(self._list())
        for checkpoint in found:
            if getattr(checkpoint.at, "tzinfo", None) is None:
                raise ConfigurationError(
                    f"found() gives {checkpoint.name} the time {checkpoint.at!r}; it is a datetime with a time zone, "
                    "such as datetime.now(timezone.utc)"
                )
        return [
            self._with_health(checkpoint)
            for checkpoint in found
            if not any(start < checkpoint.at <= end for start, end in self._abandoned)
        ]

    def save(self, step: int, parts: StateParts, run: Mapping[str, Any]) -> SavedCheckpoint:
        began = envelope.utc_now()
        path = self._save(step, run)
        saved = envelope.utc_now()
        try:
            self._write_abandoned()
        except OSError as error:
            log.warning("%s cannot be written; abandoned checkpoints count after a restart: %s", ABANDONED, error)
        self._record_health(_HealthRecord(step, began, saved, run.get("health")))
        return SavedCheckpoint(step, saved, path, health=CheckpointHealth.from_json(run.get("health")))

    def load(self, checkpoint: SavedCheckpoint, parts: StateParts) -> Mapping[str, Any] | None:
        path = checkpoint.path
        try:
            return self._load(checkpoint)
        except Rejected as error:
            raise UnusableCheckpoint(f"{path} could not be loaded: {error}") from error
        except Exception as error:  # any error of the user's function: try an older one
            raise PartlyLoaded(f"{path} could not be loaded: {described(error)}") from error

    def rolled_back_to(self, checkpoint: SavedCheckpoint, reason: Mapping[str, Any]) -> None:
        self._abandoned = [*self._abandoned, (checkpoint.at, envelope.utc_now())][-_MOST_SPANS:]
        self._has_unwritten = True
        try:
            self._write_abandoned()
        finally:
            if isinstance(checkpoint.path, Path) and checkpoint.path.is_dir():
                paths = [each.path for each in self._list() if isinstance(each.path, Path)]
                checkpoints.move_rollback_pin(checkpoint.path, paths, reason)

    def prune(self) -> None:
        """Delete nothing."""

    def _with_health(self, checkpoint: SavedCheckpoint) -> SavedCheckpoint:
        if checkpoint.health is not None:
            return checkpoint
        for record in reversed(self._health_records):
            if record.is_of(checkpoint):
                return replace(checkpoint, health=CheckpointHealth.from_json(record.health))
        return checkpoint

    def _record_health(self, record: _HealthRecord) -> None:
        self._health_records = [*self._health_records, record][-_MOST_HEALTHS:]
        if self.directory is None or not self.writes_files:
            return
        try:
            members = [each.to_json() for each in self._health_records]
            checkpoints.write_durably(self.directory / HEALTH, json.dumps(members).encode())
        except OSError as error:  # costs only the health after a restart
            log.warning("%s cannot be written: %s", self.directory / HEALTH, error)

    def _file(self, name: str) -> Path | None:
        return None if self.directory is None else self.directory / name

    def _write_abandoned(self) -> None:
        """Write what a full disk may have refused before. Raises OSError."""
        if self._has_unwritten and self.directory is not None:
            times = [[envelope.write_time(moment) for moment in span] for span in self._abandoned]
            checkpoints.write_durably(self.directory / ABANDONED, json.dumps(times).encode())
        self._has_unwritten = False


def _spans_in(members: Any) -> list[_Span]:
    return [(envelope.read_time(start), envelope.read_time(end)) for start, end in members]


def _health_records_in(members: Any) -> list[_HealthRecord]:
    return [_HealthRecord.from_json(each) for each in members]
