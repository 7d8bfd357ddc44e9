"""State outside any ``state_dict``: saved, restored and compared by each rank.

Named by the user (``attach(also=...)``), or found:

- tensor attributes of modules, except parameters and persistent buffers
- numbers in their attributes, also in containers, that changed since `attach`
- random generators of the data set
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Callable, Generic, Iterable, Iterator, Mapping, NamedTuple

import torch
from torch import nn

from trainmedic.errors import ConfigurationError
from trainmedic.torch import carried_values
from trainmedic.torch.state_parts import StateParts

log = logging.getLogger("trainmedic")

_OWN_PARTS = ("model", "optimizer", "scheduler", "scaler", "ema")  # of `attach`

_PYTORCH_ATTRIBUTES = frozenset(vars(nn.Module()))
# Modules of classes that only wrap the model: their attributes are not the training's.
_WRAPPERS = ("torch.nn.parallel", "torch.distributed", "torch._dynamo", "deepspeed", "accelerate")
# Limits of the search for random generators.
_MOST_SEARCHED = 5000  # objects
_MOST_MEMBERS = 100  # of one object
_DEEPEST = 5
_MOST_NAMED = 8  # values in a log message
_LARGE = 1 << 28  # bytes of carried state that are logged as a warning
_MOST_AT_START = 100  # members; longer lists and dicts without tensors are neither saved nor reset


@dataclass(frozen=True)
class CarriedValue:
    """Value named by the user, with its setter if it cannot change in place."""

    get: Callable[[], Any]
    put: Callable[[Any], None] | None


class _Attribute(NamedTuple):
    owner: nn.Module
    name: str

    def get(self) -> Any:
        return getattr(self.owner, self.name)

    def set(self, value: Any) -> None:
        setattr(self.owner, self.name, value)


@dataclass
class CarriedState:
    parts: StateParts | None = None  # None: only named values and generators
    named: Mapping[str, CarriedValue] = field(default_factory=dict)
    generators: Mapping[str, Any] = field(default_factory=dict)  # of `generators_of`
    # Attributes without tensors at `attach`, such as None or 0.
    _values_at_start: Mapping[str, carried_values.Held] = field(default_factory=dict)
    # References to attributes with tensors at `attach`.
    _objects_at_start: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)  # names of values that cannot be copied

    def record_start(self) -> None:
        if self.parts is None:
            return
        owners = _owners(self.parts)
        self._values_at_start = {
            f"{name}.{each}": start
            for name, owner in owners.items()
            for each, value in _own_attributes(owner)
            if (start := _value_at_start(value)) is not None
        }
        self._objects_at_start = {name: _reference(attribute.get()) for name, attribute in self._tensor_attributes()}
        held = self.take()
        if held:
            size = sum(map(carried_values.size, held.values()))
            level = logging.WARNING if size > _LARGE else logging.INFO
            log.log(level, "checkpoints also hold carried state, %.1f MiB: %s", size / 2**20, _listed(held))

    def take(self) -> dict[str, carried_values.Held]:
        """Return copies of all values that can be copied, by name."""
        taken = {}
        for name, value in self._values():
            try:
                taken[name] = carried_values.take(value)
            except (TypeError, RuntimeError) as error:
                if name not in self._warned:
                    self._warned.add(name)
                    log.warning("%s is not in checkpoints: %s", name, error)
        return taken

    def put_back(self, held: Mapping[str, carried_values.Held] | None) -> Mapping[str, Any]:
        """Restore `take`'s output; return the answer's ``verified.carried``.

        None, of an earlier release, changes nothing.
        """
        if held is None:
            return {}
        for name, attribute in [*self._tensor_attributes(), *self._changed_numbers()]:
            # Training has made or changed it since the checkpoint, unless the object is that of `attach`: then the
            # checkpoint is of another version of the script, and the attribute stays.
            if name not in held and name not in self._warned and not self._is_object_at_start(name, attribute):
                self._reset(attribute, name)
        missing = [name for name in held if not self._put(name, held[name])]
        if missing:
            log.warning("the checkpoint holds carried state that is no longer there: %s", _listed(missing))
        present = self.take()
        # `take` leaves out what it cannot read, and numbers that equal those at `attach`.
        shared = [name for name in held if name in present and name not in missing]
        different = [name for name in shared if not carried_values.is_same(held[name], present[name])]
        compared = len(shared)
        outcome: dict[str, Any] = {"compared": compared, "agreed": compared - len(different)}
        if different:
            outcome["different"] = _listed(different)
        return outcome if compared else {}

    def _is_object_at_start(self, name: str, attribute: _Attribute) -> bool:
        reference = self._objects_at_start.get(name)
        return reference is not None and reference() is attribute.get()

    def _values(self) -> Iterator[tuple[str, Any]]:
        for name, named in self.named.items():
            yield f"also.{name}", named.get()
        for name, generator in self.generators.items():
            yield name, generator
        for name, attribute in (*self._tensor_attributes(), *self._changed_numbers()):
            yield name, attribute.get()

    @property
    def may_hold_position(self) -> bool:
        """True if restored state, except of modules and optimizers, may rewind a stream."""
        parts = self.parts.by_name if self.parts is not None else {}
        named = [part for name, part in parts.items() if name.partition(".")[0] not in _OWN_PARTS]
        is_other = any(not isinstance(part, (nn.Module, torch.optim.Optimizer)) for part in named)
        return bool(self.named or self.generators) or is_other

    def _changed_numbers(self) -> Iterator[tuple[str, _Attribute]]:
        if self.parts is None:
            return
        for part, owner in _owners(self.parts).items():
            for attribute, value in _own_attributes(owner):
                name = f"{part}.{attribute}"
                start = self._values_at_start.get(name)
                present = _value_at_start(value) if start is not None else None
                if start is None or present is None or not _holds_numbers(value):
                    continue
                if not carried_values.is_same(start, present):
                    yield name, _Attribute(owner, attribute)

    def _tensor_attributes(self) -> Iterator[tuple[str, _Attribute]]:
        """Yield attributes that no ``state_dict`` saves."""
        if self.parts is None:
            return
        owners = _owners(self.parts)
        saved = _SavedTensors(self.parts)
        for part, owner in owners.items():
            for name in sorted(getattr(owner, "_non_persistent_buffers_set", ())):
                if getattr(owner, name, None) is not None:
                    yield f"{part}.{name}", _Attribute(owner, name)
            for name, value in _own_attributes(owner):
                if saved.lacks(value):
                    yield f"{part}.{name}", _Attribute(owner, name)

    def _put(self, name: str, held: carried_values.Held) -> bool:
        """Restore one value; return False if its holder or generator is gone."""
        kind, _, own = name.partition(".")
        if kind == "also":
            named = self.named.get(own)
            present = named.get() if named is not None else None
            if named is None or carried_values.lacks_generator(present, held):
                return False
            value = carried_values.put_back(present, held)
            if named.put is not None:
                named.put(value)
            return True
        if name in self.generators:
            carried_values.put_back(self.generators[name], held)
            return not carried_values.lacks_generator(self.generators[name], held)
        part, _, attribute = name.rpartition(".")
        owner = _owners(self.parts).get(part) if self.parts is not None else None
        if owner is None:
            return False
        present = getattr(owner, attribute, None)
        if carried_values.lacks_generator(present, held):
            return False
        value = carried_values.put_back(present, held)
        if value is not present:
            setattr(owner, attribute, value)
        return True

    def _reset(self, attribute: _Attribute, name: str) -> None:
        """Undo a change of an attribute that the checkpoint lacks."""
        present, start = attribute.get(), self._values_at_start.get(name)
        if attribute.name in getattr(attribute.owner, "_non_persistent_buffers_set", ()):
            attribute.set(None)
        elif start is not None:
            attribute.set(carried_values.put_back(present, start))
        elif carried_values.is_in_place(present) and hasattr(present, "clear"):
            present.clear()
        else:
            delattr(attribute.owner, attribute.name)


# Tensors that a ``state_dict`` saves, by object and by memory.
class _SavedTensors:
    def __init__(self, parts: StateParts) -> None:
        modules = list(parts.modules().values())
        held = [each for module in modules for each in (*module.parameters(), *module.buffers())]
        held += [p for each in parts.optimizers().values() for group in each.param_groups for p in group["params"]]
        self._ids = {id(each) for each in held}
        self._storages = {storage for each in held if (storage := _storage_address(each))}

    def lacks(self, value: Any) -> bool:
        """Return whether a value is a random generator, or has tensors and none of these."""
        if carried_values.is_random(value):
            return True
        tensors = list(carried_values.tensors_in(value))
        return bool(tensors) and not any(self._has(each) for each in tensors)

    def _has(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, nn.Parameter) or id(tensor) in self._ids or tensor.is_meta:
            return True
        # A freed view belongs to weights that a wrapper keeps elsewhere.
        return _storage_address(tensor) in self._storages or carried_values.is_freed(tensor)


def split_also(also: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, CarriedValue]]:
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


def all_as_values(also: Mapping[str, Any]) -> dict[str, CarriedValue]:
    """Return all of ``also`` as carried values. Raises ConfigurationError."""
    objects, named = split_also(also)
    for name, part in StateParts(**objects).by_name.items():
        named[name] = state_of_object(part)
        try:
            carried_values.take(part.state_dict())
        except TypeError as error:
            raise ConfigurationError(
                f"also: {name}: the state_dict of a {type(part).__name__} holds {error}, which cannot be copied; give "
                "two functions, (get, set), of tensors, numbers and containers"
            ) from error
    return named


def state_of_object(part: Any) -> CarriedValue:
    return CarriedValue(part.state_dict, part.load_state_dict)


def _named(name: str, value: Any) -> CarriedValue:
    if isinstance(value, tuple) and len(value) == 2 and all(callable(each) for each in value):
        return CarriedValue(value[0], value[1])
    if carried_values.is_in_place(value):
        return CarriedValue(lambda: value, None)
    if hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        return CarriedValue(lambda: vars(value), None)
    raise ConfigurationError(
        f"also: {name}: a {type(value).__name__} has no state_dict and load_state_dict to be saved with, and cannot be "
        "changed in place; give a tensor, list or dict that the loop changes, or two functions, (get, set)"
    )


def _own_attributes(owner: nn.Module) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(owner).items() if name not in _PYTORCH_ATTRIBUTES]


def _reference(value: Any) -> Callable[[], Any]:
    """Return a function that returns the object, if possible by a weak reference."""
    try:
        return weakref.ref(value)
    except TypeError:  # list or dict
        return lambda: value


def _is_part(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and all(_is_part(each) for each in value.values())
    if isinstance(value, (list, tuple)):
        return bool(value) and all(_is_part(each) for each in value)
    # `StateParts` refuses a class.
    return isinstance(value, type) or callable(getattr(value, "state_dict", None))


def generators_of(loader: Any) -> dict[str, Any]:
    """Return the generators that the data set or collate function refers to."""
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
    if depth > _DEEPEST or id(value) in visited or len(visited) > _MOST_SEARCHED:
        return
    visited.add(id(value))
    if carried_values.is_random(value):
        generators[name] = value
        return
    for key, member in _members_of(value):
        _search(f"{name}.{key}", member, depth + 1, visited, generators)


def _members_of(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, FunctionType):
        cells = [_cell_content(each) for each in value.__closure__ or ()]
        held = dict(zip(value.__code__.co_freevars, cells, strict=False))
        used = {name: value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__}
        return {**used, **held}.items()
    if isinstance(value, Mapping):
        return list(value.items())[:_MOST_MEMBERS]
    if isinstance(value, (list, tuple)):
        return list(enumerate(value[:_MOST_MEMBERS]))
    own = getattr(value, "__self__", None)
    if own is not None and not isinstance(value, type):  # bound method
        return [("self", own)]
    if isinstance(value, (torch.Tensor, type(torch), type, str, bytes)):
        return ()
    return list(getattr(value, "__dict__", {}).items())[:_MOST_MEMBERS]


def _cell_content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _owners(parts: StateParts) -> dict[str, nn.Module]:
    """Return modules by name, without wrappers such as DDP."""
    owners: dict[str, nn.Module] = {}
    for part, module in parts.modules().items():
        for name, each in module.named_modules():
            if not _is_wrapper(type(each)):
                owners[f"{part}.{name}" if name else part] = each
    return owners


def _is_wrapper(kind: type) -> bool:
    common_bases = (nn.Module, Generic, object)
    return kind is not nn.Module and all(
        base in common_bases or base.__module__.startswith(_WRAPPERS) for base in kind.__mro__
    )


def _storage_address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # without a storage
        return 0


def _value_at_start(value: Any) -> carried_values.Held | None:
    """Return a copy of a number, None or small container; None for others."""
    is_plain = value is None or isinstance(value, (bool, int, float))
    is_container = isinstance(value, (list, tuple, dict, deque)) and len(value) <= _MOST_AT_START
    if not is_plain and (not is_container or any(True for _ in carried_values.tensors_in(value))):
        return None
    try:
        return carried_values.take(value)
    except (TypeError, RecursionError):  # also of a container that holds itself
        return None


def _holds_numbers(value: Any) -> bool:
    """Return whether it consists of numbers; booleans and texts are settings."""
    if isinstance(value, (list, tuple, deque)):
        return bool(value) and all(map(_holds_numbers, value))
    if isinstance(value, dict):
        return bool(value) and all(map(_holds_numbers, value.values()))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    named = ", ".join(listed[:_MOST_NAMED])
    return f"{named} and {len(listed) - _MOST_NAMED} more" if len(listed) > _MOST_NAMED else named
