"""Copies of values in PyTorch's safely loadable types, restored in place."""

from __future__ import annotations

import random
import sys
from collections import deque
from typing import Any, Callable, Iterator, Mapping, MutableMapping, NamedTuple

import torch

Held = tuple[str, Any]  # kind and copied content

_PLAIN_TYPES = (int, float, complex, str, bytes, bool, type(None))
# Kinds, stored in checkpoints.
_TENSOR, _ARRAY, _LIST, _TUPLE, _DEQUE, _DICT, _PLAIN = "tensor", "array", "list", "tuple", "deque", "dict", "plain"
_SCALAR = "scalar"  # NumPy scalar; its type is kept
_NUMBER_KINDS = "biufc"  # NumPy's codes for booleans, integers, floats and complex numbers
_TORCH_RANDOM, _PYTHON_RANDOM, _NUMPY_RANDOM = "torch random", "python random", "numpy random"


def is_random(value: Any) -> bool:
    return _kind_of_random(value) is not None


def lacks_generator(present: Any, held: Held) -> bool:
    # Whether ``held`` is a random generator's state, and ``present`` no generator of its kind.
    return held[0] in (_TORCH_RANDOM, _PYTHON_RANDOM, _NUMPY_RANDOM) and _kind_of_random(present) != held[0]


def is_in_place(value: Any) -> bool:
    """Return whether it can be restored without replacing the object."""
    return isinstance(value, (torch.Tensor, list, deque, MutableMapping)) or _is_array(value) or is_random(value)


def tensors_in(value: Any, outer: tuple[Any, ...] = ()) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple, deque)) and not any(value is each for each in outer):
        outer = (*outer, value)  # a container that holds itself is read once
        for member in value.values() if isinstance(value, Mapping) else value:
            if type(member) not in _PLAIN_TYPES:  # sooner than in the call: lists can be long
                yield from tensors_in(member, outer)


def is_ordinary(tensor: torch.Tensor) -> bool:
    # Nested tensors have no shape, and reading a quantized one's bytes crashes.
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def is_freed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory was freed, as by FSDP; reading it would crash."""
    if not is_ordinary(tensor) or not tensor.numel():
        return False
    last_element = tensor.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    try:
        return tensor.untyped_storage().nbytes() < (last_element + 1) * tensor.element_size()
    except (NotImplementedError, RuntimeError):  # a tensor subclass without storage
        return False


def take(value: Any) -> Held:
    """Return a copy. Raises TypeError for unsupported values."""
    if isinstance(value, torch.Tensor):
        if value.is_meta or hasattr(value, "placements") or not is_ordinary(value) or is_freed(value):
            raise TypeError("a tensor that is spread over ranks, sparse, nested, quantized or without data")
        return _TENSOR, (value.detach().to("cpu", copy=True), str(value.device))
    if isinstance(value, _PLAIN_TYPES):
        return _PLAIN, value
    if is_random(value):
        return _random_state(value)
    if _is_array(value):
        return _ARRAY, torch.from_numpy(value.copy())
    if _is_scalar(value):
        return _SCALAR, torch.from_numpy(sys.modules["numpy"].array(value))
    if isinstance(value, Mapping):
        if not all(isinstance(key, _PLAIN_TYPES) for key in value):
            raise TypeError("a dict with keys that are neither numbers nor texts")
        return _DICT, {key: take(each) for key, each in value.items()}
    for kind, name in ((list, _LIST), (tuple, _TUPLE), (deque, _DEQUE)):
        if isinstance(value, kind):
            return name, [take(each) for each in value]
    raise TypeError(f"a {type(value).__name__}")


def put_back(present: Any, held: Held) -> Any:
    """Return the restored value: ``present`` in place, if possible."""
    kind, content = held
    if lacks_generator(present, held):
        return present
    if kind == _TENSOR:
        return _put_tensor(present, *content)
    if kind == _ARRAY:
        return _put_array(present, content.numpy())
    if kind == _SCALAR:
        return content.numpy()[()]
    if kind == _DICT:
        return _put_dict(present, content)
    if kind in (_LIST, _TUPLE, _DEQUE):
        return _put_sequence(present, kind, content)
    if kind == _PLAIN:
        return content
    return _put_random(present, kind, content)


def size(held: Held) -> int:
    """Return the bytes of tensors and arrays."""
    kind, content = held
    if kind == _TENSOR:
        return int(content[0].nbytes)
    if kind == _ARRAY:
        return int(content.nbytes)
    if kind == _DICT:
        return sum(map(size, content.values()))
    return sum(map(size, content)) if kind in (_LIST, _TUPLE, _DEQUE) else 0


def is_same(one: Held, other: Held) -> bool:
    if one[0] != other[0]:
        return False
    mine, theirs = one[1], other[1]
    if one[0] == _TENSOR:
        return same_bits(mine[0], theirs[0])
    if one[0] in (_ARRAY, _SCALAR, _TORCH_RANDOM):
        return same_bits(mine, theirs)
    if one[0] == _DICT:
        return bool(mine.keys() == theirs.keys()) and all(is_same(each, theirs[key]) for key, each in mine.items())
    if one[0] in (_LIST, _TUPLE, _DEQUE):
        return len(mine) == len(theirs) and all(is_same(*pair) for pair in zip(mine, theirs, strict=True))
    is_nan_in_both = mine != mine and theirs != theirs
    return bool(mine == theirs) or is_nan_in_both


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    mine, theirs = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(mine, theirs)


def _put_tensor(present: Any, content: torch.Tensor, device: str) -> torch.Tensor:
    if _takes(present, content):
        # Of elements that share memory, as after `expand`, one is written.
        written = tuple(slice(None if stride else 1) for stride in present.stride())
        if 0 not in present.stride() or same_bits(content[written].expand_as(content), content):
            with torch.no_grad():
                present[written].copy_(content[written])
            kept: torch.Tensor = present
            return kept
    target = present.device if isinstance(present, torch.Tensor) else torch.device(device)
    return content.to(target, copy=True)


def _takes(present: Any, content: torch.Tensor) -> bool:
    if not isinstance(present, torch.Tensor) or not is_ordinary(present):
        return False
    fits = present.shape == content.shape and present.dtype == content.dtype
    return fits and present.is_leaf and not present.is_inference()  # else a graph's or inference mode's tensor


def _put_array(present: Any, content: Any) -> Any:
    if _is_array(present) and present.shape == content.shape and present.dtype == content.dtype:
        if present.flags.writeable:
            present[...] = content
            return present
        if present.tobytes() == content.tobytes():  # such as tokens mapped from a file
            return present
    return content.copy()


def _put_dict(present: Any, content: Mapping[Any, Held]) -> Any:
    if not isinstance(present, MutableMapping):
        return {key: put_back(None, each) for key, each in content.items()}
    values = {key: put_back(present.get(key), each) for key, each in content.items()}
    present.clear()
    present.update(values)
    return present


def _put_sequence(present: Any, kind: str, content: list[Held]) -> Any:
    before = list(present) if isinstance(present, (list, tuple, deque)) else []
    before += [None] * (len(content) - len(before))
    values = [put_back(old, each) for old, each in zip(before, content, strict=False)]
    if kind == _TUPLE:
        make: Callable[[Any], Any] = getattr(type(present), "_make", tuple)
        return make(values)
    wanted = deque if kind == _DEQUE else list
    if not isinstance(present, wanted):
        return wanted(values)
    present.clear()
    present.extend(values)
    return present


def _kind_of_random(value: Any) -> str | None:
    if isinstance(value, torch.Generator):
        return _TORCH_RANDOM
    if isinstance(value, random.Random):
        return _PYTHON_RANDOM
    return _NUMPY_RANDOM if _numpy_state(value) is not None else None


def _random_state(value: Any) -> Held:
    if isinstance(value, torch.Generator):
        return _TORCH_RANDOM, value.get_state()
    if isinstance(value, random.Random):
        return _PYTHON_RANDOM, value.getstate()
    generator = _numpy_state(value)
    assert generator is not None
    return _NUMPY_RANDOM, _without_arrays(generator.read())


def _put_random(present: Any, kind: str, content: Any) -> Any:
    if kind == _TORCH_RANDOM:
        present.set_state(content)
    elif kind == _PYTHON_RANDOM:
        version, internal, gauss = content
        present.setstate((version, tuple(internal), gauss))
    else:
        generator = _numpy_state(present)
        assert generator is not None
        generator.write(_with_arrays(content))
    return present


class _StateAccess(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], None]


def _numpy_state(value: Any) -> _StateAccess | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return _StateAccess(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if isinstance(value, numpy.random.RandomState):
        return _StateAccess(lambda: value.get_state(legacy=False), value.set_state)
    return None


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return False
    return value.dtype.kind in _NUMBER_KINDS and bool(value.dtype.isnative)  # PyTorch reads no other byte order


def _is_scalar(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in _NUMBER_KINDS


def _without_arrays(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _without_arrays(each) for key, each in state.items()}
    return ("array", state.tolist(), str(state.dtype)) if _is_array(state) else state


def _with_arrays(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _with_arrays(each) for key, each in state.items()}
    if isinstance(state, (tuple, list)) and len(state) == 3 and state[0] == "array":
        return sys.modules["numpy"].array(state[1], dtype=state[2])
    return state
