"""A rank's share of a DeepSpeed engine's parameters and optimizer state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Iterator, Mapping, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from trainmedic.torch.state_parts import StateParts


class EngineParts(StateParts):
    """Parts that show this rank's partitions, for digests and health."""

    def __init__(self, engine: Any, /, **also: Any) -> None:
        super().__init__(model=engine.module, **also)
        self._engine = engine

    def modules(self) -> dict[str, nn.Module]:
        return {**super().modules(), "model": _PartitionedModule(self._engine)}

    def optimizers(self) -> dict[str, Any]:
        trained = list(_trained(self._engine))
        partitions = SimpleNamespace(
            param_groups=[{"params": [partition.weights for partition in trained]}],
            state={partition.weights: partition.state for partition in trained},
        )
        others = {name: part for name, part in self.by_name.items() if isinstance(part, torch.optim.Optimizer)}
        return {**others, "optimizer": partitions}


class _TrainedPartition(NamedTuple):
    weights: torch.Tensor
    state: Mapping[str, Any]


class _PartitionedModule(nn.Module):
    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._engine = (engine,)  # hidden in a tuple: an engine is a module, and would become a submodule

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        [engine] = self._engine
        computed = dict(engine.module.named_parameters())
        for name, parameter in computed.items():
            if _is_partitioned(parameter):
                yield name, parameter.ds_tensor.view(-1).narrow(0, 0, _unpadded_length(parameter))
            else:
                yield name, parameter
        known = {id(parameter) for parameter in computed.values()}
        for number, partition in enumerate(_trained(engine)):
            if id(partition.weights) not in known:
                yield f"trained.{number}", partition.weights

    def named_buffers(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._engine[0].module.named_buffers(*arguments, **options)

    def named_modules(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        yield from self._engine[0].module.named_modules(*arguments, **options)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return self._engine[0].module.state_dict(*arguments, **options)


def _trained(engine: Any) -> Iterator[_TrainedPartition]:
    """Yield this rank's weights in full precision, with their optimizer state."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    partitions: Any = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)
    if partitions is None:
        for group in inner.param_groups:
            for parameter in group["params"]:
                yield _TrainedPartition(parameter, inner.state.get(parameter, {}))
        return
    for parameters, flat in zip(engine.optimizer.fp16_groups, partitions, strict=True):  # stage 3
        start, state = 0, inner.state.get(flat, {})
        for parameter in parameters:
            length = _unpadded_length(parameter)
            yield _TrainedPartition(
                flat.narrow(0, start, length),
                {name: _part(value, flat, start, length) for name, value in state.items()},
            )
            start += parameter.ds_tensor.ds_numel  # with padding


def _part(value: Any, flat: torch.Tensor, start: int, length: int) -> Any:
    """Return one parameter's part, or a value for all parameters."""
    is_elementwise = isinstance(value, torch.Tensor) and value.shape == flat.shape
    return value.narrow(0, start, length) if is_elementwise else value


def _is_partitioned(parameter: Any) -> bool:
    return hasattr(parameter, "ds_tensor") and hasattr(parameter, "ds_numel")


def _unpadded_length(parameter: Any) -> int:
    size = int(parameter.ds_tensor.ds_numel)
    rank = dist.get_rank(group=parameter.ds_process_group)
    return max(0, min(size, int(parameter.ds_numel) - rank * size))
