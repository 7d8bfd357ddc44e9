"""An alert's labels as they are looked up for a target: without regard to case, blank values left out. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

EXPORTED = "exported_"
"""Begins the name that Prometheus gives a label of the metric where the scrape adds one of the same name."""


class Label(NamedTuple):
    """A label that has a value."""

    name: str
    """As it is written."""
    value: str

    def __str__(self) -> str:
        value = self.value if len(self.value) <= _LONGEST_SHOWN else f"{self.value[:_LONGEST_SHOWN]}…"
        return f'{self.name}="{value}"'

    @property
    def is_exported(self) -> bool:
        """True if it is the metric's own label, which the scrape has renamed."""
        return self.name.lower().startswith(EXPORTED)


_LONGEST_SHOWN = 100


class AlertLabels:
    """The labels of one alert."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._written: dict[str, tuple[str, ...]] = {}
        """How the labels are written, by their names in lower case."""
        self._read: dict[str, Sequence[Label]] = {}
        """Earlier results of `under`."""
        written = self._written
        for name in labels:
            lower = name.lower()
            written[lower] = (*written[lower], name) if lower in written else (name,)

    def under(self, name: str) -> Sequence[Label]:
        """The labels of this name, given in lower case: several where they differ in case alone."""
        written = self._written.get(name)
        if written is None:
            return ()
        labels = self._read.get(name)
        if labels is None:
            candidates = (Label(each, self._labels[each].strip()) for each in written)
            labels = self._read[name] = tuple(label for label in candidates if label.value)
        return labels

    def value(self, name: str) -> str:
        """The value of a label of which there is one; empty where there is none."""
        labels = self.under(name)
        return labels[0].value if labels else ""

    def values(self, name: str) -> Iterator[str]:
        """Each value of the label, exported or not."""
        return (label.value for form in (name, EXPORTED + name) for label in self.under(form))

    def of(self, names: tuple[str, ...]) -> Sequence[Label]:
        """The labels of these names, most trusted first; each name's exported form before the name itself."""
        return [label for form in forms(names) if form in self._written for label in self.under(form)]


@functools.lru_cache
def forms(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the spellings of labels of these names, in lower case."""
    return tuple(form for name in names for form in (EXPORTED + name.lower(), name.lower()))
