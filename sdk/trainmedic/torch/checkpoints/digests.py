"""Digests of parameters and optimizer states, to verify a loaded state.

A digest is the sum of a tensor's words, each times the odd number of its position, modulo 2^64. It detects any change
of one word, and any exchange of two words of up to four bytes.
"""

from __future__ import annotations

from typing import Any, Collection, Iterable, Iterator, Mapping, NamedTuple

import torch
from torch import nn

from trainmedic.torch.optimizer_states import live_state, parameters_of
from trainmedic.torch.tensor_names import plain_name

Digests = Mapping[str, str]  # by tensor name: "type:digest"
Modules = Mapping[str, nn.Module]
Optimizers = Mapping[str, torch.optim.Optimizer]

_CHUNK, _CHUNK_ON_DEVICE = 1 << 16, 1 << 24  # words; on a CPU the intermediate results stay in the cache
_WORD_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_NAMED = 3
# Follows the type in digests. Those of earlier releases lack it: they give two chunks equal factors, and depend on the
# size of chunks, which differs by device. Ranks still compare these, because another may be an earlier release's.
_MARK = "/2"


class DigestComparison(NamedTuple):
    compared: int  # number of tensors, without those of another type or release
    different: tuple[str, ...]

    def without(self, names: Collection[str]) -> DigestComparison:
        return DigestComparison(self.compared, tuple(name for name in self.different if name not in names))

    @property
    def problem(self) -> str:
        """The difference as text, or ""."""
        if not self.different:
            return ""
        names, count = ", ".join(self.different[:_MOST_NAMED]), len(self.different)
        more = f" and {count - _MOST_NAMED} more" if count > _MOST_NAMED else ""
        return f"{count} of {self.compared} tensors are not as they were saved: {names}{more}"


def digests(modules: Modules, optimizers: Optimizers, like: Digests | None = None) -> dict[str, str]:
    """Return digests of parameters and standard optimizers' states, comparable with ``like``."""
    return digests_of(dict(tensors_of(modules, optimizers)), like=like)


def digests_of(
    tensors: Mapping[str, torch.Tensor], cache: KnownDigests | None = None, like: Digests | None = None
) -> dict[str, str]:
    """Return digests, by default of this release. Tensors without readable values have none."""
    cache = KnownDigests() if cache is None else cache
    cache.add(tensors.values())
    like = like or {}
    earlier = {name for name in tensors if name in like and _MARK not in like[name]}
    return {
        name: cache.earlier(tensor) if name in earlier else cache.digest(tensor)
        for name, tensor in tensors.items()
        if name in earlier or _is_readable(tensor)
    }


def earlier_digests_of(tensors: Mapping[str, torch.Tensor], cache: KnownDigests | None = None) -> dict[str, str]:
    """Return digests as earlier releases do."""
    cache = KnownDigests() if cache is None else cache
    cache.add(tensors.values())
    return {name: cache.earlier(tensor) for name, tensor in tensors.items()}


class KnownDigests:
    """Cache for one step boundary, in which tensors do not change."""

    def __init__(self) -> None:
        self._numbers: dict[Any, list[int]] = {}  # this release's, and earlier ones'
        self._tensors: list[torch.Tensor] = []  # so that their addresses are not reused

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        new = {place_of(tensor): tensor for tensor in tensors}
        for place in new.keys() & self._numbers.keys():
            del new[place]
        self._tensors.extend(new.values())
        numbers = [number.tolist() for number in _gathered([_numbers(tensor) for tensor in new.values()])]
        self._numbers.update(zip(new, numbers, strict=True))

    def digest(self, tensor: torch.Tensor) -> str:
        return f"{_type_of(tensor)}{_MARK}:{_hexadecimal(self._numbers[place_of(tensor)][0])}"

    def earlier(self, tensor: torch.Tensor) -> str:
        return f"{_type_of(tensor)}:{_hexadecimal(self._numbers[place_of(tensor)][1])}"


def place_of(tensor: torch.Tensor) -> Any:
    """Return a key of the memory, equal only for tied parameters."""
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.is_conj()


def compare(saved: Digests, present: Digests) -> DigestComparison:
    """Compare digests; a tensor in only one of them differs. Those of another type or release are not compared."""
    compared, different = 0, []
    for name in sorted({*saved, *present}):
        before, now = saved.get(name, ":"), present.get(name, ":")
        if name in saved and name in present and before.partition(":")[0] != now.partition(":")[0]:
            continue
        compared += 1
        if before != now:
            different.append(name)
    return DigestComparison(compared, tuple(different))


def are_finite(modules: Modules, optimizers: Optimizers) -> bool:
    """Return whether this rank's trained parameters and optimizer states are finite."""
    return all_finite(tensor for _, tensor in tensors_of(modules, optimizers, trained_only=True))


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    bounds: list[torch.Tensor] = []  # NaN if any value is
    for tensor in tensors:
        values = _values_of(tensor)
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        # PyTorch finds no extremes of one-byte floats.
        if values.is_floating_point() and values.element_size() > 1 and values.numel() and not values.is_meta:
            bounds.extend(values.aminmax())
    return all(bool(torch.isfinite(bound)) for bound in _gathered(bounds))


def _values_of(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout == torch.strided:
        return tensor
    if tensor.layout == torch.sparse_coo:
        return tensor._values()  # also of one that is not coalesced
    return tensor.values() if hasattr(tensor, "values") and not tensor.is_mkldnn else tensor.to_dense()


def tensors_of(
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
    """Yield the tensors of a parameter's optimizer state by digest name."""
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
    """Return this rank's shard, without its graph."""
    held = tensor.detach()
    to_local = getattr(held, "to_local", None)
    mine: torch.Tensor = held if to_local is None else to_local()
    return mine


def _is_readable(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and tensor.layout == torch.strided


def _type_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _hexadecimal(number: int) -> str:
    return f"{number & (1 << 64) - 1:016x}"


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    # This release's and earlier ones', on the device, without waiting.
    if not _is_readable(tensor):
        return torch.zeros(2, dtype=torch.int64)
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    words = values.contiguous().reshape(-1).view(_WORD_TYPES[values.element_size()])
    size = _CHUNK if words.device.type == "cpu" else _CHUNK_ON_DEVICE
    odd = torch.arange(1, 2 * min(size, max(len(words), 1)), 2, dtype=torch.int64, device=words.device)
    total = earlier = torch.full((), len(words), dtype=torch.int64, device=words.device)
    for number, chunk in enumerate(torch.split(words, size)):
        weighted = (chunk * odd[: len(chunk)]).sum()
        total = total + weighted if number == 0 else total + weighted + chunk.sum() * (2 * number * size)
        earlier = earlier * 3 + weighted * (2 * number + 1)
    return torch.stack((total, earlier))


def _gathered(values: Iterable[torch.Tensor]) -> Iterator[Any]:
    # One wait per device and type.
    listed = list(values)
    groups: dict[Any, list[int]] = {}
    for index, value in enumerate(listed):
        groups.setdefault((value.device, value.dtype), []).append(index)
    numbers: dict[int, Any] = {}
    for indexes in groups.values():
        numbers.update(zip(indexes, torch.stack([listed[index] for index in indexes]).cpu(), strict=True))
    return (numbers[index] for index in range(len(listed)))
