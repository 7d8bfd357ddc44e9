"""Checkpoints written and loaded by a DeepSpeed engine.

Each rank adds a file for state that the engine does not save. An engine loads in place, so checksums are verified
first.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from pathlib import Path
from typing import Any, Iterator, Mapping

import torch

from trainmedic.client import Medic
from trainmedic.errors import TrainmedicError
from trainmedic.recovery import checkpoints
from trainmedic.torch.checkpoints.checkpoint_storage import UnusableCheckpoint
from trainmedic.torch.checkpoints.joint_checkpoints import JointCheckpointDirectory
from trainmedic.torch.checkpoints.rank_states import RankState, merge, own_part
from trainmedic.torch.optimizer_states import options_of, put_options
from trainmedic.torch.state_parts import StateParts
from trainmedic.trainer.patching import replaced

_OPTIMIZER = "optimizer"
LATEST = "latest"  # DeepSpeed's file with the default tag to load

Files = dict[str, tuple[int, bool]]  # size, and whether it has checksums, by path


class EngineContents:
    """`JointContents` whose common part the engine writes and loads."""

    is_replicated = False

    def __init__(self, engine: Any, rank: int, world_size: int) -> None:
        self._engine = engine
        self._rank = rank
        self._world_size = world_size

    def capture(self, parts: StateParts, run: Mapping[str, Any]) -> tuple[Files, Any]:
        """Return the files, filled by `write`, and this rank's own part."""
        files: Files = {}
        states = self.comparable(parts)
        differing = (
            None if states is None else own_part(states, RankState.from_plain(run.get("rank_state")), self._rank)
        )
        return files, {
            "files": files,
            "ranks": self._world_size,
            "buffers": parts.buffers(),
            "extra": parts.extra_states(),
            # Not all of the engine's optimizers save the current rate, and the schedule sets it only at the next step.
            "groups": [_copied_tensors(options) for options in options_of(self._engine.optimizer)],
            "others": {name: part.state_dict() for name, part in self._other_parts(parts).items()},
            "differing": differing,
        }

    def comparable(self, parts: StateParts) -> Mapping[str, Any] | None:
        """Return the optimizer's state if the engine writes only rank 0's: without ZeRO, on equal weights."""
        engine = self._engine
        # With that attribute, an optimizer such as BF16_Optimizer divides its state without ZeRO too.
        if engine.zero_optimization_stage() or hasattr(engine.optimizer, "dp_process_group"):
            return None
        if engine.has_moe_layers or engine.dp_world_size != self._world_size:
            return None
        return {_OPTIMIZER: engine.optimizer.state_dict()}

    def write(self, path: Path, content: Files) -> None:
        engine = self._engine
        with _recorded_writes(engine.checkpoint_engine) as written:
            engine.save_checkpoint(str(path.parent), tag=path.name, save_latest=False)
        for file in written:
            content[str(file.relative_to(path))] = _flush(file), zipfile.is_zipfile(file)

    def prepare(self, path: Path, parts: StateParts, own: Any) -> list[Path]:
        if not isinstance(own, Mapping) or "files" not in own:
            raise UnusableCheckpoint(f"{path.name} is not one of a DeepSpeed engine")
        if own["ranks"] != self._world_size:
            raise UnusableCheckpoint(
                f"{path.name} was written by {own['ranks']} ranks, and a DeepSpeed engine of {self._world_size} does "
                "not load that: convert it with deepspeed.checkpoint.ds_to_universal"
            )
        if len(own["groups"]) != len(self._engine.optimizer.param_groups):
            raise UnusableCheckpoint(f"{path.name} is of another training: other parameter groups")
        lacking = self._other_parts(parts).keys() - own["others"].keys()
        if lacking:
            raise UnusableCheckpoint(f"{path.name} is of another training: it has no {min(lacking)}")
        for name, (size, _) in own["files"].items():
            _check_size(path / name, size)
        return [path / name for name, (_, has_checksums) in own["files"].items() if has_checksums]

    def read(self, path: Path, prepared: list[Path], parts: StateParts, checked: bool) -> Path:
        for file in prepared if checked else ():
            _check_checksums(file)
        return path

    def restore(self, content: Path, parts: StateParts, own: Any) -> None:
        engine = self._engine
        before = options_of(engine.optimizer)
        loaded, _ = engine.load_checkpoint(str(content.parent), tag=content.name)
        if loaded is None:
            raise TrainmedicError(f"DeepSpeed did not load {content.name}; see its log")
        if own.get("differing"):
            # `merge` changes mappings in place.
            states = {_OPTIMIZER: _with_copied_mappings(engine.optimizer.state_dict())}
            merge(states, own["differing"])
            engine.optimizer.load_state_dict(states[_OPTIMIZER])
        parts.restore_buffers(own["buffers"])
        parts.restore_extra_states(own.get("extra", {}))
        for name, part in self._other_parts(parts).items():
            part.load_state_dict(own["others"][name])
        put_options(engine.optimizer, before, own["groups"])  # after schedulers, which may set rates when loaded

    def _other_parts(self, parts: StateParts) -> Mapping[str, Any]:
        others = {name: part for name, part in parts.by_name.items() if name != "model"}
        scaler = getattr(self._engine, "torch_autocast_z0_gradscaler", None)
        return {**others, "autocast scaler": scaler} if scaler is not None else others


def engine_checkpoints(directory: str | Path, keep: int | None, medic: Medic, engine: Any) -> JointCheckpointDirectory:
    contents = EngineContents(engine, medic.rank, medic.world_size)
    storage = JointCheckpointDirectory(directory, keep, medic, contents)
    storage.on_latest_changed = _write_latest
    return storage


def _write_latest(checkpoint: Path) -> None:
    checkpoints.write_durably(checkpoint.parent / LATEST, checkpoint.name.encode())


@contextlib.contextmanager
def _recorded_writes(checkpoint_engine: Any) -> Iterator[list[Path]]:
    files: list[Path] = []
    save = checkpoint_engine.save

    def save_and_record(state_dict: Any, path: Any, *arguments: Any, **options: Any) -> Any:
        files.append(Path(path))
        return save(state_dict, path, *arguments, **options)

    with replaced(checkpoint_engine, save=save_and_record):
        yield files


def _with_copied_mappings(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _with_copied_mappings(value) for key, value in state.items()}
    return state


def _copied_tensors(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()}


def _flush(file: Path) -> int:
    with file.open("rb") as written:
        os.fsync(written.fileno())
        return os.fstat(written.fileno()).st_size


def _check_size(file: Path, size: int) -> None:
    try:
        present = file.stat().st_size
    except OSError as error:
        raise UnusableCheckpoint(f"{file.parent.name}/{file.name} cannot be read: {error.strerror}") from error
    if present != size:
        raise UnusableCheckpoint(f"{file.parent.name}/{file.name} has {present} bytes, and {size} were written")


def _check_checksums(file: Path) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except MemoryError:  # the file may be intact, and an older one needs as much
        raise
    except Exception as error:  # zipfile and torch.load raise many types for damaged files
        raise UnusableCheckpoint(f"{file.parent.name}/{file.name} cannot be read: {error}") from error
    if damaged is not None:
        raise UnusableCheckpoint(f"{file.parent.name}/{file.name} cannot be read: {damaged} was damaged")
