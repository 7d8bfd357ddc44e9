"""Attribute that is computed at its first use.

Unlike `functools.cached_property` before Python 3.12 it takes no lock, which costs more than the short computations of
each alert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class once(Generic[T]):
    """Attribute of an object. Threads that use it first at the same time each compute it."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> once[T]: ...
    @overload
    def __get__(self, owner: object, kind: type) -> T: ...
    def __get__(self, owner: object | None, kind: type) -> T | once[T]:
        if owner is None:
            return self
        value = owner.__dict__[self._name] = self._compute(owner)
        return value
