"""Optimizers whose state differs by rank, in the shapes in which people write them; each for a process group of gloo.

Not here: the trainings (``rank_states_training``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

KINDS = ("owned", "sliced", "share", "zero", "local", "compressed", "sharded")


def average(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        assert parameter.grad is not None
        parameter.grad /= dist.get_world_size()


class OwnedMomentum(Optimizer):
    """As Muon: each parameter has one owner, which keeps its momentum; all get its update, while more is computed."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            average(group["params"])
            for first in range(0, len(group["params"]), ranks):
                members = group["params"][first : first + ranks]
                longest = max(parameter.numel() for parameter in members)
                mine = torch.zeros(longest)
                if rank < len(members):
                    own = members[rank]
                    held = self.state[own].setdefault("momentum_buffer", torch.zeros_like(own))
                    held.mul_(group["momentum"]).add_(own.grad)
                    mine[: own.numel()] = (held / (held.norm() + 1e-6)).flatten()
                updates = [torch.zeros(longest) for _ in range(ranks)]
                dist.all_gather(updates, mine, async_op=True).wait()
                for parameter, update in zip(members, updates, strict=False):
                    parameter.sub_(group["lr"] * update[: parameter.numel()].view_as(parameter))


class SlicedAdam(Optimizer):
    """Each rank has the moments of its slice of every parameter, and a scratch tensor as an attribute."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})
        self.scratch = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            average(group["params"])
            for parameter in group["params"]:
                padded = -(-parameter.numel() // ranks) * ranks
                flat = torch.zeros(padded)
                flat[: parameter.numel()] = parameter.flatten()
                gradient = torch.zeros(padded)
                gradient[: parameter.numel()] = parameter.grad.flatten()
                own, slope = flat.chunk(ranks)[rank].clone(), gradient.chunk(ranks)[rank]
                state = self.state[parameter]
                if not state:
                    state.update(step=0, first=torch.zeros_like(own), second=torch.zeros_like(own))
                state["step"] += 1
                self.scratch.fill_(state["step"])
                state["first"].lerp_(slope, 0.1)
                state["second"].lerp_(slope.square(), 0.05)
                own -= group["lr"] * state["first"] / (state["second"].sqrt() + 1e-3)
                slices = [torch.zeros_like(own) for _ in range(ranks)]
                dist.all_gather(slices, own)
                parameter.copy_(torch.cat(slices)[: parameter.numel()].view_as(parameter))


class Share(Optimizer):
    """A hand-made ZeRO-1 whose ``state_dict`` shows nothing: an optimizer of its share, a count, an error fed back."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})
        self.rank = dist.get_rank()
        self.every = self.param_groups[0]["params"]
        self.inner = AdamW(self.every[self.rank :: dist.get_world_size()], lr=lr)
        self.count = 0
        self.error: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1 + self.rank
        for parameter in self.every:
            error = self.error.setdefault(parameter, torch.zeros_like(parameter))
            whole = parameter.grad + error
            parameter.grad = (whole * 64).round() / 64
            error.copy_(whole - parameter.grad)
        average(self.every)
        self.inner.param_groups[0]["lr"] = self.param_groups[0]["lr"] / (1 + 0.01 * self.count)
        self.inner.step()
        for number, parameter in enumerate(self.every):
            dist.broadcast(parameter, number % dist.get_world_size())


class LocalNorms(Optimizer):
    """For parameters that FSDP has spread: momentum as they are spread, and of each rank's part an average of the
    gradient's norm, in plain tensors; the latest norm is an attribute."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.9})
        self.latest = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state, slope = self.state[parameter], local_of(parameter.grad)
                if not state:
                    state.update(momentum=torch.zeros_like(parameter), norm=torch.zeros(()))
                momentum = local_of(state["momentum"])
                momentum.mul_(group["momentum"]).add_(slope)
                state["norm"].lerp_(slope.norm(), 0.1)
                local_of(parameter).sub_(group["lr"] * momentum / (1 + state["norm"] + 0.1 * self.latest))
                self.latest.copy_(slope.norm())


def local_of(tensor: Any) -> torch.Tensor:
    own: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own


def make(kind: str, model: nn.Module) -> tuple[nn.Module, Any]:
    """The model as that kind wraps it, and its optimizer."""
    # These take seconds to import, with warnings, and only the ranks need them.
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    if kind == "owned":
        return model, OwnedMomentum(model.parameters())
    if kind == "sliced":
        return model, SlicedAdam(model.parameters())
    if kind == "share":
        return model, Share(model.parameters())
    if kind == "sharded":
        sharded = fully_shard(model)
        return sharded, LocalNorms(sharded.parameters())
    if kind == "local":
        inner = SGD(model.parameters(), lr=0.02, momentum=0.9)
        return model, PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=4, warmup_steps=2))
    wrapped = DistributedDataParallel(model)
    if kind == "zero":
        return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), AdamW, lr=0.01)
    compression = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    wrapped.register_comm_hook(compression, powerSGD_hook)
    return wrapped, SGD(wrapped.parameters(), lr=0.02, momentum=0.9)


def state_of(optimizer: Any, model: Any) -> list[torch.Tensor]:
    """All tensors on which the next update depends on this rank, in order, found without the help of Trainmedic."""
    inner = getattr(optimizer, "inner", getattr(optimizer, "optim", optimizer))
    tensors: list[Any] = [*model.parameters()]
    for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
        state = inner.state.get(parameter, {})
        tensors += [torch.as_tensor(state[key]) for key in sorted(state)]
    tensors += [torch.tensor(getattr(optimizer, "count", 0)), *getattr(optimizer, "error", {}).values()]
    tensors.append(torch.tensor(getattr(getattr(optimizer, "averager", None), "step", 0)))
    for _, state in getattr(model, "_comm_hooks", ()):
        tensors += [torch.tensor(state.iter), *state.error_dict.values(), *state.q_memory_dict.values()]
    tensors += [optimizer.latest] if isinstance(optimizer, LocalNorms) else []
    return [local_of(tensor.detach()).clone() for tensor in tensors]
