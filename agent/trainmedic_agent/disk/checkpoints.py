"""Knowing a checkpoint directory, and which of those in one directory have to stay.

**A checkpoint** is a directory that holds one of Trainmedic's markers, or the index that
torch.distributed.checkpoint writes, or that is called like one: ``checkpoint-100``, ``step_100``,
``global_step100``, ``iter_0000100``, ``epoch=1-step=100.ckpt``.

**It is complete** with Trainmedic's marker, that index, or the state of the Hugging Face trainer, each of
which is written last; or, as DeepSpeed and Megatron do it, if a file beside it names it or a later one as the
latest. A name that begins with ``tmp-`` or ends in ``.tmp`` is not complete. Of any other it is unknown.

**These stay**, of the checkpoints in one directory: the newest two (or ``keep_newest``, if that is more)
that are complete, and as many of those of which it is unknown; "newest" both by the time of writing and by
step, which differ after a rollback. Further those with the marker of a rollback target, and the one that
the Hugging Face trainer calls its best. All stay if a file that decides this cannot be read.

A process without rights parses these files (``metadata_reader``). The agent sees names and markers alone.

Not here: finding checkpoints and the conditions of a rule (``search``), deleting them (``checkpoint_removal``).
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
"""Files in a checkpoint, each of which is written last."""
_LATEST = ("latest", "latest_checkpointed_iteration.txt")
"""DeepSpeed's ("global_step100") and Megatron's ("100")."""


class Completeness(StrEnum):
    """Whether a checkpoint was written to its end."""

    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    UNKNOWN = "unknown"


class CheckpointTraits(Struct, frozen=True):
    """What decides whether a checkpoint stays beside the others of its directory."""

    name: str
    written_ns: int
    """Its latest write, in nanoseconds since the epoch."""
    completeness: Completeness
    is_pinned: bool
    best: str | None
    """The name of the best checkpoint so far, where this one records it."""
    is_known: bool = True
    """False if a file that decides it could not be read."""


def is_checkpoint(fd: int, name: str) -> bool:
    """Whether the open directory `fd`, called `name`, is a checkpoint."""
    markers = (COMPLETE_MARKER, PINNED_MARKER, _DISTRIBUTED_INDEX)
    return is_name_of_checkpoint(name) or any(_has(fd, marker) for marker in markers)


def is_pinned(fd: int) -> bool:
    """Whether the open directory is a rollback target."""
    return _has(fd, PINNED_MARKER)


def traits_of(parent: int, fd: int, name: str, written_ns: int, metadata: MetadataReader) -> CheckpointTraits:
    """The traits of the checkpoint `name`, open as `fd`, in the open directory `parent`."""
    try:
        completeness = _completeness(parent, fd, name, metadata)
        best = metadata.best(fd, _TRAINER_STATE)
    except MetadataUnread:
        return CheckpointTraits(name, written_ns, Completeness.UNKNOWN, is_pinned(fd), None, is_known=False)
    return CheckpointTraits(name, written_ns, completeness, is_pinned(fd), best)


def kept(siblings: Sequence[CheckpointTraits], keep_newest: int) -> dict[str, Reason]:
    """The names of the checkpoints of one directory that stay, whatever their age, and why each stays."""
    if not all(sibling.is_known for sibling in siblings):
        return {sibling.name: Reason.METADATA_UNREAD for sibling in siblings}
    count = max(keep_newest, MIN_KEPT_CHECKPOINTS)
    reasons: dict[str, Reason] = {}
    for completeness in (Completeness.COMPLETE, Completeness.UNKNOWN):
        alike = [sibling for sibling in siblings if sibling.completeness is completeness]
        reasons.update(dict.fromkeys(_newest(alike, count), Reason.NEWEST))
    # Each trainer state records the best checkpoint of its own time; the latest one holds.
    recorded = [(sibling.written_ns, sibling.best) for sibling in siblings if sibling.best is not None]
    if recorded:
        reasons[max(recorded, key=lambda record: record[0])[1]] = Reason.BEST
    reasons.update({sibling.name: Reason.PINNED for sibling in siblings if sibling.is_pinned})
    return reasons


def _newest(siblings: Collection[CheckpointTraits], count: int) -> set[str]:
    by_time = [(sibling.written_ns, sibling.name) for sibling in siblings]
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
    except OSError:
        return False
