"""Labels of an alert for target lookup: case-insensitive, without blank values."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

EXPORTED = "exported_"  # Prometheus's prefix for a metric's label if the scrape adds one of the same name


class Label(NamedTuple):
    name: str
    value: str

    def __str__(self) -> str:
        value = self.value if len(self.value) <= _LONGEST_SHOWN else f"{self.value[:_LONGEST_SHOWN]}…"
        return f'{self.name}="{value}"'

    @property
    def is_exported(self) -> bool:
        return self.name.lower().startswith(EXPORTED)


_LONGEST_SHOWN = 100
_MOST_KEPT, _LONGEST_KEPT = 100, 255  # names of a cached set, and characters of each


class AlertLabels:
    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        names = tuple(labels)
        is_usual = len(names) <= _MOST_KEPT and max(map(len, names), default=0) <= _LONGEST_KEPT
        self._names = _names_kept(names) if is_usual else _LabelNames(names)
        self._read: dict[str | tuple[str, ...], Sequence[Label]] = {}

    def under(self, name: str) -> Sequence[Label]:
        """Return the labels of a lower-case name, several if they differ only in case."""
        written = self._names.written.get(name)
        if written is None:
            return ()
        labels = self._read.get(name)
        return labels if labels is not None else self._labels_of(name, written)

    def value(self, name: str) -> str:
        """Return the first value under a lower-case name; empty without one."""
        labels = self.under(name)
        return labels[0].value if labels else ""

    def values(self, name: str) -> Iterator[str]:
        """Return the values of the label and of its ``exported_`` form."""
        return (label.value for form in (name, EXPORTED + name) for label in self.under(form))

    def of(self, names: tuple[str, ...]) -> Sequence[Label]:
        """Return the labels of these names, most trusted first."""
        labels = self._read.get(names)
        return labels if labels is not None else self._labels_of(names, self._names.of(names))

    def others(self, names: re.Pattern[str]) -> Iterator[Label]:
        """Yield the labels whose lower-case names the pattern does not match."""
        for name, value in self._labels.items():
            if (text := value.strip()) and names.fullmatch(name.lower()) is None:
                yield Label(name, text)

    def _labels_of(self, key: str | tuple[str, ...], written: tuple[str, ...]) -> Sequence[Label]:
        labels = self._read[key] = [Label(name, value) for name in written if (value := self._labels[name].strip())]
        return labels


class _LabelNames:
    """Cached because all alerts of a rule share them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.written: dict[str, tuple[str, ...]] = {}  # names as written, by lower-case name
        self._found: dict[tuple[str, ...], tuple[str, ...]] = {}
        for name in names:
            lower = name.lower()
            self.written[lower] = (*self.written.get(lower, ()), name)

    def of(self, names: tuple[str, ...]) -> tuple[str, ...]:
        found = self._found.get(names)
        if found is None:
            present = (self.written[form] for form in forms(names) if form in self.written)
            found = self._found[names] = tuple(name for written in present for name in written)
        return found


_names_kept = functools.lru_cache(maxsize=500)(_LabelNames)


@functools.lru_cache
def forms(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(form for name in names for form in (EXPORTED + name.lower(), name.lower()))
