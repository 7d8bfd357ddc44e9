"""Recorded alerts and runs, as ``GET /alerts`` and ``GET /history`` show them, and their NDJSON files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct

from trainmedic_core.problems import FileProblem
from trainmedic_core.target import Target
from trainmedic_server.domain.run import Status
from trainmedic_server.errors import ConfigurationError

LONGEST_LINE = 16 << 20  # bytes
_ROUNDED = timedelta(milliseconds=1)  # largest rounding error of duration_ms
_PAGE_BEGINNING = b'{"items":'

_Time = Annotated[datetime, Meta(tz=True)]
_Name = Annotated[str, Meta(min_length=1)]
_Count = Annotated[int, Meta(ge=0, le=10**13)]  # also milliseconds, which stay within `datetime`'s years


class RecordedReaction(Struct, frozen=True):
    playbook: str
    decision: str
    run_id: str | None = None


class RecordedAlert(Struct, frozen=True):
    """An item of ``GET /alerts``."""

    fingerprint: _Name
    starts_at: _Time
    first_heard: _Time
    last_heard: _Time
    labels: dict[str, str]
    count: _Count
    annotations: dict[str, str] = {}
    resolved_at: _Time | None = None
    original_labels: dict[str, str] | None = None
    reactions: tuple[RecordedReaction, ...] = ()

    @property
    def ended_at_first(self) -> bool:
        """True if its first report was its end, so that no run could start."""
        return self.resolved_at is not None and self.resolved_at <= self.first_heard


class RecordedRun(Struct, frozen=True):
    """An item of ``GET /history``."""

    run_id: _Name
    timestamp: _Time
    playbook: _Name
    mode: str
    status: str
    decision: str
    target: str | None = None
    duration_ms: _Count | None = None
    touched: tuple[str, ...] = ()
    started_by: str | None = None
    version: str = ""

    @property
    def is_observed(self) -> bool:
        return self.status == Status.OBSERVED

    @property
    def has_started(self) -> bool:
        return self.status != Status.NOT_STARTED

    @property
    def parsed_target(self) -> Target | None:
        """None if it has none that this release can read."""
        try:
            return Target.of_key(self.target) if self.target else None
        except ValueError:
            return None

    @property
    def ended(self) -> tuple[datetime, datetime] | None:
        """Earliest and latest time of its end; None while it is open."""
        if self.is_observed:
            return self.timestamp, self.timestamp
        if self.duration_ms is None:
            return None
        end = self.timestamp + timedelta(milliseconds=self.duration_ms)
        return max(end - _ROUNDED, self.timestamp), end + _ROUNDED


Recorded: TypeAlias = RecordedAlert | RecordedRun
_ALERT, _RUN = msgspec.json.Decoder(RecordedAlert), msgspec.json.Decoder(RecordedRun)


def of_item(item: Mapping[str, Any]) -> Recorded:
    """Raises ValueError if it is neither an alert nor a run."""
    return msgspec.convert(item, RecordedAlert if "first_heard" in item else RecordedRun)  # type: ignore[return-value]


def read_file(path: Path) -> Iterator[Recorded | FileProblem]:
    """Yield the file's items, and a problem for each line that is none. Raises ConfigurationError."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    yield FileProblem(str(path), number, 1, f"the line has over {LONGEST_LINE >> 20} MiB; stopped")
                    return
                text = line.strip().removesuffix(b",")
                if text in (b"", b"[", b"]", b"[]"):
                    continue
                try:
                    yield _decoded(text.removeprefix(b"["))
                except ValueError as error:
                    yield FileProblem(str(path), number, 1, _fault_of(text, error))
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror or error}") from error


def _decoded(text: bytes) -> Recorded:
    if b'"first_heard":' not in text and b'"first_heard" :' not in text:
        return _RUN.decode(text)
    try:
        return _ALERT.decode(text)
    except msgspec.ValidationError:
        if b'"run_id":' in text and b'"fingerprint":' not in text:  # a label of a run's alert has that name
            return _RUN.decode(text)
        raise


def _fault_of(text: bytes, error: ValueError) -> str:
    if text.replace(b" ", b"").startswith(_PAGE_BEGINNING):
        return "is a page of the API; export with 'Accept: application/x-ndjson', or 'trainmedic alerts --output json'"
    return f"is not one alert or run of the history: {error}"
