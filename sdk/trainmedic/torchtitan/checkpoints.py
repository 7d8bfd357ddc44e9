"""The checkpoints of a torchtitan training, in the folder of its ``CheckpointManager``.

Each is a directory ``step-150`` in the format of ``torch.distributed.checkpoint``, whose ``.metadata`` is written last;
torchtitan goes on from the one of the latest step that has it. Not here: which of them a rollback means
(``recovery.choice``), writing and loading one, which torchtitan does.
"""

from __future__ import annotations

import functools
import logging
import re
from datetime import datetime, timezone
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader

from trainmedic.recovery import checkpoints
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.health import CheckpointHealth
from trainmedic.wire import envelope

log = logging.getLogger("trainmedic")

METADATA = ".metadata"
_NAME = re.compile(r"step-(\d{1,18})\Z")
_POSITION = "train_state."  # begins the names of what torchtitan keeps of its place


def in_directory(directory: Path) -> list[SavedCheckpoint]:
    """All checkpoints, half-written ones too, oldest step first. A directory that is not there holds none."""
    found = []
    for path in directory.glob("step-*"):
        step = step_of(path)
        if step is None:
            continue
        facts = checkpoints.completion(path) or {}
        complete = is_complete(path)
        try:
            at = envelope.read_time(facts["at"]) if "at" in facts else _last_change(path, complete)
        except (OSError, ValueError, TypeError):  # it was removed just now, or its mark is damaged
            continue
        health = CheckpointHealth.from_json(facts.get("health"))
        found.append(SavedCheckpoint(step, at, path, complete, health))
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.at))


def mark(checkpoint: Path, health: CheckpointHealth) -> None:
    """Note when it was whole, and what it is to be judged by. Raises OSError."""
    facts = {"step": step_of(checkpoint), "at": envelope.write_time(envelope.utc_now()), "health": health.to_json()}
    checkpoints.mark_complete(checkpoint, facts)


def path_of(directory: Path, step: int) -> Path:
    return directory / f"step-{step}"


def step_of(checkpoint: Path) -> int | None:
    """The step by its name; None where it is no checkpoint of a step."""
    match = _NAME.match(checkpoint.name)
    return None if match is None else int(match[1])


def is_complete(checkpoint: Path) -> bool:
    """Whether torchtitan can go on from it: it is whole, and holds more than the model's weights."""
    try:
        status = (checkpoint / METADATA).stat()
    except OSError:
        return False
    # Of a checkpoint of step 0 torchtitan loads the weights alone, whatever it holds.
    return step_of(checkpoint) not in (None, 0) and _holds_position(checkpoint, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1024)
def _holds_position(checkpoint: Path, changed: int, size: int) -> bool:
    """``changed`` and ``size``, those of the metadata, are part of the cache's key."""
    try:
        names = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    except Exception as error:  # whatever unpickling a damaged file raises
        log.warning("%s cannot be read: %s", checkpoint / METADATA, error)
        return False
    return any(name.startswith(_POSITION) for name in names)


def _last_change(checkpoint: Path, complete: bool) -> datetime:
    """When it was written, of one without a mark. Raises OSError."""
    written = checkpoint / METADATA if complete else checkpoint
    return datetime.fromtimestamp(written.stat().st_mtime, timezone.utc)
