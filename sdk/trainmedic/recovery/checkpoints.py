"""Selection of checkpoints for rollbacks and deletion.

- ``.trainmedic-complete`` is written last; a checkpoint without it is incomplete.
- ``.trainmedic-pinned`` protects from deletion, also by the node agent.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence

from trainmedic.errors import Rejected, Unsupported
from trainmedic.job.group import Group
from trainmedic.job.parameters import Rollback
from trainmedic.recovery.health import CheckpointHealth, problem
from trainmedic.wire import envelope

COMPLETE = ".trainmedic-complete"
PINNED = ".trainmedic-pinned"
NEVER_DELETED = 2  # newest ones that stay, because the very newest may hold the fault
_LARGEST_MARK = 1 << 20  # bytes
_RANK_RECORD = ".trainmedic-rank-{rank:05d}.json"


@dataclass(frozen=True)
class SavedCheckpoint:
    step: int
    at: datetime  # completion, in UTC
    path: Any
    complete: bool = True
    health: CheckpointHealth | None = None  # None if unrecorded

    @property
    def name(self) -> str:
        return str(getattr(self.path, "name", self.path))


def choose(found: Sequence[SavedCheckpoint], rollback: Rollback, step: int) -> SavedCheckpoint:
    """Return the newest of `candidates`. Raises Rejected."""
    return candidates(found, rollback, step)[0]


def candidates(found: Sequence[SavedCheckpoint], rollback: Rollback, step: int) -> list[SavedCheckpoint]:
    """Return checkpoints for a rollback at ``step``, newest first.

    Excludes incomplete ones and later steps', which belong to another training. Raises Rejected.
    """
    complete = newest_first([checkpoint for checkpoint in found if checkpoint.step <= step])
    fitting, condition = complete, ""
    if rollback.before is not None:
        before = rollback.before
        fitting = [checkpoint for checkpoint in complete if checkpoint.at < before]
        condition = f" from before {envelope.write_time(before)}"
    elif rollback.step is not None or rollback.steps_back is not None:
        latest = rollback.step if rollback.step is not None else step - (rollback.steps_back or 0)
        fitting = [checkpoint for checkpoint in complete if checkpoint.step <= latest]
        condition = f" of step {latest} or before"
    if not fitting:
        raise Rejected(f"there is no complete checkpoint{condition}{_description_of_existing(found, complete)}")
    return fitting


def newest_first(found: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """Return complete checkpoints, newest first by time: a step can occur twice."""
    complete = [checkpoint for checkpoint in found if checkpoint.complete]
    return sorted(complete, key=lambda checkpoint: (checkpoint.at, checkpoint.step), reverse=True)


def surplus(
    found: Sequence[SavedCheckpoint], keep: int, kept: Sequence[Any] = (), back_to: int | None = None
) -> list[SavedCheckpoint]:
    """Return the complete checkpoints to delete.

    The newest `keep` healthy (at least two), the newest two, `kept` paths, and the newest healthy one before
    ``back_to``, the last rollback's step, stay.
    """
    complete = newest_first(found)
    healthy = [checkpoint for checkpoint in complete if not problem(checkpoint.health)]
    staying = {checkpoint.path for checkpoint in complete[:NEVER_DELETED]} | set(kept)
    staying.update(checkpoint.path for checkpoint in healthy[: max(keep, NEVER_DELETED)])
    if back_to is not None:
        staying.update([checkpoint.path for checkpoint in healthy if checkpoint.step < back_to][:1])
    return [checkpoint for checkpoint in complete if checkpoint.path not in staying]


def healthy_first(present: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """Sort complete checkpoints, healthy and new ones first."""
    return sorted(newest_first(present), key=lambda checkpoint: bool(problem(checkpoint.health)))


def as_seen_by_rank_0(group: Group, find: Callable[[], Sequence[SavedCheckpoint]]) -> list[SavedCheckpoint]:
    """Return rank 0's `find()` on all ranks. Raises its errors, NotAgreed, Unsupported."""
    if group.world_size == 1:
        return list(find())
    return [from_json(fields) for fields in group.choose(lambda: [to_json(checkpoint) for checkpoint in find()])]


def to_json(checkpoint: SavedCheckpoint) -> dict[str, Any]:
    """Return the fields for other ranks. Raises Unsupported if the path cannot be sent."""
    path = checkpoint.path
    if not isinstance(path, (str, Path)):
        raise Unsupported(
            f"with several ranks the path of a checkpoint must be a Path or str, not a {type(path).__name__}"
        )
    is_path = isinstance(path, Path)
    return {
        "step": checkpoint.step,
        "at": checkpoint.at.isoformat(),
        "path": str(path),
        "is_path": is_path,
        "complete": checkpoint.complete,
        "health": checkpoint.health and checkpoint.health.to_json(),
    }


def from_json(fields: Mapping[str, Any]) -> SavedCheckpoint:
    path = Path(fields["path"]) if fields["is_path"] else fields["path"]
    health = CheckpointHealth.from_json(fields.get("health"))
    at = datetime.fromisoformat(fields["at"])
    return SavedCheckpoint(fields["step"], at, path, complete=fields.get("complete", True), health=health)


def mark_complete(checkpoint: Path, facts: Mapping[str, Any]) -> None:
    """Mark a completely written checkpoint, with `facts`. Raises OSError."""
    _write(checkpoint / COMPLETE, facts)


def completion(checkpoint: Path) -> Mapping[str, Any] | None:
    """Return `mark_complete`'s facts, or None."""
    return _read(checkpoint / COMPLETE)


def pin(checkpoint: Path, why: Mapping[str, Any]) -> None:
    """Protect a checkpoint from deletion. Raises OSError."""
    _write(checkpoint / PINNED, why)


def unpin(checkpoint: Path) -> None:
    """Allow deletion again. Raises OSError."""
    (checkpoint / PINNED).unlink(missing_ok=True)


def is_pinned(checkpoint: Path) -> bool:
    return (checkpoint / PINNED).exists()


def pin_reason(checkpoint: Path) -> Mapping[str, Any] | None:
    """Return `pin`'s reason; empty if unreadable, None if not pinned."""
    return _read(checkpoint / PINNED) or ({} if is_pinned(checkpoint) else None)


def is_pinned_by_rollback(checkpoint: Path) -> bool:
    # A user's pin has no ``left_step``.
    return type((pin_reason(checkpoint) or {}).get("left_step")) is int


def is_pinned_by_user(checkpoint: Path) -> bool:
    return is_pinned(checkpoint) and not is_pinned_by_rollback(checkpoint)


def move_rollback_pin(target: Path | None, present: Iterable[Path], reason: Mapping[str, Any]) -> None:
    """Pin ``target``, if given, instead of earlier rollbacks' targets. Users' pins stay. Raises OSError."""
    if target is not None and not is_pinned_by_user(target):
        pin(target, reason)
    for other in present:
        if other != target and is_pinned_by_rollback(other):
            unpin(other)


def write_rank_record(checkpoint: Path, rank: int, facts: Mapping[str, Any]) -> None:
    """Store a rank's data for comparison. Raises OSError."""
    write_durably(checkpoint / _RANK_RECORD.format(rank=rank), json.dumps(facts).encode())


def read_rank_record(checkpoint: Path, rank: int) -> dict[str, Any] | None:
    return _read(checkpoint / _RANK_RECORD.format(rank=rank), most_bytes=-1)


def flush_directory(directory: Path) -> None:
    """Flush new and renamed entries. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file atomically and durably. Raises OSError."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:  # an interrupt must not leave a partial file either
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    flush_directory(path.parent)


def _read(path: Path, most_bytes: int = _LARGEST_MARK) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            facts = json.loads(file.read(most_bytes))
    except (OSError, ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) else None


def _write(path: Path, facts: Mapping[str, Any]) -> None:
    write_durably(path, json.dumps(dict(facts)).encode())


def _description_of_existing(present: Sequence[SavedCheckpoint], complete: Sequence[SavedCheckpoint]) -> str:
    if complete:
        oldest = complete[-1]
        at = envelope.write_time(oldest.at)
        return f"; the oldest of {len(complete)} is of step {oldest.step}, written {at}"
    if any(checkpoint.complete for checkpoint in present):
        return "; all existing ones are of later steps"
    return f"; {len(present)} are incomplete" if present else "; there are none at all"
