"""Which checkpoints satisfy a rollback, which may be deleted, and the marks that others can see on them.

Nothing here depends on a framework: a checkpoint is a `SavedCheckpoint`, wherever and however it is kept. Not here:
which of them a rollback goes to (``choice``), writing and loading one (``torch.checkpoint_storage``, or the framework),
how often one may go back to it (``rollback_budget``). Who calls it: the integrations.

Two small files mark a checkpoint directory. ``.trainmedic-complete`` is the last thing that is written into it;
without it a checkpoint of this package counts as half-written. ``.trainmedic-pinned`` says that it is not to be
deleted; the node agent's cleaner also respects it.
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
from trainmedic.recovery.health import CheckpointHealth, problem
from trainmedic.wire import envelope

COMPLETE = ".trainmedic-complete"
PINNED = ".trainmedic-pinned"
NEVER_DELETED = 2
"""So many of the newest checkpoints always stay, for the newest may hold the fault that a rollback is to undo."""
_LARGEST_MARK = 1 << 20
_KEPT = ".trainmedic-rank-{rank:05d}.json"


@dataclass(frozen=True)
class SavedCheckpoint:
    """An existing checkpoint, with what a rollback needs to know of it."""

    step: int
    """Optimizer steps that were done when it was written."""
    at: datetime
    """When it was complete, in aware UTC."""
    path: Any
    """Where it is: a path, or whatever its owner loads it by."""
    complete: bool = True
    """Whether all of it was written."""
    health: CheckpointHealth | None = None
    """What it is judged by; None where that was not kept."""

    @property
    def name(self) -> str:
        """Its name in answers: the last part of a path, or the text of whatever else its owner loads it by."""
        return str(getattr(self.path, "name", self.path))


def choose(found: Sequence[SavedCheckpoint], rollback: Rollback, step: int) -> SavedCheckpoint:
    """The checkpoint that `rollback` means, seen from `step`. Raises Rejected, saying what there is instead."""
    return candidates(found, rollback, step)[0]


def candidates(found: Sequence[SavedCheckpoint], rollback: Rollback, step: int) -> list[SavedCheckpoint]:
    """All checkpoints that satisfy `rollback`, the newest first; if one cannot be loaded, the next may be used.

    It leaves out incomplete ones, and those of a later step than the present one, which belong to another course, such
    as an earlier training in the same directory. Raises Rejected if there is none.
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
        raise Rejected(f"there is no complete checkpoint{condition}{_existing_ones(found, complete)}")
    return fitting


def newest_first(found: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """The complete ones. What counts is when it was written: after a rollback a step comes twice."""
    complete = [checkpoint for checkpoint in found if checkpoint.complete]
    return sorted(complete, key=lambda checkpoint: (checkpoint.at, checkpoint.step), reverse=True)


def surplus(
    found: Sequence[SavedCheckpoint], keep: int, kept: Sequence[Any] = (), back_to: int | None = None
) -> list[SavedCheckpoint]:
    """The complete checkpoints to delete so that the newest `keep` healthy ones, and at least the newest two, stay.

    `kept` are paths that stay in any case. ``back_to`` is the step of the checkpoint that training went back to, while
    the trouble may come back: then the next older one stays as well, for another rollback goes further.
    """
    complete = newest_first(found)
    healthy = [checkpoint for checkpoint in complete if not problem(checkpoint.health)]
    staying = {checkpoint.path for checkpoint in complete[:NEVER_DELETED]} | set(kept)
    staying.update(checkpoint.path for checkpoint in healthy[: max(keep, NEVER_DELETED)])
    if back_to is not None:
        staying.update([checkpoint.path for checkpoint in healthy if checkpoint.step < back_to][:1])
    return [checkpoint for checkpoint in complete if checkpoint.path not in staying]


def healthy_first(present: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """The complete ones in the order in which a restart tries them: the newest healthy one first, ill ones last."""
    return sorted(newest_first(present), key=lambda checkpoint: bool(problem(checkpoint.health)))


def as_seen_by_rank_0(group: Group, find: Callable[[], Sequence[SavedCheckpoint]]) -> list[SavedCheckpoint]:
    """Return on all ranks what `find` finds on rank 0, because ranks may see a shared directory differently.

    Raises what `find` raises, Unsupported where a path cannot be sent to other ranks, and NotAgreed.
    """
    if group.world_size == 1:
        return list(find())
    return [from_json(fields) for fields in group.choose(lambda: [to_json(checkpoint) for checkpoint in find()])]


def to_json(checkpoint: SavedCheckpoint) -> dict[str, Any]:
    """What the other ranks need of it, as JSON. Raises Unsupported where its path cannot be sent."""
    path = checkpoint.path
    if not isinstance(path, (str, Path)):
        raise Unsupported(f"checkpoints of several ranks are known by a Path or a str, not a {type(path).__name__}")
    is_path = isinstance(path, Path)
    return {"step": checkpoint.step, "at": checkpoint.at.isoformat(), "path": str(path), "is_path": is_path}


def from_json(fields: Mapping[str, Any]) -> SavedCheckpoint:
    """What `to_json` gave."""
    path = Path(fields["path"]) if fields["is_path"] else fields["path"]
    return SavedCheckpoint(fields["step"], datetime.fromisoformat(fields["at"]), path)


# --- marks on a directory -----------------------------------------------------------------------------


def mark_complete(checkpoint: Path, facts: Mapping[str, Any]) -> None:
    """Mark it as whole, as the last act of writing it. The mark holds `facts`. Raises OSError."""
    _write(checkpoint / COMPLETE, facts)


def completion(checkpoint: Path) -> Mapping[str, Any] | None:
    """The facts that its mark holds; None where it is not complete, or the mark itself is half-written."""
    return _read(checkpoint / COMPLETE)


def pin(checkpoint: Path, why: Mapping[str, Any]) -> None:
    """Protect a checkpoint from deletion. Raises OSError."""
    _write(checkpoint / PINNED, why)


def unpin(checkpoint: Path) -> None:
    """Allow its deletion again. Raises OSError."""
    (checkpoint / PINNED).unlink(missing_ok=True)


def is_pinned(checkpoint: Path) -> bool:
    return (checkpoint / PINNED).exists()


def pin_reason(checkpoint: Path) -> Mapping[str, Any] | None:
    """The reason that `pin` was given; empty where it cannot be read, None where it is not pinned."""
    return _read(checkpoint / PINNED) or ({} if is_pinned(checkpoint) else None)


def keep(checkpoint: Path, rank: int, facts: Mapping[str, Any]) -> None:
    """Keep in a checkpoint what a rank compares with when it goes back there. Raises OSError."""
    write_durably(checkpoint / _KEPT.format(rank=rank), json.dumps(facts).encode())


def kept(checkpoint: Path, rank: int) -> dict[str, Any] | None:
    """What `keep` has kept for that rank; None where there is nothing, or it cannot be read."""
    try:
        facts = json.loads((checkpoint / _KEPT.format(rank=rank)).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) else None


def flush_directory(directory: Path) -> None:
    """Flush a directory, so that new and changed names in it are on the disk. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file so that it holds either what it held or `content`, whenever the machine stops. Raises OSError."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:  # an interrupt, too, leaves nothing half-written behind
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


def _existing_ones(present: Sequence[SavedCheckpoint], complete: Sequence[SavedCheckpoint]) -> str:
    """The rest of the reason: which checkpoints there are instead."""
    if complete:
        oldest = complete[-1]
        at = envelope.write_time(oldest.at)
        return f"; the oldest of {len(complete)} is of step {oldest.step}, written {at}"
    if any(checkpoint.complete for checkpoint in present):
        return "; those that there are are of later steps than the present one"
    return f"; {len(present)} are half-written" if present else "; there is none at all"
