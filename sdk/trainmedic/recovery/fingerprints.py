"""Fingerprints of batches, by which is seen whether the batches of a replay are those from before.

A fingerprint is 64 bits of a batch as it was drawn: of every tensor, array, number and text in it the type, the shape,
and a sample of the content that is spread over all of it. It takes some microseconds and waits for no device: what is
on one is sampled there, and read when fingerprints are compared.

An integration calls `fingerprint` with each batch before the loop has it, for steps may change their batch in place,
and `read` when it compares. Not here: keeping and comparing them (``batch_log``).
"""

from __future__ import annotations

import sys
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Iterable, List, Mapping, Optional, Union

_WHOLE = 128
"""Up to so many numbers of a tensor all are looked at; of a larger one, from half as many up to so many."""
_SAMPLED = _WHOLE // 2
_LONGEST_TEXT = 4096  # characters; of a longer one, so many
_MOST_LEAVES = 128  # values of one batch: what a batch is made of shows in the first
_DEEPEST = 8

Fingerprint = Union[int, "Unread", None]
"""None where nothing of a batch can be looked at."""
_Leaves = List[Any]  # bytes, and tensors on a device


class Unread:
    """A fingerprint whose samples are on a device still."""

    __slots__ = ("_leaves",)

    def __init__(self, leaves: _Leaves) -> None:
        self._leaves = leaves

    def read(self) -> Optional[int]:
        """The fingerprint; it waits for the device. None where the device does not give the samples any more."""
        try:
            return _hashed(leaf if isinstance(leaf, bytes) else _bytes_of(leaf.cpu()) for leaf in self._leaves)
        except RuntimeError:
            return None


def fingerprint(batch: Any) -> Fingerprint:
    """The fingerprint of a batch, whatever it is."""
    leaves: _Leaves = []
    try:
        has_content = _walk(batch, leaves, 0)
    # Every error is caught, because looking at a batch calls methods of the user's, and must not end the training.
    except Exception:
        return None
    if has_content == _NOTHING:
        return None
    return _hashed(leaves) if all(type(leaf) is bytes for leaf in leaves) else Unread(leaves)


def read(value: Fingerprint) -> Optional[int]:
    """A fingerprint as a number; it waits for the device that holds the samples, if any does."""
    return value.read() if isinstance(value, Unread) else value


def _hashed(leaves: Iterable[Any]) -> int:
    return int.from_bytes(blake2b(b"\0".join(leaves), digest_size=8).digest(), "little")


_NOTHING, _PLAIN, _ARRAY = range(3)
"""What of a value could be looked at: nothing but types, numbers and texts, or arrays."""


def _walk(value: Any, leaves: _Leaves, depth: int) -> int:
    """Add to `leaves` what `value` consists of, and say what of it could be looked at."""
    if len(leaves) >= _MOST_LEAVES or depth > _DEEPEST:
        return _NOTHING
    if getattr(value, "dtype", None) is not None and hasattr(value, "shape"):
        return _walk_array(value, leaves)
    if isinstance(value, (str, bytes, bytearray)):
        sample = value[:: len(value) // _LONGEST_TEXT + 1]
        leaves.append(b"%d" % len(value))
        leaves.append(sample.encode(errors="surrogatepass") if isinstance(sample, str) else bytes(sample))
        return _PLAIN
    if value is None or isinstance(value, (bool, int, float, complex)):
        leaves.append(repr(value).encode())
        return _PLAIN if value is not None else _NOTHING
    leaves.append(type(value).__name__.encode())
    if isinstance(value, (list, tuple)):
        leaves.append(b"%d" % len(value))
        # Of a long list, such as one of tokens, a sample as of a tensor.
        sample_of = value if len(value) <= _WHOLE else value[:: len(value) // _SAMPLED | 1]
        return max([_walk(member, leaves, depth + 1) for member in sample_of], default=_NOTHING)
    if isinstance(value, Mapping):
        return _walk_members(value, leaves, depth)
    # Of an object of another kind, such as an image, numbers are perhaps its size, and only arrays its content.
    has_content = _walk_members(getattr(value, "__dict__", None) or _slots(value), leaves, depth)
    return _ARRAY if has_content == _ARRAY else _NOTHING


def _walk_members(members: Mapping[Any, Any], leaves: _Leaves, depth: int) -> int:
    has_content = _NOTHING
    for name in list(members)[:_WHOLE]:
        leaves.append(str(name)[:_LONGEST_TEXT].encode(errors="surrogatepass"))
        has_content = max(has_content, _walk(members[name], leaves, depth + 1))
    return has_content


def _slots(value: Any) -> Mapping[str, Any]:
    names = getattr(type(value), "__slots__", ())
    return {name: getattr(value, name, None) for name in ((names,) if isinstance(names, str) else names)}


def _walk_array(value: Any, leaves: _Leaves) -> int:
    """Add type, shape and sample of a tensor or an array.

    The short way is for most batches. Each call that it makes is one that a step has emptied the caches of.
    """
    if getattr(value, "detach", None) is None:  # NumPy's, or of its like
        return _add_sample(value, leaves)
    try:
        return _add_sample(value.numpy(), leaves)
    except (TypeError, RuntimeError):  # it needs a gradient, or is of a type or on a device that NumPy does not know
        return _add_other_tensor(value, leaves)


def _add_sample(values: Any, leaves: _Leaves) -> int:
    """Add what is to be known of an array."""
    # The numbers of most lie in a row, in one order or the other.
    flat = values.ravel("K") if values.flags.forc else _thinned(values).ravel()
    # An odd stride meets all columns of a table whose rows are a power of two long.
    sample = flat if flat.size <= _WHOLE else flat[:: flat.size // _SAMPLED | 1]
    leaves.append(_layout(values.dtype, values.shape, values.strides if flat.size > 1 else ()))
    leaves.append(sample.tobytes())
    return _ARRAY


@lru_cache(maxsize=256)
def _layout(kind: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    return f"{kind.str}{shape}{strides}".encode()


def _add_other_tensor(value: Any, leaves: _Leaves) -> int:
    """Add what is to be known of a tensor that NumPy does not take as it is."""
    tensor = value.detach()
    to_local = getattr(tensor, "to_local", None)
    if to_local is not None:
        tensor = to_local()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    leaves.append(f"{tensor.dtype}{tuple(value.shape)}".encode())
    kind = value.device.type
    if kind == "meta":
        return _NOTHING
    sample = tensor.reshape(-1) if tensor.is_contiguous() else _thinned(tensor).reshape(-1)
    if len(sample) > _WHOLE:
        sample = sample[:: len(sample) // _SAMPLED | 1]
    leaves.append(_bytes_of(sample) if kind == "cpu" else sample.clone())
    return _ARRAY


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
