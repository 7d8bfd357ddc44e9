"""Limit on the work of one evaluation, in steps of about one list element or 64 characters (0.1 to 1 µs).

Unlike a clock, steps give the same result on every machine.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from typing import Any

import jinja2

MOST_STEPS = 250_000
"""Steps of one evaluation, about 50 ms."""
LARGEST_NUMBER_BITS = 2048
"""About 600 digits."""
_CHARACTERS_PER_STEP = 64
_COMPARISONS_PER_STEP = 1024
_ATOMS = (str, int, float, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset, Mapping, KeysView, ValuesView, ItemsView)


class TooMuchWork(jinja2.TemplateRuntimeError):
    """An evaluation exceeded its limit."""


class WorkMeter:
    def __init__(self) -> None:
        self._left = MOST_STEPS

    def spend(self, steps: int) -> None:
        """Raises TooMuchWork."""
        self._left -= steps
        if self._left < 0:
            raise TooMuchWork("it takes too much work; use less data, or fewer loops and repetitions")

    def spend_on_text(self, length: int) -> None:
        self.spend(1 + length // _CHARACTERS_PER_STEP)

    def spend_on_search(self, text: str, part: str) -> None:
        """Count a search: at worst the product of lengths."""
        self.spend(1 + len(text) * len(part) // _COMPARISONS_PER_STEP)

    def weigh(self, value: Any) -> None:
        """Count everything in `value`; shared parts count each time."""
        self.weigh_outside(value)
        if isinstance(value, _ATOMS):
            return
        unread = [value]
        while unread:
            steps = 0  # for the members of a container that is already counted
            for member in _members(unread.pop()):
                kind = type(member)
                if kind is str:
                    steps += 1 + len(member) // _CHARACTERS_PER_STEP
                elif kind is float or kind is bool or member is None:
                    steps += 1
                else:
                    self.weigh_outside(member)
                    if not isinstance(member, _ATOMS):
                        unread.append(member)
            self.spend(steps)

    def weigh_outside(self, value: Any) -> None:
        """Count characters, or members without contents. Raises for too large a number."""
        kind = type(value)
        if kind is float or kind is bool or value is None:
            self.spend(1)  # fast path for the most frequent types
        elif kind is tuple or kind is dict:
            self.spend(1 + len(value))
        elif isinstance(value, str):
            self.spend_on_text(len(value))
        elif isinstance(value, int):
            if value.bit_length() > LARGEST_NUMBER_BITS:
                raise jinja2.TemplateRuntimeError("a number is too large")
            self.spend(1)
        elif isinstance(value, _CONTAINERS):
            self.spend(1 + len(value))
        else:
            self.spend(1)

    def listed(self, values: Iterable[Any], steps: int = 1) -> list[Any]:
        made: list[Any] = []
        for value in values:
            self.spend(steps)
            made.append(value)
        return made


def _members(container: Any) -> Iterable[Any]:
    kind = type(container)
    if kind is list or kind is tuple:
        return container  # type: ignore[no-any-return]
    if kind is dict or isinstance(container, Mapping):
        return itertools.chain(container.keys(), container.values())
    return container if isinstance(container, _CONTAINERS) else ()


_CURRENT: ContextVar[WorkMeter | None] = ContextVar("meter of the evaluation that runs", default=None)


def current() -> WorkMeter:
    # Outside of an evaluation each call has its own limit.
    return _CURRENT.get() or WorkMeter()


@contextlib.contextmanager
def metered() -> Iterator[WorkMeter]:
    """Run one evaluation with its own meter, shared by nested ones."""
    running = _CURRENT.get()
    if running is not None:
        yield running
        return
    meter = WorkMeter()
    token = _CURRENT.set(meter)
    try:
        yield meter
    finally:
        _CURRENT.reset(token)
