"""Checkpoints of a Hugging Face Trainer: ``checkpoint-<step>``.

The Trainer's last file is ``trainer_state.json``.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trainmedic.errors import Rejected
from trainmedic.recovery import checkpoints
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.health import CheckpointHealth

_NAME = re.compile(r"checkpoint-(\d{1,18})\Z")
_STATE = "trainer_state.json"
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHTS = (
    *("model.safetensors", "pytorch_model.bin"),
    *("adapter_model.safetensors", "adapter_model.bin"),  # PEFT
    "pytorch_model_fsdp.bin",
)
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_LARGEST_HEADER = 1 << 28  # bytes; larger headers are damaged, and are not read into memory


def skipped_batches(checkpoint: str | Path) -> int:
    batches = (checkpoints.completion(Path(checkpoint)) or {}).get("skipped_batches")
    return batches if type(batches) is int and batches > 0 else 0


def rank_record(checkpoint: str | Path, rank: int) -> dict[str, Any] | None:
    """Return a rank's record with rank 0's digests, or None."""
    own, first = (checkpoints.read_rank_record(Path(checkpoint), number) for number in (rank, 0))
    if own is None and first is None:
        return None
    return {**(own or {}), "digests": (first or {}).get("digests")}


def path_of(output_dir: str | Path, step: int) -> Path:
    return Path(output_dir) / f"checkpoint-{step}"


def step_of(checkpoint: str | Path) -> int:
    match = _NAME.match(Path(checkpoint).name)
    if match is None:
        raise ValueError(f"{checkpoint} is not named like a checkpoint of the Trainer")
    return int(match[1])


def in_directory(output_dir: str | Path, ranks: int = 1) -> list[SavedCheckpoint]:
    """Return all checkpoints, oldest step first; `complete` if all `ranks` have their files."""
    try:
        entries = [path for path in Path(output_dir).iterdir() if _NAME.match(path.name) and path.is_dir()]
    except FileNotFoundError:
        return []
    return sorted((_described(path, ranks) for path in entries), key=lambda checkpoint: checkpoint.step)


def is_complete(checkpoint: Path, ranks: int = 1) -> bool:
    # By the Trainer's files: checkpoints from before this integration, or before a kill, lack the mark.
    try:
        state = json.loads((checkpoint / _STATE).read_bytes())
        names = {path.name for path in checkpoint.iterdir()}
        return (
            isinstance(state, dict)
            and state.get("global_step") == step_of(checkpoint)
            and _has_complete_weights(checkpoint, names)
            and _has_optimizer(checkpoint, names)
            and (ranks == 1 or all(f"rng_state_{rank}.pth" in names for rank in range(ranks)))
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):  # missing or damaged
        return False


def is_written(checkpoint: Path, save_only_model: bool, ranks: int = 1) -> bool:
    """Return whether the Trainer has written a checkpoint. With `save_only_model` it has no file that comes last."""
    return checkpoint.is_dir() if save_only_model else is_complete(checkpoint, ranks)


def check_room(output_dir: str | Path) -> None:
    """Raise Rejected if the disk cannot hold another checkpoint."""
    complete = [Path(checkpoint.path) for checkpoint in in_directory(output_dir) if checkpoint.complete]
    if not complete:
        return
    newest = complete[-1]
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    free = shutil.disk_usage(output_dir).free
    if free < size:
        raise Rejected(
            f"there is no room for a checkpoint: {newest.name} takes {size:,} bytes, and {output_dir} has {free:,} left"
        )


def _described(path: Path, ranks: int) -> SavedCheckpoint:
    complete = is_complete(path, ranks)
    try:
        at = (path / (_STATE if complete else ".")).stat().st_mtime
    except OSError:  # just removed
        complete, at = False, 0.0
    health = CheckpointHealth.from_json((checkpoints.completion(path) or {}).get("health"))
    return SavedCheckpoint(step_of(path), datetime.fromtimestamp(at, timezone.utc), path, complete, health)


def _has_complete_weights(checkpoint: Path, names: set[str]) -> bool:
    for index in _INDEXES:
        if index in names:
            shards = set(json.loads((checkpoint / index).read_bytes())["weight_map"].values())
            return bool(shards) and all(_is_whole(checkpoint / shard) for shard in shards)
    if any(name in names and _is_whole(checkpoint / name) for name in _WEIGHTS):
        return True
    return _is_deepspeed(names) or any(name.startswith("pytorch_model_fsdp_") for name in names)


def _has_optimizer(checkpoint: Path, names: set[str]) -> bool:
    if _is_deepspeed(names):
        tag = (checkpoint / "latest").read_text().strip()
        return bool(tag) and (checkpoint / tag).is_dir()
    optimizer = any(name in names and (checkpoint / name).stat().st_size > 0 for name in _OPTIMIZERS)
    sharded = any(name.startswith("optimizer_") and (checkpoint / name).is_dir() for name in names)
    return (optimizer or sharded) and "scheduler.pt" in names


def _is_deepspeed(names: set[str]) -> bool:
    return "latest" in names and any(name.startswith("global_step") for name in names)


def _is_whole(weights: Path) -> bool:
    """Check safetensors by the header's length (8 bytes) and its JSON."""
    size = weights.stat().st_size
    if weights.suffix != ".safetensors":
        return size > 0
    with weights.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(size, _LARGEST_HEADER):
            return False
        header: dict[str, Any] = json.loads(file.read(length))
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return bool(size == 8 + length + max(ends, default=0))
