"""Fingerprints of batches, by which is seen whether the batches of a replay are those from before.

A fingerprint is 64 bits of a batch as it was drawn: of every tensor, array, number and text in it the type, the shape,
and a sample of the content that is spread over all of it. Only the sample is taken at once, for a step may change its
batch in place; that takes some microseconds and waits for no device. The rest comes when the fingerprint is read, for
many batches after one another: a step has emptied the processor's caches, so each call in it costs several times as
much as it does then.

An integration calls `fingerprint` with each batch before the loop has it, and `read` when it compares. Not here:
keeping and comparing them (``batch_log``).
"""

from __future__ import annotations

import sys
from functools import lru_cache
from hashlib import blake2b
from typing import Any, List, Mapping, Optional, Union

_WHOLE = 128
"""Up to so many numbers of a tensor all are looked at; of a larger one, from half as many up to so many."""
_SAMPLED = _WHOLE // 2
_LONGEST_TEXT = 4096  # characters; of a longer one, so many
_MOST_LEAVES = 128  # values of one batch: what a batch is made of shows in the first
_DEEPEST = 8

Fingerprint = Union[int, "Unread", None]
"""None where nothing of a batch can be looked at."""
_Leaves = List[Any]  # bytes; numbers, texts, types and shapes, which cannot change; and tensors on a device


class Unread:
    """A fingerprint that is not worked out yet, of samples that are its own."""

    __slots__ = ("_leaves", "is_here")

    def __init__(self, leaves: _Leaves, is_here: bool) -> None:
        self._leaves = leaves
        self.is_here = is_here
        """Whether all samples are in main memory, so that reading waits for nothing."""

    def read(self) -> Optional[int]:
        """The fingerprint; it waits for the device. None where the device does not give the samples any more."""
        try:
            told = b"\0".join([leaf if type(leaf) is bytes else _told(leaf) for leaf in self._leaves])
        except RuntimeError:
            return None
        return int.from_bytes(blake2b(told, digest_size=8).digest(), "little")


def fingerprint(batch: Any) -> Fingerprint:
    """The fingerprint of a batch, whatever it is."""
    leaves: _Leaves = []
    try:
        content = _walk(batch, leaves, 0)
    # Every error is caught, because looking at a batch calls methods of the user's, and must not end the training.
    except Exception:
        return None
    return Unread(leaves, content < _AWAY) if content else None


def read(value: Fingerprint) -> Optional[int]:
    """A fingerprint as a number; it waits for the device that holds the samples, if any does."""
    return value.read() if isinstance(value, Unread) else value


def _told(leaf: Any) -> bytes:
    if hasattr(leaf, "cpu"):
        return _bytes_of(leaf.cpu())
    if hasattr(leaf, "itemsize"):
        return _name_of(leaf)
    return leaf.encode(errors="surrogatepass") if isinstance(leaf, str) else repr(leaf).encode()


@lru_cache(maxsize=64)
def _name_of(dtype: Any) -> bytes:
    """Its `repr`, which NumPy takes longer to make than all else of a fingerprint takes."""
    return repr(dtype).encode()


_NOTHING, _PLAIN, _ARRAY, _AWAY = range(4)
"""What of a value could be looked at: nothing but types, numbers and texts, arrays, or what is on a device."""


def _walk(value: Any, leaves: _Leaves, depth: int) -> int:
    """Add to `leaves` what `value` consists of, and say what of it could be looked at."""
    if len(leaves) >= _MOST_LEAVES or depth > _DEEPEST:
        return _NOTHING
    kind = _kind_of(type(value))  # type: ignore[arg-type]  # a type can be hashed
    if kind == _IS_ARRAY:
        return _walk_array(value, leaves, depth)
    if kind == _IS_SEQUENCE:
        # Of a long list, such as one of tokens, a sample as of a tensor.
        count, content = len(value), _NOTHING
        leaves += (type(value).__name__, count)
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
    # Of an object of another kind, such as an image, numbers are perhaps its size, and only arrays its content.
    content = _walk_members(getattr(value, "__dict__", None) or _slots(value), leaves, depth)
    return content if content >= _ARRAY else _NOTHING


_IS_ARRAY, _IS_SEQUENCE, _IS_NUMBER, _IS_TEXT, _IS_MAPPING, _IS_OBJECT = range(6)
_NUMBERS = (bool, int, float, complex, type(None))


@lru_cache(maxsize=256)
def _kind_of(kind: type) -> int:
    """How values of that type are looked at: asked of the type, for a batch is of the same types as the one before."""
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
    """Add type, shape and sample of a tensor or an array. The short way is for most batches."""
    try:
        values = value.numpy()
    except AttributeError:  # NumPy's own, or of its like
        values = value
        if values.dtype.hasobject:  # its bytes say where the objects lie
            return _walk(values.reshape(-1).tolist(), leaves, depth + 1)
    except (TypeError, RuntimeError):  # it needs a gradient, or is of a type or on a device that NumPy does not know
        return _add_other_tensor(value, leaves)
    size = values.size
    # An odd stride meets all columns of a table whose rows are a power of two long.
    sample = values if size <= _WHOLE else values.flat[:: size // _SAMPLED | 1]
    leaves += (values.dtype, values.shape, sample.tobytes())
    return _ARRAY


def _add_other_tensor(value: Any, leaves: _Leaves) -> int:
    """Add what is to be known of a tensor that NumPy does not take as it is."""
    tensor = value.detach()
    to_local = getattr(tensor, "to_local", None)
    if to_local is not None:
        tensor = to_local()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    leaves += (tensor.dtype, tuple(value.shape))
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
    return _AWAY


def _thinned(values: Any) -> Any:
    """Some of the entries along each dimension, so that what lies scattered need not be copied whole."""
    per_dimension = max(int(_WHOLE ** (1 / len(values.shape))), 2)
    return values[tuple(slice(None, None, max(length // per_dimension, 1)) for length in values.shape)]


def _bytes_of(sample: Any) -> bytes:
    """The numbers of a sample in main memory."""
    torch = sys.modules["torch"]
    wholes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    numbers = torch.view_as_real(sample.resolve_conj()) if sample.is_complex() else sample
    return repr(numbers.contiguous().view(wholes[numbers.element_size()]).tolist()).encode()
