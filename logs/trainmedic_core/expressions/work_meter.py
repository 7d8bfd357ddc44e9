"""How much an evaluation may work: every step is counted, and at the limit it ends with an error.

A step is about what Python takes for one element of a list or for 64 characters of a text, a tenth of
a microsecond to a microsecond. So the limit bounds time and memory at once, and, unlike a clock, it
gives the same answer on every machine. Who counts: ``sandbox``, before each operation whose cost
depends on its operands.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from typing import Any

import jinja2

MOST_STEPS = 250_000
"""Steps of one evaluation: all templates of a step's parameters, or one condition. Some 50 ms."""
LARGEST_NUMBER_BITS = 2048
"""Of a whole number: some 600 digits."""
_CHARACTERS_PER_STEP = 64
_COMPARISONS_PER_STEP = 1024
_ATOMS = (str, int, float, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset, Mapping, KeysView, ValuesView, ItemsView)


class TooMuchWork(jinja2.TemplateRuntimeError):
    """An evaluation has come to its limit."""


class WorkMeter:
    """The steps that are left to one evaluation."""

    def __init__(self) -> None:
        self._left = MOST_STEPS

    def spend(self, steps: int) -> None:
        """Raises TooMuchWork once the steps are used up, and then every time."""
        self._left -= steps
        if self._left < 0:
            raise TooMuchWork("it takes too much work; use less data, or fewer loops and repetitions")

    def spend_on_text(self, length: int) -> None:
        """Count a text of this many characters that is read or made."""
        self.spend(1 + length // _CHARACTERS_PER_STEP)

    def spend_on_search(self, text: str, part: str) -> None:
        """Count looking for `part` in `text`, for which Python takes, at worst, the product of their lengths."""
        self.spend(1 + len(text) * len(part) // _COMPARISONS_PER_STEP)

    def weigh(self, value: Any) -> None:
        """Count everything in `value`, at any depth, and what is in it twice as twice."""
        self.weigh_outside(value)
        if isinstance(value, _ATOMS):
            return
        heap = [value]
        while heap:
            steps = 0  # of a container whose length is counted already
            for member in _members(heap.pop()):
                kind = type(member)
                if kind is str:
                    steps += 1 + len(member) // _CHARACTERS_PER_STEP
                elif kind is float or kind is bool or member is None:
                    steps += 1
                else:
                    self.weigh_outside(member)
                    if not isinstance(member, _ATOMS):
                        heap.append(member)
            self.spend(steps)

    def weigh_outside(self, value: Any) -> None:
        """Count a text's characters, and a container's members but not what is in them. Raises for too large a
        number."""
        kind = type(value)
        if kind is float or kind is bool or value is None:
            self.spend(1)  # the most frequent ones, before the dearer questions
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
        """Return the values as a list, each of them counted while they come."""
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
    """Return the meter of the evaluation that runs; a new one where none runs."""
    return _CURRENT.get() or WorkMeter()


@contextlib.contextmanager
def metered() -> Iterator[WorkMeter]:
    """Run one evaluation with a meter of its own; what is evaluated within it shares that meter."""
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
