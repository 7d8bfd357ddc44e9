"""Which checkpoint a rollback means, which may be deleted, and the marks that others can see on them.

Neutral towards frameworks: a checkpoint is a `SavedCheckpoint`, wherever and however it is kept. Not here: writing and
loading one (``torch.store``, or the framework), how often one may go back to it (``budget``). Who calls it:
the integrations.

Two small files mark a checkpoint directory. ``.trainmedic-complete`` is the last thing that is written into it;
without it a checkpoint of this package counts as half-written. ``.trainmedic-pinned`` says that it is not to be
deleted; the cleaner of the node agent heeds it too.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from trainmedic.errors import Rejected, Unsupported
from trainmedic.job.group import Group
from trainmedic.job.parameters import Rollback
from trainmedic.wire import envelope

COMPLETE = ".trainmedic-complete"
PINNED = ".trainmedic-pinned"
NEVER_DELETED = 2
_LARGEST_MARK = 1 << 20


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is there.

    ``step`` is the number of steps that were done when it was written, ``at`` (aware UTC) when it was
    complete. ``path`` is where it is: a path, or whatever name its owner loads it by.
    """

    step: int
    at: datetime
    path: Any
    complete: bool = True

    @property
    def name(self) -> str:
        """What answers call it: the last part of a path, or all of another name."""
        return str(getattr(self.path, "name", self.path))


def choose(found: Sequence[SavedCheckpoint], rollback: Rollback, step: int) -> SavedCheckpoint:
    """The checkpoint that `rollback` means, seen from `step`. Raises Rejected, saying what there is instead."""
    return candidates(found, rollback, step)[0]


def candidates(found: Sequence[SavedCheckpoint], rollback: Rollback, step: int) -> list[SavedCheckpoint]:
    """All that satisfy `rollback`, the newest first: where one cannot be loaded, the next is as good as allowed.

    Incomplete ones never do, nor any of a later step than the present one: those are of another course, such as
    an earlier training in the same directory. Raises Rejected where there is none.
    """
    complete = newest_first([one for one in found if one.step <= step])
    fitting, wanted = complete, ""
    if rollback.before is not None:
        before = rollback.before
        fitting, wanted = [one for one in complete if one.at < before], f" from before {_told(before)}"
    elif rollback.step is not None or rollback.steps_back is not None:
        latest = rollback.step if rollback.step is not None else step - (rollback.steps_back or 0)
        fitting, wanted = [one for one in complete if one.step <= latest], f" of step {latest} or before"
    if not fitting:
        raise Rejected(f"there is no complete checkpoint{wanted}{_instead(found, complete)}")
    return fitting


def newest_first(found: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """The complete ones. What counts is when it was written: after a rollback a step comes twice."""
    return sorted((one for one in found if one.complete), key=lambda one: (one.at, one.step), reverse=True)


def surplus(found: Sequence[SavedCheckpoint], keep: int, kept: Sequence[Any] = ()) -> list[SavedCheckpoint]:
    """Those that can go where the newest `keep` are to stay: complete ones, and never the newest two.

    `kept` are paths that stay in any case.
    """
    complete = newest_first(found)
    staying = {one.path for one in complete[: max(keep, NEVER_DELETED)]} | set(kept)
    return [one for one in complete if one.path not in staying]


def as_seen_by_rank_0(group: Group, find: Callable[[], Sequence[SavedCheckpoint]]) -> list[SavedCheckpoint]:
    """What `find` finds on the first rank of `group`, on all: each might see another state of a shared directory.

    Raises what `find` raises, Unsupported where a path cannot be told to other ranks, and NotAgreed.
    """
    if group.world_size == 1:
        return list(find())
    told = group.choose(lambda: [_as_told(one) for one in find()])
    return [
        SavedCheckpoint(
            one["step"], datetime.fromisoformat(one["at"]), Path(one["path"]) if one["is_path"] else one["path"]
        )
        for one in told
    ]


def _as_told(one: SavedCheckpoint) -> dict[str, Any]:
    if not isinstance(one.path, (str, Path)):
        raise Unsupported(f"checkpoints of several ranks are known by a Path or a str, not a {type(one.path).__name__}")
    is_path = isinstance(one.path, Path)
    return {"step": one.step, "at": one.at.isoformat(), "path": str(one.path), "is_path": is_path}


# --- marks on a directory -----------------------------------------------------------------------------


def mark_complete(checkpoint: Path, facts: Mapping[str, Any]) -> None:
    """The last act of writing a checkpoint. `facts` is kept in the mark. Raises OSError."""
    _write(checkpoint / COMPLETE, facts)


def completion(checkpoint: Path) -> Mapping[str, Any] | None:
    """The facts of its mark; None where it is not complete, or the mark itself is half-written."""
    return _read(checkpoint / COMPLETE)


def pin(checkpoint: Path, why: Mapping[str, Any]) -> None:
    """It is not to be deleted. Raises OSError."""
    _write(checkpoint / PINNED, why)


def unpin(checkpoint: Path) -> None:
    """It may be deleted again. Raises OSError."""
    (checkpoint / PINNED).unlink(missing_ok=True)


def is_pinned(checkpoint: Path) -> bool:
    return (checkpoint / PINNED).exists()


def pin_reason(checkpoint: Path) -> Mapping[str, Any] | None:
    """Why, as it was told to `pin`; empty where that cannot be read, None where it is not pinned."""
    return _read(checkpoint / PINNED) or ({} if is_pinned(checkpoint) else None)


def flush_directory(directory: Path) -> None:
    """Names that were made or changed in it are on the disk when this returns. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """The file holds either what it held or `content`, whenever the machine stops. Raises OSError."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    flush_directory(path.parent)


def _read(mark: Path) -> Mapping[str, Any] | None:
    try:
        with mark.open("rb") as file:
            facts = json.loads(file.read(_LARGEST_MARK))
    except (OSError, ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) else None


def _write(path: Path, facts: Mapping[str, Any]) -> None:
    write_durably(path, json.dumps(dict(facts)).encode())


def _told(moment: datetime) -> str:
    return envelope.write_time(moment)


def _instead(found: Sequence[SavedCheckpoint], complete: Sequence[SavedCheckpoint]) -> str:
    """What there is, for who has to find out why none would do."""
    if not complete and any(one.complete for one in found):
        return "; those that there are are of later steps than the present one"
    if complete:
        oldest = complete[-1]
        return f"; the oldest of {len(complete)} is of step {oldest.step}, written {_told(oldest.at)}"
    return f"; {len(found)} are half-written" if found else "; there is none at all"
