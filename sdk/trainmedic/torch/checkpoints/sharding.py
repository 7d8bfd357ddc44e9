"""Checkpoint contents with sharded parameters (FSDP).

``sharded/`` has shards of parameters and optimizer states; each rank's file has the rest.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trainmedic.errors import ConfigurationError, TrainmedicError
from trainmedic.torch.checkpoints.checkpoint_storage import UnusableCheckpoint
from trainmedic.torch.checkpoints.digests import local_part, state_tensors
from trainmedic.torch.checkpoints.rank_states import Path as Leaf
from trainmedic.torch.checkpoints.rank_states import RankState, can_unite, leaves, put_leaves, why_not_united
from trainmedic.torch.optimizer_states import options_of, put_options
from trainmedic.torch.rank_agreement import first_line
from trainmedic.torch.state_parts import ATTRIBUTES, StateParts
from trainmedic.torch.tensor_names import plain_name

SHARDED = "sharded"
_WRITE_TIMEOUT = timedelta(minutes=30)  # of collectives while ranks write in the background
_METADATA = ".metadata"  # without it torch.distributed.checkpoint takes a different path on this rank only

Tensors = dict[str, Any]


class ShardedContents:
    """`BackgroundContents`, `UnitedContents` and `MemoryContents` of shards. Raises ConfigurationError."""

    is_replicated = False

    def __init__(self, parts: StateParts) -> None:
        modules = list(parts.modules())
        if modules != ["model"]:
            raise ConfigurationError(
                f"sharded parameters are supported for a single model and no other module, not for "
                f"{', '.join(modules)}: put them into one module, or pass checkpoints=OwnCheckpoints(...)"
            )
        self._group: Any = None
        self._model: nn.Module = parts.by_name["model"]
        self._optimizers = parts.optimizers()

    def capture(self, parts: StateParts, run: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
        # Requesting the state of an optimizer without a step would create one.
        without_step = self._optimizers_without_step()
        content = self._tensors(without_step)
        return content, {
            "fresh": without_step,  # names of optimizers that have no state yet
            "plain": self._unsharded_leaves(content, run),  # empty in a copy in memory: `divide` adds them
            "attributes": parts.attributes.capture(),
            "buffers": parts.buffers(),
            "groups": {name: optimizer.state_dict()["param_groups"] for name, optimizer in self._optimizers.items()},
            "others": {name: part.state_dict() for name, part in self._other_parts(parts).items()},
        }

    def divide(self, parts: StateParts, held: Any, run: Mapping[str, Any]) -> tuple[Any, Any]:
        content, own = held
        return content, {**own, "plain": self._unsharded_leaves(content, run)}

    def comparable(self, parts: StateParts) -> Mapping[str, Any]:
        return {**_unsharded(self._tensors(self._optimizers_without_step())), ATTRIBUTES: parts.attributes.capture()}

    def use_separate_group(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_WRITE_TIMEOUT)

    def write(self, path: Path, content: Any) -> None:
        try:
            save(content, checkpoint_id=path / SHARDED, process_group=self._group)
        except CheckpointException as error:  # not an Exception; raised on all ranks if one fails
            raise TrainmedicError(f"the shards could not be written: {_cause(error)}") from error

    def prepare(self, path: Path, parts: StateParts, own: Any) -> Any:
        if own is None or not (path / SHARDED / _METADATA).is_file():
            raise UnusableCheckpoint(f"{path.name} has no shards")
        mismatch = self._mismatch(parts, own)
        if mismatch:
            raise UnusableCheckpoint(f"{path.name} is of another training: {mismatch}")
        return _copied(self._tensors(own["fresh"]))

    def read(self, path: Path, prepared: Any, parts: StateParts, checked: bool) -> Any:
        try:
            load(prepared, checkpoint_id=path / SHARDED)
        except CheckpointException as error:
            raise UnusableCheckpoint(f"{path.name}/{SHARDED} cannot be read: {_cause(error)}") from error
        return prepared

    def for_other_ranks(self, name: str, files: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the own part. Raises UnusableCheckpoint for differing values."""
        states = [RankState.from_plain(file["run"].get("rank_state")) for file in files]
        known = [state for state in states if state is not None]
        for part in known[0].parts if known else ():
            if len(known) < len(files) or not can_unite(known, part):
                raise UnusableCheckpoint(why_not_united(part, name, len(files)))
        own: dict[str, Any] = {**files[0]["own"], "plain": []}
        return own

    def restore(self, content: Any, parts: StateParts, own: Any) -> None:
        put_leaves(content, own.get("plain", ()))
        # Shards lack buffers, which are in the own file; pass the present ones along.
        set_model_state_dict(self._model, {**get_model_state_dict(self._model), **content["model"]})
        parts.restore_buffers(own["buffers"])
        before = {name: options_of(optimizer) for name, optimizer in self._optimizers.items()}
        for name, optimizer in self._optimizers.items():
            if name in own["fresh"]:
                optimizer.state.clear()
            else:
                held = get_optimizer_state_dict(self._model, optimizer)
                set_optimizer_state_dict(self._model, optimizer, {**held, "state": content[name]})
        if "attributes" in own:  # absent in earlier releases
            parts.attributes.restore(own["attributes"])
        for name, part in self._other_parts(parts).items():
            part.load_state_dict(own["others"][name])
        for name, optimizer in self._optimizers.items():  # after schedulers, which may set rates when they are loaded
            put_options(optimizer, before[name], own["groups"][name])

    def meshes(self, parts: StateParts) -> Sequence[Any]:
        meshes: list[Any] = []
        for parameter in self._model.parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None and mesh not in meshes:
                meshes.append(mesh)
        return meshes

    def mismatch(self, parts: StateParts, held: Any) -> str:
        content, own = held
        mismatch = self._mismatch(parts, own)
        if mismatch:
            return mismatch
        present = self._tensors(list(self._optimizers))["model"]
        if present.keys() != content["model"].keys():
            return f"{len(present.keys() ^ content['model'].keys())} names of parameters differ"
        changed = [name for name, tensor in present.items() if tensor.shape != content["model"][name].shape]
        return f"{changed[0]} has another shape" if changed else ""

    def tensors(self, parts: StateParts, held: Any) -> Mapping[str, torch.Tensor]:
        content, own = held
        names = {parameter: plain_name(name) for name, parameter in self._model.named_parameters()}
        tensors = {f"model.{name}": local_part(content["model"][name]) for name in names.values()}
        for part, optimizer in self._optimizers.items():
            if part not in own["fresh"]:
                parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                for number, parameter in enumerate(parameters):
                    tensors.update(state_tensors(f"{part}.{number}", content[part].get(names[parameter], {})))
        return tensors

    def put_back(self, parts: StateParts, held: Any) -> None:
        content, own = held
        self.restore(content, parts, own)

    def _optimizers_without_step(self) -> list[str]:
        return [name for name, optimizer in self._optimizers.items() if not optimizer.state]

    def _unsharded_leaves(self, content: Tensors, run: Mapping[str, Any] | None) -> list[tuple[Leaf, Any]]:
        """Return differing unsharded leaves; ``torch.distributed.checkpoint`` writes only one rank's."""
        if run is None:
            return []
        state = RankState.from_plain(run.get("rank_state"))
        return [(path, value) for path, value in leaves(_unsharded(content)) if state is None or path[0] in state.parts]

    def _mismatch(self, parts: StateParts, own: Any) -> str:
        for name, optimizer in self._optimizers.items():
            if _group_sizes(own["groups"].get(name, ())) != _group_sizes(optimizer.state_dict()["param_groups"]):
                return f"{name}: other parameter groups"
        lacking = self._other_parts(parts).keys() - own["others"].keys()
        return f"it has no {min(lacking)}" if lacking else ""

    def _tensors(self, without_step: Collection[str]) -> Tensors:
        buffers = {plain_name(name) for name, _ in self._model.named_buffers()}
        model = {name: tensor for name, tensor in get_model_state_dict(self._model).items() if name not in buffers}
        tensors: Tensors = {"model": model}
        for name, optimizer in self._optimizers.items():
            if name not in without_step:
                tensors[name] = get_optimizer_state_dict(self._model, optimizer)["state"]
        return tensors

    def _other_parts(self, parts: StateParts) -> Mapping[str, Any]:
        sharded = {"model", *self._optimizers}
        return {name: part for name, part in parts.by_name.items() if name not in sharded}


def _unsharded(content: Mapping[Any, Any]) -> dict[Any, Any]:
    return {
        key: _unsharded(value) if isinstance(value, Mapping) else value
        for key, value in content.items()
        if not hasattr(value, "to_local")
    }


def _group_sizes(groups: Any) -> list[int]:
    return [len(group["params"]) for group in groups]


def _copied(held: Any) -> Any:
    # In host memory; shards stay shards.
    if isinstance(held, Mapping):
        return {name: _copied(value) for name, value in held.items()}
    return held.detach().to("cpu", copy=True) if isinstance(held, torch.Tensor) else held


def _cause(error: CheckpointException) -> str:
    for rank, (fault, _) in sorted(error.failures.items()):
        return f"rank {rank}: {first_line(fault)}"
    return first_line(error)
