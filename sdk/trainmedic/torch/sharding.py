"""Checkpoints of a training whose parameters are spread over the ranks, as with ``fully_shard`` (FSDP).

Parameters and the optimizer's state are written by ``torch.distributed.checkpoint``, each rank its shards, into
``sharded/``; it can be read by other numbers of ranks too. Buffers, parameter groups, the scheduler and whatever
else there is go into each rank's own file. Not here: the files around it (``joint_checkpoints``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Collection, Mapping

import torch
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
from trainmedic.torch.checkpoint_storage import UnusableCheckpoint
from trainmedic.torch.rank_agreement import first_line
from trainmedic.torch.state_parts import StateParts

SHARDED = "sharded"
_METADATA = ".metadata"  # torch.distributed.checkpoint's own, without which it takes another way on this rank alone

Tensors = dict[str, Any]


class ShardedContents:
    """`trainmedic.torch.joint_checkpoints.JointContents` of a sharded training. Raises ConfigurationError."""

    def __init__(self, parts: StateParts) -> None:
        modules = list(parts.modules())
        if modules != ["model"]:
            raise ConfigurationError(
                f"sharded parameters are kept of a single model and no other module; these are {', '.join(modules)}: "
                "put them into one module, or give checkpoints=OwnCheckpoints(...)"
            )
        self._model: nn.Module = parts.by_name["model"]
        self._optimizers = {
            name: part for name, part in parts.by_name.items() if isinstance(part, torch.optim.Optimizer)
        }

    def capture(self, parts: StateParts) -> tuple[Any, Any]:
        # Asking for the state of an optimizer that has done no step yet would give it one.
        fresh = [name for name, optimizer in self._optimizers.items() if not optimizer.state]
        return self._tensors(fresh), {
            "fresh": fresh,
            "buffers": parts.buffers(),
            "groups": {name: optimizer.state_dict()["param_groups"] for name, optimizer in self._optimizers.items()},
            "others": {name: part.state_dict() for name, part in self._others(parts).items()},
        }

    def write(self, path: Path, content: Any) -> None:
        try:
            save(content, checkpoint_id=path / SHARDED)
        except CheckpointException as error:  # not an Exception; raised on all ranks where one fails
            raise TrainmedicError(f"the shards could not be written: {_cause(error)}") from error

    def prepare(self, path: Path, parts: StateParts, own: Any) -> Any:
        if own is None or not (path / SHARDED / _METADATA).is_file():
            raise UnusableCheckpoint(f"{path.name} has no shards")
        for name, optimizer in self._optimizers.items():
            if _sizes(own["groups"].get(name, ())) != _sizes(optimizer.state_dict()["param_groups"]):
                raise UnusableCheckpoint(f"{path.name} is of another training: {name}: other parameter groups")
        lacking = self._others(parts).keys() - own["others"].keys()
        if lacking:
            raise UnusableCheckpoint(f"{path.name} is of another training: it has no {min(lacking)}")
        return _copied(self._tensors(own["fresh"]))

    def read(self, path: Path, prepared: Any, parts: StateParts, checked: bool) -> Any:
        try:
            load(prepared, checkpoint_id=path / SHARDED)
        except CheckpointException as error:
            raise UnusableCheckpoint(f"{path.name}/{SHARDED} cannot be read: {_cause(error)}") from error
        return prepared

    def restore(self, content: Any, parts: StateParts, own: Any) -> None:
        # The shards lack the buffers, which are in each rank's own file, so the present ones are passed along.
        set_model_state_dict(self._model, {**get_model_state_dict(self._model), **content["model"]})
        parts.restore_buffers(own["buffers"])
        for name, optimizer in self._optimizers.items():
            if name in own["fresh"]:
                optimizer.state.clear()
            else:
                held = get_optimizer_state_dict(self._model, optimizer)
                set_optimizer_state_dict(self._model, optimizer, {**held, "state": content[name]})
            for group, values in zip(optimizer.param_groups, own["groups"][name], strict=True):
                group.update({key: value for key, value in values.items() if key != "params"})
        for name, part in self._others(parts).items():
            part.load_state_dict(own["others"][name])

    def _tensors(self, fresh: Collection[str]) -> Tensors:
        """Parameters by their names, and of each optimizer not in `fresh` the state by the names of its parameters."""
        buffers = {name for name, _ in self._model.named_buffers()}
        model = {name: tensor for name, tensor in get_model_state_dict(self._model).items() if name not in buffers}
        tensors: Tensors = {"model": model}
        for name, optimizer in self._optimizers.items():
            if name not in fresh:
                tensors[name] = get_optimizer_state_dict(self._model, optimizer)["state"]
        return tensors

    def _others(self, parts: StateParts) -> Mapping[str, Any]:
        sharded = {"model", *self._optimizers}
        return {name: part for name, part in parts.by_name.items() if name not in sharded}


def _sizes(groups: Any) -> list[int]:
    return [len(group["params"]) for group in groups]


def _copied(held: Any) -> Any:
    """Tensors of the same shape in the main memory, to be read into; shards stay shards."""
    if isinstance(held, Mapping):
        return {name: _copied(value) for name, value in held.items()}
    return held.detach().to("cpu", copy=True) if isinstance(held, torch.Tensor) else held


def _cause(error: CheckpointException) -> str:
    """What went wrong on the first rank where something did."""
    for rank, (fault, _) in sorted(error.failures.items()):
        return f"rank {rank}: {first_line(fault)}"
    return first_line(error)
