"""State outside any ``state_dict``: saved, restored and compared by each rank.

Named by the user (``attach(also=...)``), or found:

- tensor attributes of modules and optimizers, except parameters and buffers
- numbers, and containers of them, changed since `attach`
- non-persistent buffers
- random generators of the data set
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Callable, Generic, Iterable, Iterator, Mapping

import torch
from torch import nn

from trainmedic.errors import ConfigurationError
from trainmedic.torch import carried_values
from trainmedic.torch.state_parts import StateParts

log = logging.getLogger("trainmedic")

_OWN = frozenset(vars(nn.Module())) | {"param_groups", "state", "defaults"}
_WRAPPERS = ("torch.nn.parallel", "torch.distributed", "torch._dynamo", "deepspeed", "accelerate")
_MOST_SEEN = 5000  # objects searched for random generators
_DEEPEST = 5
_MOST_NAMED = 8
_LARGE = 1 << 28  # bytes
_MOST_AT_START = 100  # members of a recorded list or dict without tensors


@dataclass(frozen=True)
class _Named:
    """Value named by the user, with its setter if it cannot change in place."""

    get: Callable[[], Any]
    put: Callable[[Any], None] | None


@dataclass
class CarriedState:
    parts: StateParts | None = None
    named: Mapping[str, _Named] = field(default_factory=dict)
    generators: Mapping[str, Any] = field(default_factory=dict)
    _at_start: Mapping[str, carried_values.Held] = field(default_factory=dict)
    """Attributes without tensors at `attach`, such as None or 0."""
    _first: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Attributes with tensors at `attach`; returns None after their deletion."""
    _told: set[str] = field(default_factory=set)

    def begin(self) -> None:
        """Record attributes without tensors."""
        if self.parts is None:
            return
        owners = _owners(self.parts)
        self._at_start = {
            f"{name}.{each}": start
            for name, owner in owners.items()
            for each, value in vars(owner).items()
            if each not in _OWN and (start := _without_tensors(value)) is not None
        }
        self._first = {name: _reference(getattr(owner, each)) for name, (owner, each) in self._seen()}
        held = self.take()
        if held:
            size = sum(_size(each) for each in held.values())
            names = _listed(held)
            level = logging.WARNING if size > _LARGE else logging.INFO
            log.log(level, "checkpoints also hold carried state, %.1f MiB: %s", size / 2**20, names)

    def take(self) -> dict[str, carried_values.Held]:
        """Return copies of all values that can be copied, by name."""
        taken = {}
        for name, value in self._values():
            try:
                taken[name] = carried_values.take(value)
            except (TypeError, RuntimeError) as error:
                if name not in self._told:
                    self._told.add(name)
                    log.warning("%s is not in checkpoints: %s", name, error)
        return taken

    def put_back(self, held: Mapping[str, carried_values.Held] | None) -> Mapping[str, Any]:
        """Restore `take`'s output; return how many values were compared and agree.

        None, of an earlier release, changes nothing.
        """
        if held is None:
            return {}
        for name, attribute in [*self._seen(), *self._changed_numbers()]:
            if name not in held and not self._is_told(name) and not self._is_first(name, *attribute):
                self._forget(*attribute, name)
        missing = [name for name in held if not self._put(name, held[name])]
        if missing:
            log.warning("the checkpoint holds carried state that is no longer there: %s", _listed(missing))
        present = self.take()
        different = [name for name in held if name in present and not carried_values.is_same(held[name], present[name])]
        compared = len(held) - len(missing)
        outcome: dict[str, Any] = {"compared": compared, "agreed": compared - len(different)}
        if different:
            outcome["different"] = _listed(different)
        return outcome if compared else {}

    def _is_first(self, name: str, owner: Any, attribute: str) -> bool:
        first = self._first.get(name)
        return first is not None and first() is getattr(owner, attribute)

    def _is_told(self, name: str) -> bool:
        return name in self._told

    def _values(self) -> Iterator[tuple[str, Any]]:
        for name, named in self.named.items():
            yield f"also.{name}", named.get()
        for name, generator in self.generators.items():
            yield name, generator
        for name, (owner, attribute) in (*self._seen(), *self._changed_numbers()):
            yield name, getattr(owner, attribute)

    def _changed_numbers(self) -> Iterator[tuple[str, tuple[Any, str]]]:
        if self.parts is None:
            return
        for part, owner in _owners(self.parts).items():
            for attribute, value in list(vars(owner).items()):
                name = f"{part}.{attribute}"
                start = self._at_start.get(name)
                if start is None or attribute in _OWN or not _holds_numbers(value):
                    continue
                present = _without_tensors(value)
                if present is not None and not carried_values.is_same(start, present):
                    yield name, (owner, attribute)

    def _seen(self) -> Iterator[tuple[str, tuple[Any, str]]]:
        if self.parts is None:
            return
        owners = _owners(self.parts)
        state_tensors = _Known(self.parts)
        for part, owner in owners.items():
            for name in sorted(getattr(owner, "_non_persistent_buffers_set", ())):
                if getattr(owner, name, None) is not None:
                    yield f"{part}.{name}", (owner, name)
            for name, value in list(vars(owner).items()):
                if name not in _OWN and state_tensors.is_carried(value):
                    yield f"{part}.{name}", (owner, name)

    def _put(self, name: str, held: carried_values.Held) -> bool:
        kind, _, own = name.partition(".")
        if kind == "also":
            named = self.named.get(own)
            if named is None:
                return False
            value = carried_values.put_back(named.get(), held)
            if named.put is not None:
                named.put(value)
            return True
        if name in self.generators:
            carried_values.put_back(self.generators[name], held)
            return True
        part, _, attribute = name.rpartition(".")
        owner = _owners(self.parts).get(part) if self.parts is not None else None
        if owner is None:
            return False
        present = getattr(owner, attribute, None)
        value = carried_values.put_back(present, held)
        if value is not present:
            setattr(owner, attribute, value)
        return True

    def _forget(self, owner: Any, attribute: str, name: str) -> None:
        present, start = getattr(owner, attribute), self._at_start.get(name)
        if attribute in getattr(owner, "_non_persistent_buffers_set", ()):
            setattr(owner, attribute, None)
        elif start is not None:
            setattr(owner, attribute, carried_values.put_back(present, start))
        elif carried_values.is_in_place(present) and hasattr(present, "clear"):
            present.clear()
        else:
            delattr(owner, attribute)


class _Known:
    def __init__(self, parts: StateParts) -> None:
        modules = list(parts.modules().values())
        held = [each for module in modules for each in (*module.parameters(), *module.buffers())]
        held += [p for each in parts.optimizers().values() for group in each.param_groups for p in group["params"]]
        self._ids = {id(each) for each in held}
        self._storages = {storage for each in held if (storage := _storage(each))}

    def is_carried(self, value: Any) -> bool:
        if carried_values.is_random(value):
            return True
        tensors = list(carried_values.tensors_in(value))
        return bool(tensors) and not any(self._is_known(each) for each in tensors)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        is_there = isinstance(tensor, nn.Parameter) or id(tensor) in self._ids or tensor.is_meta
        # A freed view belongs to weights that a wrapper keeps elsewhere.
        return is_there or _storage(tensor) in self._storages or carried_values.is_freed(tensor)


def named_by_user(also: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, _Named]]:
    """Split ``also`` into objects with ``state_dict`` and carried values. Raises ConfigurationError."""
    parts, named = {}, {}
    for name, value in also.items():
        if value is None or _is_part(value):
            parts[name] = value
            continue
        named[name] = _named(name, value)
        try:
            carried_values.take(named[name].get())
        except TypeError as error:
            raise ConfigurationError(
                f"also: {name}: a {type(value).__name__} has no state_dict and load_state_dict to be saved with, and "
                f"holds {error}"
            ) from error
    return parts, named


def by_value(also: Mapping[str, Any]) -> dict[str, _Named]:
    """Return all of ``also`` as carried values. Raises ConfigurationError."""
    objects, named = named_by_user(also)
    for name, part in StateParts(**objects).by_name.items():
        named[name] = by_state(part)
        try:
            carried_values.take(part.state_dict())
        except TypeError as error:
            raise ConfigurationError(
                f"also: {name}: the state_dict of a {type(part).__name__} holds {error}, which cannot be copied; give "
                "two functions, (get, set), of tensors, numbers and containers"
            ) from error
    return named


def by_state(part: Any) -> _Named:
    return _Named(part.state_dict, part.load_state_dict)


def _named(name: str, value: Any) -> _Named:
    if isinstance(value, tuple) and len(value) == 2 and all(callable(each) for each in value):
        return _Named(value[0], value[1])
    if carried_values.is_in_place(value):
        return _Named(lambda: value, None)
    if hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        return _Named(lambda: vars(value), None)
    raise ConfigurationError(
        f"also: {name}: a {type(value).__name__} has no state_dict and load_state_dict to be saved with, and cannot be "
        "changed in place; give a tensor, list or dict that the loop changes, or two functions, (get, set)"
    )


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:  # list or dict
        return lambda: value


def _is_part(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and all(_is_part(each) for each in value.values())
    if isinstance(value, (list, tuple)):
        return bool(value) and all(_is_part(each) for each in value)
    return isinstance(value, type) or callable(getattr(value, "state_dict", None))


def generators_of(loader: Any) -> dict[str, Any]:
    if getattr(loader, "num_workers", 0):
        return {}  # workers have copies seeded by batch position
    roots = {"data": getattr(loader, "dataset", None), "collate": getattr(loader, "collate_fn", None)}
    if roots["data"] is None and callable(loader):
        roots["data"] = loader
    generators: dict[str, Any] = {}
    visited: set[int] = set()
    for name, root in roots.items():
        _search(f"loader.{name}", root, 0, visited, generators)
    return generators


def _search(name: str, value: Any, depth: int, visited: set[int], generators: dict[str, Any]) -> None:
    if depth > _DEEPEST or id(value) in visited or len(visited) > _MOST_SEEN:
        return
    visited.add(id(value))
    if carried_values.is_random(value):
        generators[name] = value
        return
    for key, member in _members_of(value):
        _search(f"{name}.{key}", member, depth + 1, visited, generators)


def _members_of(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, FunctionType):
        held = dict(zip(value.__code__.co_freevars, (_cell(each) for each in value.__closure__ or ()), strict=False))
        used = {name: value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__}
        return {**used, **held}.items()
    if isinstance(value, Mapping):
        return list(value.items())[:100]
    if isinstance(value, (list, tuple)):
        return list(enumerate(value[:100]))
    own = getattr(value, "__self__", None)
    if own is not None and not isinstance(value, type):
        return [("self", own)]
    skipped = (torch.Tensor, type(torch), type, str, bytes)
    return () if isinstance(value, skipped) else list(getattr(value, "__dict__", {}).items())[:100]


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _owners(parts: StateParts) -> dict[str, Any]:
    owners: dict[str, Any] = {}
    for part, module in parts.modules().items():
        for name, each in module.named_modules():
            if not _is_wrapper(type(each)):
                owners[f"{part}.{name}" if name else part] = each
    return owners


def _is_wrapper(kind: type) -> bool:
    beside = (nn.Module, Generic, object)
    return kind is not nn.Module and all(
        base in beside or base.__module__.startswith(_WRAPPERS) for base in kind.__mro__
    )


def _storage(tensor: torch.Tensor) -> int:
    """Return the storage address; 0 without one."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _without_tensors(value: Any) -> carried_values.Held | None:
    is_plain = value is None or isinstance(value, (bool, int, float))
    is_container = isinstance(value, (list, tuple, dict, deque)) and len(value) <= _MOST_AT_START
    if not is_plain and (not is_container or any(True for _ in carried_values.tensors_in(value))):
        return None
    try:
        return carried_values.take(value)
    except TypeError:
        return None


def _holds_numbers(value: Any) -> bool:
    """Return whether it consists of numbers; booleans and texts are settings."""
    if isinstance(value, (list, tuple, deque)):
        return bool(value) and all(map(_holds_numbers, value))
    if isinstance(value, dict):
        return bool(value) and all(map(_holds_numbers, value.values()))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _size(held: carried_values.Held) -> int:
    kind, content = held
    if kind == "tensor":
        return int(content[0].nbytes)
    if kind == "array":
        return int(content.nbytes)
    if kind == "dict":
        return sum(map(_size, content.values()))
    return sum(map(_size, content)) if kind in ("list", "tuple", "deque") else 0


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MOST_NAMED} more" if len(listed) > _MOST_NAMED else ""
    return ", ".join(listed[:_MOST_NAMED]) + more
