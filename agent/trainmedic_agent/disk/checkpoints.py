"""Detection of checkpoint directories, and which to keep.

- **Complete**: has a file that is written last, or a file next to it names it or a later one as the latest (DeepSpeed,
  Megatron).
- **Kept**: all, if a file needed for the decision is unreadable. Else rollback targets, the Hugging Face trainer's
  best, and the newest complete and unknown ones: of each two, or ``keep_newest`` if more, by write time, and as many by
  step.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Sequence
from enum import StrEnum

from msgspec import Struct

from trainmedic_agent.disk.checkpoint_names import is_name_of_checkpoint, step_of
from trainmedic_agent.disk.metadata_reader import MetadataReader, MetadataUnread
from trainmedic_agent.disk.report import Reason
from trainmedic_agent.disk.rules import MIN_KEPT_CHECKPOINTS

COMPLETE_MARKER = ".trainmedic-complete"
PINNED_MARKER = ".trainmedic-pinned"
_DISTRIBUTED_INDEX = ".metadata"
_TRAINER_STATE = "trainer_state.json"
MARKS_OF_COMPLETENESS = (COMPLETE_MARKER, _DISTRIBUTED_INDEX, _TRAINER_STATE)
_LATEST = ("latest", "latest_checkpointed_iteration.txt")  # DeepSpeed ("global_step100"), Megatron ("100")


class Completeness(StrEnum):
    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    UNKNOWN = "unknown"


class CheckpointTraits(Struct, frozen=True):
    name: str
    written_ns: int
    """Nanoseconds since the epoch."""
    completeness: Completeness
    is_pinned: bool
    best: str | None  # name of the best checkpoint when this one was written; None if not recorded
    is_known: bool = True  # False if a file needed for this is unreadable


def is_checkpoint(fd: int, name: str) -> bool:
    """Raises MetadataUnread."""
    markers = (COMPLETE_MARKER, PINNED_MARKER, _DISTRIBUTED_INDEX)
    return is_name_of_checkpoint(name) or any(_has(fd, marker) for marker in markers)


def is_pinned(fd: int) -> bool:
    """Raises MetadataUnread."""
    return _has(fd, PINNED_MARKER)


def traits_of(parent: int, fd: int, name: str, written_ns: int, metadata: MetadataReader) -> CheckpointTraits:
    has_pin = False
    try:
        has_pin = is_pinned(fd)
        completeness = _completeness(parent, fd, name, metadata)
        best = metadata.best(fd, _TRAINER_STATE)
    except MetadataUnread:
        return CheckpointTraits(name, written_ns, Completeness.UNKNOWN, has_pin, None, is_known=False)
    return CheckpointTraits(name, written_ns, completeness, has_pin, best)


def kept(siblings: Sequence[CheckpointTraits], keep_newest: int) -> dict[str, Reason]:
    """Return a directory's checkpoints to keep regardless of age, with reasons."""
    if not all(sibling.is_known for sibling in siblings):
        return {sibling.name: Reason.METADATA_UNREAD for sibling in siblings}
    count = max(keep_newest, MIN_KEPT_CHECKPOINTS)
    reasons: dict[str, Reason] = {}
    for completeness in (Completeness.COMPLETE, Completeness.UNKNOWN):
        alike = [sibling for sibling in siblings if sibling.completeness is completeness]
        reasons.update(dict.fromkeys(_newest(alike, count), Reason.NEWEST))
    # Each trainer state records the best checkpoint at its time; the latest state counts.
    recorded = [(sibling.written_ns, sibling.best) for sibling in siblings if sibling.best is not None]
    if recorded:
        reasons[max(recorded, key=lambda record: record[0])[1]] = Reason.BEST
    reasons.update({sibling.name: Reason.PINNED for sibling in siblings if sibling.is_pinned})
    return reasons


def _newest(siblings: Collection[CheckpointTraits], count: int) -> set[str]:
    by_time = [(sibling.written_ns, sibling.name) for sibling in siblings]
    # After a rollback, a lower step may be the newer one, so each order keeps its newest.
    by_step = [(step, sibling.name) for sibling in siblings if (step := step_of(sibling.name)) is not None]
    return {name for order in (by_time, by_step) for _, name in sorted(order, reverse=True)[:count]}


def _completeness(parent: int, fd: int, name: str, metadata: MetadataReader) -> Completeness:
    if name.startswith("tmp-") or name.endswith(".tmp"):
        return Completeness.INCOMPLETE
    if any(_has(fd, marker) for marker in MARKS_OF_COMPLETENESS):
        return Completeness.COMPLETE
    step = step_of(name)
    for latest in _LATEST:
        latest_step = metadata.latest_step(parent, latest)
        if step is not None and latest_step is not None and step <= latest_step:
            return Completeness.COMPLETE
    return Completeness.UNKNOWN


def _has(fd: int, name: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False
    except OSError as error:  # such as EIO of a network file system
        raise MetadataUnread(f"{name} cannot be looked up: {error.strerror}") from error
