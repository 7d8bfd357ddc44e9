"""The checkpoints of a Megatron-LM training, in the directory that ``--save`` names.

Each is a directory ``iter_0000150``. Megatron-LM writes the number of the newest that is whole into a file, its
tracker, after all ranks have written theirs, and loads the one that is named there. So one of a later iteration is
half-written. Not here: which of them a rollback means (``recovery.choice``), writing and loading one, which
Megatron-LM does.
"""

from __future__ import annotations

import re
from datetime import datetime, timezone
from pathlib import Path

from trainmedic.recovery import checkpoints
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.health import CheckpointHealth
from trainmedic.wire import envelope

TRACKER = "latest_checkpointed_iteration.txt"
_NAME = re.compile(r"iter_(\d{7,18})\Z")


def in_directory(directory: Path) -> list[SavedCheckpoint]:
    """All checkpoints, half-written ones too, oldest step first. A directory that is not there holds none."""
    newest = tracked(directory)
    found = []
    for path in directory.glob("iter_*"):
        step = step_of(path)
        if step is None:
            continue
        facts = checkpoints.completion(path) or {}
        try:
            at = envelope.read_time(facts["at"]) if "at" in facts else _last_change(path)
        except (OSError, ValueError, TypeError):  # it was removed just now, or its mark is damaged
            continue
        health = CheckpointHealth.from_json(facts.get("health"))
        found.append(SavedCheckpoint(step, at, path, complete=step <= newest, health=health))
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.at))


def mark(checkpoint: Path, health: CheckpointHealth) -> None:
    """Note when it was whole, and what it is to be judged by. Raises OSError."""
    facts = {"step": step_of(checkpoint), "at": envelope.write_time(envelope.utc_now()), "health": health.to_json()}
    checkpoints.mark_complete(checkpoint, facts)


def is_complete(checkpoint: Path) -> bool:
    """Whether Megatron-LM can go on from it."""
    step = step_of(checkpoint)
    return step is not None and checkpoint.is_dir() and step <= tracked(checkpoint.parent)


def path_of(directory: Path, iteration: int) -> Path:
    return directory / f"iter_{iteration:07d}"


def step_of(checkpoint: Path) -> int | None:
    """The iteration by its name; None where it is no checkpoint of an iteration."""
    match = _NAME.match(checkpoint.name)
    return None if match is None else int(match[1])


def tracked(directory: Path) -> int:
    """The iteration that the tracker names; -1 where there is none, or only weights to begin with (``release``)."""
    try:
        return int((directory / TRACKER).read_text())
    except (OSError, ValueError):
        return -1


def track(directory: Path, iteration: int) -> None:
    """Let Megatron-LM load that iteration from now on, also when the job is started again. Raises OSError."""
    checkpoints.write_durably(directory / TRACKER, str(iteration).encode())


def _last_change(checkpoint: Path) -> datetime:
    """When it was written, of one without a mark. Raises OSError."""
    return datetime.fromtimestamp(
        max(file.stat().st_mtime for file in (checkpoint, *checkpoint.iterdir())), timezone.utc
    )
