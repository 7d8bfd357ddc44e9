"""Knowing a checkpoint directory, and which of them have to stay.

**A checkpoint** is a directory that holds one of Trainmedic's markers, or the index that
torch.distributed.checkpoint writes, or that is called like one: ``checkpoint-100``, ``step_100``,
``global_step100``, ``iter_0000100``, ``epoch=1-step=100.ckpt``.

**Complete** it is with Trainmedic's marker, that index, or the state of the Hugging Face trainer, each of
which is written last; or, as DeepSpeed and Megatron do it, if a file beside it names it or a later one as the
latest. A name that begins with ``tmp-`` or ends in ``.tmp`` is not complete. Of any other it cannot be told.

**These stay**, of the checkpoints in one directory: the newest two (or ``keep_newest``, if that is more)
that are complete, and as many of those of which it cannot be told; "newest" both by the time of writing and by
step, which differ after a rollback. Further those with the marker of a rollback target, and the one that
the Hugging Face trainer calls its best.

Not here: the walk and the conditions of a rule (``units``), deleting (``unit_removal``).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from trainmedic_server.agent.disk.reasons import Reason
from trainmedic_server.agent.disk.rules import KEPT_CHECKPOINTS

COMPLETE_MARKER = ".trainmedic-complete"
PINNED_MARKER = ".trainmedic-pinned"
_DISTRIBUTED_INDEX = ".metadata"
_TRAINER_STATE = "trainer_state.json"
_MARKS = (COMPLETE_MARKER, PINNED_MARKER, _DISTRIBUTED_INDEX)
_LATEST = ("latest", "latest_checkpointed_iteration.txt")
"""DeepSpeed's ("global_step100") and Megatron's ("100")."""

_NAME = re.compile(
    r"(?:tmp-)?(?:checkpoint|ckpt|global_?step|step|iter|iteration|epoch)[-_=]?\d.*|.+\.ckpt", re.IGNORECASE
)
_STEP = re.compile(r"step[-_=]?(\d{1,18})", re.IGNORECASE)
_NUMBER = re.compile(r"\d{1,18}")
_BEST = re.compile(rb'"best_model_checkpoint":\s*"((?:[^"\\]|\\.)*)"')


class Completeness(StrEnum):
    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Standing:
    """What decides whether a checkpoint stays beside the others of its directory. `written` is its latest write."""

    name: str
    written: int
    completeness: Completeness
    is_pinned: bool
    best: str | None
    """The name of the best checkpoint so far, where this one records it."""


def is_checkpoint(fd: int, name: str) -> bool:
    """Whether the open directory `fd`, called `name`, is a checkpoint."""
    return _NAME.fullmatch(name) is not None or any(_has(fd, mark) for mark in _MARKS)


def is_pinned(fd: int) -> bool:
    """Whether the open directory is a rollback target."""
    return _has(fd, PINNED_MARKER)


def standing(parent: int, fd: int, name: str, written: int) -> Standing:
    """How the checkpoint `name`, open as `fd`, stands in the open directory `parent`."""
    return Standing(name, written, _completeness(parent, fd, name), is_pinned(fd), _best(fd))


def step_of(name: str) -> int | None:
    """The step that a checkpoint's name tells."""
    if (found := _STEP.search(name)) is not None:
        return int(found[1])
    return int(number[0]) if (number := _NUMBER.search(name)) is not None else None


def staying(siblings: Sequence[Standing], keep_newest: int) -> dict[str, Reason]:
    """Which of the checkpoints of one directory stay, whatever their age, and why."""
    count = max(keep_newest, KEPT_CHECKPOINTS)
    stay: dict[str, Reason] = {}
    for kind in (Completeness.COMPLETE, Completeness.UNKNOWN):
        stay.update(dict.fromkeys(_newest([one for one in siblings if one.completeness is kind], count), Reason.NEWEST))
    newest = max((one for one in siblings if one.best is not None), key=lambda one: one.written, default=None)
    if newest is not None and newest.best is not None:
        stay[newest.best] = Reason.BEST
    stay.update({one.name: Reason.PINNED for one in siblings if one.is_pinned})
    return stay


def _newest(siblings: Collection[Standing], count: int) -> set[str]:
    by_time = sorted(siblings, key=lambda one: (one.written, one.name), reverse=True)[:count]
    with_step = [(step, one.name) for one in siblings if (step := step_of(one.name)) is not None]
    return {one.name for one in by_time} | {name for _, name in sorted(with_step, reverse=True)[:count]}


def _completeness(parent: int, fd: int, name: str) -> Completeness:
    if name.startswith("tmp-") or name.endswith(".tmp"):
        return Completeness.INCOMPLETE
    if any(_has(fd, mark) for mark in (COMPLETE_MARKER, _DISTRIBUTED_INDEX, _TRAINER_STATE)):
        return Completeness.COMPLETE
    step = step_of(name)
    for latest in _LATEST:
        named = step_of(_beginning(parent, latest, 256).decode("utf-8", "replace"))
        if step is not None and named is not None and step <= named:
            return Completeness.COMPLETE
    return Completeness.UNKNOWN


def _best(fd: int) -> str | None:
    # The trainer sorts the keys, so it stands before the long history.
    found = _BEST.search(_beginning(fd, _TRAINER_STATE, 4096))
    return None if found is None else found[1].decode("utf-8", "replace").rstrip("/").rpartition("/")[2]


def _has(fd: int, name: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _beginning(directory: int, name: str, size: int) -> bytes:
    """The first bytes of a file; none where it cannot be read."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        # Reading it must not make it young.
        fd = os.open(name, flags | os.O_NOATIME, dir_fd=directory)
    except PermissionError:
        try:
            fd = os.open(name, flags, dir_fd=directory)
        except OSError:
            return b""
    except OSError:
        return b""
    try:
        return os.read(fd, size)
    except OSError:
        return b""
    finally:
        os.close(fd)
