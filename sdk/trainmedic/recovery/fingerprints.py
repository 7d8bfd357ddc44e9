"""Fingerprints of batches: type, shape and an evenly spread sample of each value.

Only the sample is copied at once, without waiting for a device.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from hashlib import blake2b
from typing import Any, List, Mapping, Optional, Union

_WHOLE = 128  # numbers; larger tensors are sampled
_SAMPLED = _WHOLE // 2  # numbers of a sample, about; it sets the stride
_LONGEST_TEXT = 4096  # most characters of a text
_MOST_LEAVES = 128  # of one batch, with names and forms of tensors; about 40 tensors
_DEEPEST = 8  # levels of containers

Fingerprint = Union[int, "Unread", None]  # None if nothing can be sampled
_Leaves = List[Any]  # bytes; immutable numbers and texts; tensors on a device


class Unread:
    """Fingerprint to compute from copied samples."""

    __slots__ = ("_leaves", "is_here")

    def __init__(self, leaves: _Leaves, is_here: bool) -> None:
        self._leaves = leaves
        self.is_here = is_here  # no device is waited for

    def read(self) -> Optional[int]:
        """Return the hash after waiting for the device; None if its memory cannot be read."""
        try:
            content = b"\0".join([leaf if type(leaf) is bytes else _as_bytes(leaf) for leaf in self._leaves])
        except RuntimeError:
            return None
        return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def fingerprint(batch: Any) -> Fingerprint:
    leaves: _Leaves = []
    try:
        content = _walk(batch, leaves, 0)
    # Catch everything: this calls the user's methods and must not end the training.
    except Exception:
        return None
    return Unread(leaves, content < _ON_DEVICE) if content else None


def read(value: Fingerprint) -> Optional[int]:
    """Return the number, after waiting for its device."""
    return value.read() if isinstance(value, Unread) else value


def _as_bytes(leaf: Any) -> bytes:
    if isinstance(leaf, str):
        return leaf.encode(errors="surrogatepass")
    return _bytes_of(leaf.cpu()) if hasattr(leaf, "cpu") else repr(leaf).encode()


@lru_cache(maxsize=256)  # NumPy computes `repr` of types slowly
def _form(dtype: Any, shape: Any) -> bytes:
    return f"{dtype!r}\0{shape!r}".encode()


# The most that a value contains: types only, plain values, arrays, or arrays on a device.
_NOTHING, _PLAIN, _ARRAY, _ON_DEVICE = range(4)


def _walk(value: Any, leaves: _Leaves, depth: int) -> int:
    """Add samples to ``leaves``; return the most complex content."""
    if len(leaves) >= _MOST_LEAVES or depth > _DEEPEST:
        return _NOTHING
    kind = _kind_of(type(value))  # type: ignore[arg-type]  # a type can be hashed
    if kind == _IS_ARRAY:
        return _walk_array(value, leaves, depth)
    if kind == _IS_SEQUENCE:
        # Sample long lists, such as of tokens, like tensors.
        count, content = len(value), _NOTHING
        leaves.append(f"{type(value).__name__}\0{count}")
        for member in value if count <= _WHOLE else value[:: count // _SAMPLED | 1]:
            content = max(content, _walk(member, leaves, depth + 1))
        return content
    if kind == _IS_NUMBER:
        leaves.append(value if type(value) in _NUMBERS else repr(value))
        return _PLAIN if value is not None else _NOTHING
    if kind == _IS_TEXT:
        sample = value[:: len(value) // _LONGEST_TEXT + 1]
        leaves += (len(value), str(sample) if isinstance(sample, str) else bytes(sample))
        return _PLAIN
    leaves.append(type(value).__name__)
    if kind == _IS_MAPPING:
        return _walk_members(value, leaves, depth)
    # In other objects, such as images, plain numbers may be only the size; require arrays.
    content = _walk_members(getattr(value, "__dict__", None) or _slots(value), leaves, depth)
    return content if content >= _ARRAY else _NOTHING


_IS_ARRAY, _IS_SEQUENCE, _IS_NUMBER, _IS_TEXT, _IS_MAPPING, _IS_OBJECT = range(6)
_NUMBERS = (bool, int, float, complex, type(None))


@lru_cache(maxsize=256)
def _kind_of(kind: type) -> int:
    if hasattr(kind, "dtype") and hasattr(kind, "shape"):
        return _IS_ARRAY
    for number, kinds in (
        (_IS_SEQUENCE, (list, tuple)),
        (_IS_NUMBER, _NUMBERS),
        (_IS_TEXT, (str, bytes, bytearray)),
        (_IS_MAPPING, Mapping),
    ):
        if issubclass(kind, kinds):
            return number
    return _IS_OBJECT


def _walk_members(members: Mapping[Any, Any], leaves: _Leaves, depth: int) -> int:
    content = _NOTHING
    for name in list(members)[:_WHOLE]:
        leaves.append(str(name)[:_LONGEST_TEXT])
        content = max(content, _walk(members[name], leaves, depth + 1))
    return content


def _slots(value: Any) -> Mapping[str, Any]:
    names = getattr(type(value), "__slots__", ())
    return {name: getattr(value, name, None) for name in ((names,) if isinstance(names, str) else names)}


def _walk_array(value: Any, leaves: _Leaves, depth: int) -> int:
    try:
        values = value.numpy()
    except AttributeError:  # a NumPy-like array
        values = value
        if values.dtype.hasobject:  # the bytes would be addresses
            return _walk(values.reshape(-1).tolist(), leaves, depth + 1)
    except (TypeError, RuntimeError):  # it needs a gradient, or NumPy does not support its type or device
        return _add_other_tensor(value, leaves)
    size, form = values.size, _form(values.dtype, values.shape)
    # An odd stride reaches all columns of a table whose row length is a power of two.
    if size > _WHOLE:
        every = size // _SAMPLED | 1
        # Flat views of contiguous arrays are faster; of others, `reshape` would copy all.
        values = values.reshape(-1)[::every] if values.flags.c_contiguous else values.flat[::every]
    leaves += (form, values.tobytes())
    return _ARRAY


def _add_other_tensor(value: Any, leaves: _Leaves) -> int:
    tensor = value.detach()
    to_local = getattr(tensor, "to_local", None)
    if to_local is not None:
        tensor = to_local()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    leaves.append(_form(tensor.dtype, tuple(value.shape)))
    kind = value.device.type
    if kind == "meta":
        return _NOTHING
    sample = tensor.reshape(-1) if tensor.is_contiguous() else _thinned(tensor).reshape(-1)
    if len(sample) > _WHOLE:
        sample = sample[:: len(sample) // _SAMPLED | 1]
    if kind == "cpu":
        leaves.append(_bytes_of(sample))
        return _ARRAY
    leaves.append(sample.clone())
    return _ON_DEVICE


def _thinned(values: Any) -> Any:
    per_dimension = max(int(_WHOLE ** (1 / len(values.shape))), 2)
    return values[tuple(slice(None, None, max(length // per_dimension, 1)) for length in values.shape)]


def _bytes_of(sample: Any) -> bytes:
    torch = sys.modules["torch"]
    wholes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    numbers = torch.view_as_real(sample.resolve_conj()) if sample.is_complex() else sample
    return repr(numbers.contiguous().view(wholes[numbers.element_size()]).tolist()).encode()
