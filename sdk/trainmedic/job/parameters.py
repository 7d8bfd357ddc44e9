from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Callable, Mapping

from trainmedic.errors import Rejected
from trainmedic.wire import envelope

_DURATION = re.compile(r"^(?=.)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?(?:(\d+)ms)?$")
_LONGEST_PAUSE = timedelta(days=30)
_LARGEST_COUNT = (1 << 63) - 1
# More would block the loop too long.
_MOST_SKIPPED = 1_000_000
LARGEST_LR_SCALE = 4.0  # Most trainings diverge at four times the tuned rate


@dataclass(frozen=True)
class Checkpoint:
    """Write a checkpoint now."""


@dataclass(frozen=True)
class Rollback:
    """Go back to a complete checkpoint, then skip ``skip_batches`` batches.

    The checkpoint is the newest healthy one written before ``before`` (UTC), at or before ``step``, or at least
    ``steps_back`` steps ago; without any, of all.
    """

    before: datetime | None = None
    step: int | None = None
    steps_back: int | None = None
    skip_batches: int = 0

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.before, self.step, self.steps_back)) > 1:
            raise ValueError("only one of before, step and steps_back can be given")
        if self.skip_batches > _MOST_SKIPPED:
            raise ValueError(f"skip_batches is more than {_MOST_SKIPPED}")


@dataclass(frozen=True)
class ScaleLr:
    """Multiply the learning rate, schedule included, by ``factor``."""

    factor: float


@dataclass(frozen=True)
class ScaleBatch:
    """Multiply the micro-batch size by ``factor``. ``keep_global_batch`` adapts the accumulation."""

    factor: float
    keep_global_batch: bool = True


@dataclass(frozen=True)
class Accumulate:
    """Multiply the gradient accumulation steps by ``factor``, which may be below 1."""

    factor: float


@dataclass(frozen=True)
class DataloaderWorkers:
    """Set each rank's data loader workers to ``count``, or lower them to ``at_most``.

    Answer with ``previous``, for the undo.
    """

    count: int | None = None
    at_most: int | None = None

    def __post_init__(self) -> None:
        if (self.count is None) == (self.at_most is None):
            raise ValueError("count or at_most is missing" if self.count is None else "give one of count and at_most")

    def wanted(self, present: int) -> int:
        """Return the new number. Raises Rejected if there is nothing to lower."""
        if self.count is not None:
            return self.count
        assert self.at_most is not None
        if present <= self.at_most:
            workers = f"{present} worker process{'' if present == 1 else 'es'}"
            raise Rejected(f"nothing to lower: each data loader has {workers}, and at most {self.at_most} are wanted")
        return self.at_most


@dataclass(frozen=True)
class EmptyCache:
    """Return cached GPU memory to the driver."""


@dataclass(frozen=True)
class Pause:
    """Hold the loop at a step boundary until a resume, at most for ``max``.

    With ``extends``, the ID of an earlier pause, only if that one still lasts.
    """

    max: timedelta = timedelta(hours=1)
    extends: str | None = None


@dataclass(frozen=True)
class Resume:
    """End a pause."""


@dataclass(frozen=True)
class Stop:
    """End the loop in order, after a checkpoint if ``checkpoint`` is set."""

    checkpoint: bool = True


Parameters = (
    Checkpoint | Rollback | ScaleLr | ScaleBatch | Accumulate | DataloaderWorkers | EmptyCache | Pause | Resume | Stop
)

ACTIONS: Mapping[str, type[Parameters]] = {
    "job.checkpoint": Checkpoint,
    "job.rollback": Rollback,
    "job.scale_lr": ScaleLr,
    "job.scale_batch": ScaleBatch,
    "job.accumulate": Accumulate,
    "job.dataloader_workers": DataloaderWorkers,
    "job.empty_cache": EmptyCache,
    "job.pause": Pause,
    "job.resume": Resume,
    "job.stop": Stop,
}


def parse(action: str, params: Mapping[str, Any]) -> Parameters | None:
    """Return typed parameters; None for unknown actions. Raises ValueError, also for unknown parameters."""
    kind = ACTIONS.get(action)
    if kind is None:
        return None
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for name, value in params.items():
        if name not in fields:
            raise ValueError(f"{action} has no parameter {name[:64]!r}")
        if value is None and fields[name].default is None:
            continue
        values[name] = _READERS[name](name, value)
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING:
            raise ValueError(f"{name} is missing")
    return kind(**values)


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST_COUNT:
        raise ValueError(f"{name} is not a whole number of 0 or more, and below 2^63")
    return value


def _factor(name: str, value: Any) -> float:
    try:
        factor = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    except OverflowError:  # JSON integers may have any length
        factor = math.inf
    if not 0 < factor < math.inf:
        raise ValueError(f"{name} is not a finite number above 0")
    return factor


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is not true or false")
    return value


def _command_id(name: str, value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 64:
        raise ValueError(f"{name} is not the ID of a command")
    return value


def _time(name: str, value: Any) -> datetime:
    if not isinstance(value, str):
        raise ValueError(f"{name} is not an RFC 3339 time")
    try:
        return envelope.read_time(value)
    except envelope.EnvelopeError as error:
        raise ValueError(f"{name}: {error}") from error


def _duration(name: str, value: Any) -> timedelta:
    match = _DURATION.match(value) if isinstance(value, str) and len(value) < 64 else None
    if match is None:
        raise ValueError(f"{name} is not a duration such as 90s or 1h30m")
    days, hours, minutes, seconds, milliseconds = (int(part or 0) for part in match.groups())
    try:
        length = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds, milliseconds=milliseconds)
    except OverflowError as error:
        raise ValueError(f"{name} is too long") from error
    if not timedelta(0) < length <= _LONGEST_PAUSE:
        raise ValueError(f"{name} is not between 1ms and 30d")
    return length


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "before": _time,
    "step": _count,
    "steps_back": _count,
    "skip_batches": _count,
    "factor": _factor,
    "keep_global_batch": _flag,
    "count": _count,
    "at_most": _count,
    "max": _duration,
    "checkpoint": _flag,
    "extends": _command_id,
}
