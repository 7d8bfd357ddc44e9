"""An alert's labels as they are looked up for a target: without regard to case, blank values left out. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

EXPORTED = "exported_"
"""Begins the name that Prometheus gives a label of the metric where the scrape adds one of the same name."""


class Given(NamedTuple):
    """A label that has a value."""

    label: str
    """As it is written."""
    value: str

    def __str__(self) -> str:
        value = self.value if len(self.value) <= _LONGEST_SHOWN else f"{self.value[:_LONGEST_SHOWN]}…"
        return f'{self.label}="{value}"'

    @property
    def is_exported(self) -> bool:
        """Whether it is the metric's own label, which the scrape has renamed."""
        return self.label.lower().startswith(EXPORTED)


_LONGEST_SHOWN = 100


class AlertLabels:
    """The labels of one alert."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._given: dict[str, list[Given]] = {}
        for label, value in labels.items():
            stripped = value.strip()
            if stripped:
                self._given.setdefault(label.lower(), []).append(Given(label, stripped))

    def under(self, name: str) -> Sequence[Given]:
        """The labels of this name, given in lower case: several where they differ in case alone."""
        return self._given.get(name, ())

    def value(self, name: str) -> str:
        """The value of a label of which there is one; empty where there is none."""
        given = self._given.get(name)
        return given[0].value if given else ""

    def values(self, name: str) -> Iterator[str]:
        """Each value of the label, exported or not."""
        return (given.value for form in (name, EXPORTED + name) for given in self._given.get(form, ()))

    def of(self, names: Iterable[str]) -> Iterator[Given]:
        """The labels of these names, most trusted first; each name's exported form before the name itself."""
        for form in forms(tuple(names)):
            yield from self._given.get(form, ())


@functools.lru_cache
def forms(names: tuple[str, ...]) -> tuple[str, ...]:
    """What labels of these names are called, in lower case."""
    return tuple(form for name in names for form in (EXPORTED + name.lower(), name.lower()))
