"""Digests of the parameters and the optimizer's state, by which a state that was loaded is compared with that saved.

A digest is an exact checksum of all bytes of a tensor, made on the device where it is: the sum of its words, each times
another odd number, modulo 2^64. A change of a single word shows for certain, any other with near certainty. With
several ranks each digests what it holds itself, of a sharded tensor its shard.

Who calls it: ``checkpoint_writer`` and ``restore``, and the integrations of Trainers. Not here: what follows from a
difference.
"""

from __future__ import annotations

from typing import Any, Iterable, Iterator, Mapping, NamedTuple

import torch
from torch import nn

from trainmedic.torch.optimizer_states import live_state, parameters_of
from trainmedic.torch.tensor_names import plain_name

Digests = Mapping[str, str]
"""By the name of each tensor its type and its digest."""
Modules = Mapping[str, nn.Module]
Optimizers = Mapping[str, torch.optim.Optimizer]

_CHUNK, _CHUNK_ON_DEVICE = 1 << 16, 1 << 24  # words: on a processor, what it takes in between stays in the cache
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_NAMED = 3


class DigestComparison(NamedTuple):
    """How the digests of a loaded state stand to those that were kept."""

    compared: int
    """How many tensors could be compared: those that a loader gave another type cannot."""
    different: tuple[str, ...]
    """The names of the tensors that are not as they were saved."""

    @property
    def problem(self) -> str:
        """What is different, in words; empty where nothing is."""
        names, count = ", ".join(self.different[:_MOST_NAMED]), len(self.different)
        more = f" and {count - _MOST_NAMED} more" if count > _MOST_NAMED else ""
        return f"{count} of {self.compared} tensors are not as they were saved: {names}{more}" if names else ""


def digests(modules: Modules, optimizers: Optimizers, cache: KnownDigests | None = None) -> dict[str, str]:
    """The digests of all parameters, and of the optimizers' states, by names that stay the same."""
    return digests_of(dict(_tensors(modules, optimizers)), cache)


def digests_of(tensors: Mapping[str, torch.Tensor], cache: KnownDigests | None = None) -> dict[str, str]:
    """The digests of these; those that are in ``known`` are not computed again, and the others are added to it."""
    cache = KnownDigests() if cache is None else cache
    cache.add(tensors.values())
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')}:{cache.number(tensor) & (1 << 64) - 1:016x}"
        for name, tensor in tensors.items()
    }


class KnownDigests:
    """The digests of tensors that do not change as long as this is used: those of one step boundary."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._tensors: list[torch.Tensor] = []  # held, so that no other comes to lie where one of them is

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Compute the digests of those that are not known."""
        new = {_place(tensor): tensor for tensor in tensors}
        for place in new.keys() & self._numbers.keys():
            del new[place]
        self._tensors.extend(new.values())
        numbers = _read([_digest(tensor) for tensor in new.values()])
        self._numbers.update(zip(new, numbers, strict=True))

    def number(self, tensor: torch.Tensor) -> int:
        return self._numbers[_place(tensor)]


def _place(tensor: torch.Tensor) -> Any:
    """Return what tells tensors apart that may lie in the same memory."""
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.is_conj()


def compare(kept: Digests, present: Digests) -> DigestComparison:
    """Compare; a tensor that only one of them has is different."""
    compared, different = 0, []
    for name in sorted({*kept, *present}):
        before, now = kept.get(name, ":"), present.get(name, ":")
        if name in kept and name in present and before.partition(":")[0] != now.partition(":")[0]:
            continue
        compared += 1
        if before != now:
            different.append(name)
    return DigestComparison(compared, tuple(different))


def are_finite(modules: Modules, optimizers: Optimizers) -> bool:
    """Whether all parameters that are trained, and the optimizers' states, are finite, as far as this rank has them.

    Buffers do not count, for a mask may well hold infinity.
    """
    return all_finite(tensor for _, tensor in _tensors(modules, optimizers, trained_only=True))


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all numbers in these are finite."""
    bounds: list[torch.Tensor] = []
    for tensor in tensors:
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if values.is_floating_point() and values.element_size() > 1 and values.numel() and not values.is_meta:
            bounds.extend(values.aminmax())
    return all(bool(torch.isfinite(bound)) for bound in _gathered(bounds))


def _tensors(
    modules: Modules, optimizers: Optimizers, trained_only: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    for part, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad or not trained_only:
                yield f"{part}.{plain_name(name)}", local_part(parameter)
    for part, optimizer in optimizers.items():
        state = live_state(optimizer)
        for number, moved in enumerate(parameters_of(optimizer)):
            yield from state_tensors(f"{part}.{number}", state.get(moved, {}), not trained_only)


def state_tensors(name: str, state: Mapping[str, Any], with_numbers: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in an optimizer's state of one parameter, by their names in digests; of numbers one is made."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            yield f"{name}.{key}", local_part(value)
        elif isinstance(value, (int, float)) and with_numbers:
            yield f"{name}.{key}", torch.tensor(float(value), dtype=torch.float64)
        elif isinstance(value, Mapping):
            yield from state_tensors(f"{name}.{key}", value, with_numbers)
        elif isinstance(value, (list, tuple)):
            members = {str(number): member for number, member in enumerate(value)}
            yield from state_tensors(f"{name}.{key}", members, with_numbers)


def local_part(tensor: Any) -> torch.Tensor:
    """What this rank holds of it, without its graph."""
    held = tensor.detach()
    to_local = getattr(held, "to_local", None)
    mine: torch.Tensor = held if to_local is None else to_local()
    return mine


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """One number on the tensor's device; it is not waited for."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return torch.zeros((), dtype=torch.int64)
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    words = values.contiguous().reshape(-1).view(_WORDS[values.element_size()])
    size = _CHUNK if words.device.type == "cpu" else _CHUNK_ON_DEVICE
    odd = torch.arange(1, 2 * min(size, max(len(words), 1)), 2, dtype=torch.int64, device=words.device)
    total = torch.full((), len(words), dtype=torch.int64, device=words.device)
    for number, chunk in enumerate(torch.split(words, size)):
        # The number of the chunk is in the sum, so that chunks that change places show as well.
        total = total * 3 + (chunk * odd[: len(chunk)]).sum() * (2 * number + 1)
    return total


def _read(values: list[torch.Tensor]) -> list[int]:
    return [int(value) for value in _gathered(values)]


def _gathered(values: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Numbers of any device, in order, read with one wait for each type and device."""
    listed = list(values)
    groups: dict[Any, list[int]] = {}
    for index, value in enumerate(listed):
        groups.setdefault((value.device, value.dtype), []).append(index)
    numbers: dict[int, Any] = {}
    for indexes in groups.values():
        numbers.update(zip(indexes, torch.stack([listed[index] for index in indexes]).cpu(), strict=True))
    return (numbers[index] for index in range(len(listed)))
