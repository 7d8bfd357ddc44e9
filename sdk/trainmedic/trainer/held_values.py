"""Copies of plain values: numbers, tensors, arrays, and their containers and small objects."""

from __future__ import annotations

import collections
import sys
from typing import Any, Iterable, Mapping

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from trainmedic.torch.carried_values import is_freed, is_ordinary, same_bits

LARGEST = 256 << 20  # bytes of one copy
_DEEPEST = 12  # levels of containers
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
# Default factories that a copied ``defaultdict`` may have.
_FACTORIES = {each.__name__: each for each in (list, dict, set, int, float)}
_NO_DATA = (nn.Module, nn.Parameter, torch.optim.Optimizer, Dataset, DataLoader, Sampler, type)
# Packages whose objects are no data.
_LIBRARIES = frozenset(
    [
        "accelerate",
        "builtins",
        "datasets",
        "lightning",
        "logging",
        "multiprocessing",
        "peft",
        "pytorch_lightning",
        "queue",
        "threading",
        "tokenizers",
        "torch",
        "torchdata",
        "torchmetrics",
        "trainmedic",
        "transformers",
        "trl",
        "vllm",
    ]
)


class NotPlain(Exception):
    """The value is not plain, or too large."""


def packed(value: Any) -> Any:
    """Return a copy for `unpacked`: a scalar, or a tuple of kind and content. Raises NotPlain."""
    return _Packer().pack(value, 0)


def unpacked(form: Any, present: Any = None) -> Any:
    """Return the copied value, in ``present`` if its type is the same.

    Raises NotPlain if a class no longer exists.
    """
    if not isinstance(form, tuple):
        return form
    kind, content = form[0], form[1]
    if kind == "tensor":
        # A checkpoint may have been loaded to host memory.
        return content.clone() if str(content.device) == form[2] else content.to(form[2])
    if kind == "array":
        return content.numpy().copy()
    if kind in ("list", "tuple"):
        members = [unpacked(each) for each in content]
        return _refilled_list(present, members) if kind == "list" else tuple(members)
    if kind == "set":
        return {unpacked(each) for each in content}
    if kind == "deque":
        return _refilled_deque(present, [unpacked(each) for each in content], form[2])
    if kind == "dict":
        return _refilled_dict(present, content, form[2])
    return _refilled_object(present, content, form[2:])


def same(one: Any, other: Any) -> bool:
    """Return whether two results of `packed` are equal; NaN equals itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape or one.device != other.device:
            return False
        return torch.equal(one, other) or same_bits(one, other)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


def is_one_number(form: Any) -> bool:
    is_tensor = isinstance(form, tuple) and form[0] == "tensor"
    return isinstance(form, (int, float)) or (is_tensor and form[1].numel() == 1)


class _Packer:
    def __init__(self) -> None:
        self._bytes = 0
        self._surrounding: set[int] = set()  # ids of containers, to detect cycles

    def pack(self, value: Any, depth: int) -> Any:
        if isinstance(value, _SCALARS):
            self._count(len(value) if isinstance(value, (str, bytes)) else 8)
            if type(value) in _SCALARS:
                return value
            if isinstance(value, float):  # such as NumPy's
                return float(value)
            raise NotPlain(type(value).__name__)  # such as an enumeration
        if isinstance(value, _NO_DATA) or depth > _DEEPEST or id(value) in self._surrounding:
            raise NotPlain(type(value).__name__)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        self._surrounding.add(id(value))
        try:
            return self._container(value, depth + 1)
        finally:
            self._surrounding.discard(id(value))

    def _container(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in (list, tuple, set):
            return (kind.__name__, [self.pack(each, depth) for each in value])
        if kind is collections.deque:
            return ("deque", [self.pack(each, depth) for each in value], value.maxlen)
        if kind in (dict, collections.OrderedDict, collections.Counter):
            return ("dict", self._members(value.items(), depth), kind.__name__)
        if kind is collections.defaultdict:
            factory = getattr(value.default_factory, "__name__", "")
            return ("dict", self._members(value.items(), depth), f"defaultdict:{factory}")
        if kind.__module__ == "numpy" and hasattr(value, "dtype"):
            return self._array(value)
        if _is_known(kind) and (kind.__module__.partition(".")[0] not in _LIBRARIES or _is_batch(kind)):
            return ("object", self._members(vars(value).items(), depth), kind.__module__, kind.__qualname__)
        raise NotPlain(kind.__name__)

    def _members(self, items: Iterable[tuple[Any, Any]], depth: int) -> list[Any]:
        return [[self.pack(key, depth), self.pack(value, depth)] for key, value in items]

    def _tensor(self, value: torch.Tensor) -> Any:
        if type(value) is not torch.Tensor or value.is_meta or not is_ordinary(value) or is_freed(value):
            raise NotPlain(type(value).__name__)
        self._count(value.numel() * value.element_size())
        return ("tensor", value.detach().clone(), str(value.device))

    def _array(self, value: Any) -> Any:
        if not hasattr(value, "nbytes") or value.dtype.hasobject or not value.shape:
            raise NotPlain(type(value).__name__)
        self._count(value.nbytes)
        try:
            return ("array", torch.from_numpy(value.copy()))
        except (TypeError, ValueError) as error:  # another type, or byte order
            raise NotPlain(str(value.dtype)) from error

    def _count(self, size: int) -> None:
        self._bytes += size
        if self._bytes > LARGEST:
            raise NotPlain(f"more than {LARGEST >> 20} MiB")


def _is_known(kind: type) -> bool:
    """Return whether objects consist of their attributes, and the class is found by name."""
    has_slots = any(vars(each).get("__slots__") for each in kind.__mro__)
    return kind.__dictoffset__ != 0 and not has_slots and _class(kind.__module__, kind.__qualname__) is kind


def _is_batch(kind: type) -> bool:
    return issubclass(kind, collections.UserDict)  # such as BatchEncoding


def _class(module: str, name: str) -> Any:
    member: Any = sys.modules.get(module)
    for part in name.split("."):
        member = getattr(member, part, None)
    return member


def _refilled_list(present: Any, members: list[Any]) -> list[Any]:
    if type(present) is not list:
        return members
    present[:] = members
    return present


def _refilled_deque(present: Any, members: list[Any], longest: int | None) -> Any:
    if type(present) is not collections.deque or present.maxlen != longest:
        return collections.deque(members, longest)
    present.clear()
    present.extend(members)
    return present


def _refilled_dict(present: Any, members: Iterable[Any], kind: str) -> Any:
    name, _, factory = kind.partition(":")
    filled = present if type(present).__name__ == name else _empty(name, factory)
    before = dict(filled)
    filled.clear()
    for packed_key, form in members:
        key = unpacked(packed_key)
        if key not in before and isinstance(filled, collections.defaultdict) and filled.default_factory:
            before[key] = filled.default_factory()
        filled[key] = unpacked(form, before.get(key))
    return filled


def _empty(name: str, factory: str) -> Any:
    if name == "defaultdict":
        if factory not in _FACTORIES:
            raise NotPlain(f"a defaultdict of {factory}")
        return collections.defaultdict(_FACTORIES[factory])
    return getattr(collections, name)() if name != "dict" else {}


def _refilled_object(present: Any, members: Iterable[Any], name: tuple[str, ...]) -> Any:
    kind = _class(*name)
    if not isinstance(kind, type):
        raise NotPlain(".".join(name))
    filled = present if type(present) is kind else object.__new__(kind)
    before: Mapping[str, Any] = dict(vars(filled))
    vars(filled).clear()
    for attribute, form in members:
        vars(filled)[attribute] = unpacked(form, before.get(attribute))
    return filled
