"""State that a program's object holds across a restart of its loop, such as counters and averages.

A restart reuses objects, so their attributes are restored.
"""

from __future__ import annotations

import dis
import logging
import types
from collections import deque
from dataclasses import dataclass
from typing import Any, Collection, Iterator, Mapping

import torch
from torch import nn

from trainmedic.trainer.held_values import NotPlain, is_one_number, packed, same, unpacked

log = logging.getLogger("trainmedic")

_SETTINGS = (bool, str, bytes)  # types whose values training does not change
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_CONTAINERS = (list, tuple, dict, set, deque, torch.Tensor)


@dataclass(frozen=True)
class PutBack:
    restored: tuple[str, ...] = ()
    reset: tuple[str, ...] = ()  # to their initial state

    def followed_by(self, later: PutBack) -> PutBack:
        reset = {*self.reset, *later.reset} - {*later.restored}
        return PutBack(tuple(sorted({*self.restored, *later.restored})), tuple(sorted(reset)))

    def within(self, part: str) -> PutBack:
        if not part:
            return self
        restored, reset = ([f"{part}.{name}" for name in names] for names in (self.restored, self.reset))
        return PutBack(tuple(restored), tuple(reset))

    def to_json(self) -> dict[str, list[str]]:
        return {"restored": list(self.restored), "reset": list(self.reset)}


class HeldState:
    """Attributes of ``holder``, except ``excluded``, which the framework restores.

    Modules include non-persistent buffers.
    """

    def __init__(self, holder: Any, excluded: Collection[str], buffers_only: bool = False) -> None:
        self._holder = holder
        self._excluded = frozenset(excluded) | (_MODULE_ATTRIBUTES if isinstance(holder, nn.Module) else frozenset())
        self._buffers_only = buffers_only
        self._at_start = self._copies()

    def record(self) -> dict[str, Any]:
        return {
            name: form
            for name, form in self._copies().items()
            if name not in self._at_start or not same(form, self._at_start[name])
        }

    def put_back(
        self, recorded: Mapping[str, Any] | None, keeps_batches: bool = True, only: Collection[str] | None = None
    ) -> PutBack:
        """Restore attributes from ``recorded``, or else to their initial state.

        Without ``keeps_batches`` only single numbers come from the record. With ``only``, other attributes stay.
        """
        known = dict(recorded or {})
        restored: list[str] = []
        reset: list[str] = []
        present = self._copies()
        names = {*present, *known, *self._at_start} if only is None else {*only}
        for name in sorted(names - self._excluded):
            is_recorded = name in known and (keeps_batches or is_one_number(known[name]))
            target = known if is_recorded else self._at_start
            if name in target and name in present and same(present[name], target[name]):
                continue
            # An attribute that cannot be copied, such as a module, stays.
            if name not in present and (name not in target or self._is_object(name)):
                continue
            is_restored = is_recorded and self._set(name, known)
            if not is_restored:
                self._set(name, self._at_start)
            (restored if is_restored else reset).append(name)
        return PutBack(tuple(restored), tuple(reset))

    def _is_object(self, name: str) -> bool:
        return not isinstance(self._members().get(name), (type(None), *_CONTAINERS))

    def _members(self) -> dict[str, Any]:
        members = {} if self._buffers_only else dict(vars(self._holder))
        if isinstance(self._holder, nn.Module):
            members.update({name: self._holder._buffers.get(name) for name in self._holder._non_persistent_buffers_set})
        return members

    def _set(self, name: str, target: Mapping[str, Any]) -> bool:
        """Set or delete an attribute; return False if its class no longer exists."""
        is_buffer = isinstance(self._holder, nn.Module) and name in self._holder._buffers
        members = self._holder._buffers if is_buffer else vars(self._holder)
        if name not in target:
            members.pop(name, None)
            return True
        try:
            members[name] = unpacked(target[name], members.get(name))
        except NotPlain as error:
            log.warning("cannot restore the trainer's state %s; resetting it: no class %s", name, error)
            return False
        return True

    def _copies(self) -> dict[str, Any]:
        copies = {}
        for name, value in self._members().items():
            if name in self._excluded or isinstance(value, _SETTINGS) or callable(value):
                continue
            try:
                copies[name] = packed(value)
            except NotPlain:
                continue
        return copies


def assigned_names(kind: type, packages: Collection[str]) -> frozenset[str]:
    """Return the attributes assigned by ``kind``'s base classes in these packages."""
    own = [each for each in kind.__mro__ if each.__module__.partition(".")[0] in packages]
    stored = (each for owner in own for function in _functions(owner) for each in dis.get_instructions(function))
    return frozenset(str(each.argval) for each in stored if each.opname == "STORE_ATTR")


def _functions(owner: type) -> Iterator[types.FunctionType]:
    for member in vars(owner).values():
        function = member.fset if isinstance(member, property) else member
        while isinstance(function, types.FunctionType):
            yield function
            function = getattr(function, "__wrapped__", None)  # of a decorator
