"""Attribute computed at first use.

Before Python 3.12, `functools.cached_property` takes a slow lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class once(Generic[T]):
    """Concurrent first uses may each compute it."""  # the owner needs a `__dict__`

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
