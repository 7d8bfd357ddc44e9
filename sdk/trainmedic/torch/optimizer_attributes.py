"""Attributes of optimizers and DDP communication hooks outside any ``state_dict``.

A checkpoint holds those changed since the start. A rollback resets changes that it lacks.
"""

from __future__ import annotations

import logging
import random
import secrets
from typing import Any, Mapping

import torch
from torch import nn

from trainmedic.torch.carried_values import tensors_in
from trainmedic.torch.optimizer_states import parameters_of, separate_optimizers

log = logging.getLogger("trainmedic")

_MARK = "__kind"  # key of a stored generator's kind
_PARAMETER = "parameter"  # first member of a stored reference to a parameter
HOOK = ".comm_hook."  # part of communication hooks' names
_PLAIN_TYPES = (bool, int, float, str, type(None))
_PYTORCH_ATTRIBUTES = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=1.0))) | {"_opt_called"}
Attributes = dict[str, dict[str, Any]]  # by holder: its changed values, and states of its inner optimizers


class OptimizerAttributes:
    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._parts = parts
        self._process_id = secrets.token_hex(4)
        self.not_restored: frozenset[str] = frozenset()  # holders that the last `restore` omitted
        self._at_start = {name: _without_tensors(holder.values()) for name, holder in self._holders().items()}

    @property
    def is_empty(self) -> bool:
        return not self.capture()

    def capture(self) -> Attributes:
        held: Attributes = {}
        for name, holder in self._holders().items():
            values = self._changed(name, holder)
            inner = {key: inner.state_dict() for key, inner in holder.uncovered().items()}
            if values or inner:
                held[name] = {"values": values, "inner": inner}
                if HOOK in name:
                    held[name]["process"] = self._process_id
        return held

    def restore(self, held: Attributes) -> None:
        """Restore `capture`'s output, and initial values for other changes.

        A hook's state fits only its process's bucket layout.
        """
        self.not_restored = frozenset(
            name for name, each in held.items() if each.get("process", self._process_id) != self._process_id
        )
        for name in self.not_restored:
            log.warning("%s starts afresh: a new process may have a different DDP bucket layout", name)
        for name, holder in self._holders().items():
            if name in self.not_restored:
                continue
            values = dict(held.get(name, {}).get("values", {}))
            at_start = self._at_start.get(name, {})
            for key in self._changed(name, holder):
                if key in at_start and key not in values:
                    values[key] = at_start[key]
            holder.put(values)
            for key, state in held.get(name, {}).get("inner", {}).items():
                holder.inner[key].load_state_dict(state)

    def _changed(self, name: str, holder: _Holder) -> dict[str, Any]:
        at_start = self._at_start.get(name, {})
        values = holder.values()
        # The start's values hold no tensors, whose comparison would give tensors.
        return {
            key: value
            for key, value in values.items()
            if key not in at_start or _holds_tensors(value) or at_start[key] != value
        }

    def mismatch(self, held: Attributes) -> str:
        """Return why `held` cannot be restored, or ""."""
        holders = self._holders()
        for name in held:
            if name not in holders:
                return f"{name}, whose attributes are kept, is not there"
            lacking = held[name]["inner"].keys() - holders[name].inner.keys()
            if lacking:
                return f"{name} holds no optimizer {min(lacking)}"
        return ""

    def _holders(self) -> dict[str, _Holder]:
        holders: dict[str, _Holder] = {}
        for name, part in self._parts.items():
            if isinstance(part, torch.optim.Optimizer):
                holders[name] = _Holder(part, parameters_of(part))
            elif isinstance(part, nn.Module):
                for number, (_, state) in enumerate(getattr(part, "_comm_hooks", ())):
                    holders[f"{name}{HOOK}{number}"] = _Holder(state, list(part.parameters()))
        return holders


class _Holder:
    """Attributes of an optimizer or hook state, with numbers for parameters."""

    def __init__(self, holder: Any, parameters: list[torch.Tensor]) -> None:
        self._holder = holder
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._parameters = parameters
        is_optimizer = isinstance(holder, torch.optim.Optimizer)
        self._ignored = _PYTORCH_ATTRIBUTES if is_optimizer else frozenset()
        self.inner = separate_optimizers(holder) if is_optimizer else {}

    def values(self) -> dict[str, Any]:
        values = {}
        for name in self._names():
            try:
                values[name] = self._plain(getattr(self._holder, name))
            except (_NotPlain, AttributeError, RecursionError):  # the last of a container that holds itself
                continue
        return values

    def put(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self._holder, name, self._put(getattr(self._holder, name, None), value))

    def uncovered(self) -> dict[str, torch.optim.Optimizer]:
        """Return inner optimizers that the wrapper's state lacks."""
        if not self.inner:
            return {}
        covered = {tensor.data_ptr() for tensor in tensors_in(self._holder.state_dict())}
        return {
            name: inner
            for name, inner in self.inner.items()
            if not inner.state or any(tensor.data_ptr() not in covered for tensor in tensors_in(dict(inner.state)))
        }

    def _names(self) -> list[str]:
        slots = [name for kind in type(self._holder).__mro__ for name in getattr(kind, "__slots__", ())]
        names = [*getattr(self._holder, "__dict__", {}), *slots]
        return [name for name in names if name not in self._ignored and not name.startswith("__")]

    def _plain(self, value: Any) -> Any:
        """Convert to safely loadable types. Raises _NotPlain."""
        if type(value) in _PLAIN_TYPES:
            return value
        if isinstance(value, torch.Tensor):
            if id(value) in self._numbers or isinstance(value, nn.Parameter) or value.layout != torch.strided:
                raise _NotPlain
            return value.detach()
        if isinstance(value, torch.Generator):
            return {_MARK: "generator", "state": value.get_state()}
        if isinstance(value, random.Random):
            version, numbers, gauss = value.getstate()
            return {_MARK: "random", "state": [version, list(numbers), gauss]}
        if type(value).__name__ == "RandomState" and hasattr(value, "get_state"):  # NumPy's
            kind, numbers, *rest = value.get_state()
            return {_MARK: "numpy", "state": [kind, numbers.tolist(), *rest]}
        if isinstance(value, Mapping):
            return {self._plain_key(key): self._plain(member) for key, member in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._plain(member) for member in value)
        raise _NotPlain

    def _plain_key(self, key: Any) -> Any:
        if id(key) in self._numbers:
            return (_PARAMETER, self._numbers[id(key)])
        if type(key) not in (int, str, bool):
            raise _NotPlain
        return key

    def _put(self, present: Any, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if isinstance(present, torch.Tensor) and (present.shape, present.dtype) == (value.shape, value.dtype):
                with torch.no_grad():
                    present.copy_(value)
                return present
            return value.clone()
        if isinstance(value, dict) and value.get(_MARK) is not None:
            _set_generator(present, value)
            return present
        if isinstance(value, dict):
            before = present if isinstance(present, dict) else {}
            members = {}
            for stored_key, member in value.items():
                key = self._parameters[stored_key[1]] if isinstance(stored_key, tuple) else stored_key
                members[key] = self._put(before.get(key), member)
            if not isinstance(present, dict):
                return members
            present.clear()
            present.update(members)
            return present
        if isinstance(value, (list, tuple)):
            has_same_length = isinstance(present, (list, tuple)) and len(present) == len(value)
            old = present if has_same_length else [None] * len(value)
            return type(value)(map(self._put, old, value))
        return value


class _NotPlain(Exception):
    """The value's type cannot be stored."""


def _set_generator(present: Any, value: Mapping[str, Any]) -> None:
    state = value["state"]
    if value[_MARK] == "generator":
        present.set_state(state)
    elif value[_MARK] == "random":
        present.setstate((state[0], tuple(state[1]), state[2]))
    else:
        present.set_state(tuple(state))


def _without_tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not _holds_tensors(value)}


def _holds_tensors(value: Any) -> bool:
    return any(True for _ in tensors_in(value))
