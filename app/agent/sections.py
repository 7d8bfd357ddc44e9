"""Reading a mapping of a YAML file key by key, every mistake noted with its file, line and column.

This is how the agent reads its policy: without pydantic, which would be a fifth of the agent's memory. A
value that is missing or wrong is noted in ``problems`` and answered with a placeholder, so that one reading
finds every mistake; whoever reads a file uses nothing of it while there are problems.

Callers: ``policy``, and the parts of the agent that have a section of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

from app.catalog.problems import Path, Problem, did_you_mean, shown, where
from app.catalog.yaml_text import Document
from app.domain import duration

T = TypeVar("T")

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kMGT]?B|[KMGT]iB)?")
_UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,126}[A-Za-z0-9])?")


class Section:
    """One mapping. Every key that is asked for is a key that may be there; `close` notes the others."""

    def __init__(self, document: Document, path: Path, problems: list[Problem]) -> None:
        self._document = document
        self._path = path
        self._asked: dict[str, None] = {}
        self.problems = problems
        value = _at(document.value, path)
        self._value: dict[str, Any] = value if isinstance(value, dict) else {}
        if not isinstance(value, dict):
            self._note("must be a mapping (name: value)")

    def __contains__(self, key: str) -> bool:
        """Whether the key is written, with a value."""
        self._asked[key] = None
        return self._value.get(key) is not None

    def text(self, key: str, default: str | None = None) -> str:
        return self._one(key, "", default, lambda value: isinstance(value, str) and value != "", "must be text")

    def choice(self, key: str, choices: Sequence[str], default: str | None = None) -> str:
        """One of a few words."""
        value = self.text(key, default)
        if self._is_good(key) and value not in choices:
            self.note(key, f"{shown(value)} is not one of {', '.join(choices)}{did_you_mean(value, choices)}")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        return self._one(key, False, default, lambda value: isinstance(value, bool), "must be true or false")

    def whole(self, key: str, least: int, most: int, default: int | None = None) -> int:
        said = f"must be a whole number from {least} to {most}"
        return self._one(key, least, default, lambda value: _is_whole(value) and least <= value <= most, said)

    def number(self, key: str, least: float, most: float, default: float | None = None) -> float:
        said = f"must be a number from {least:g} to {most:g}"
        return self._one(key, least, default, lambda value: _is_number(value) and least <= value <= most, said)

    def duration(self, key: str, default: timedelta | None = None) -> timedelta:
        """A Prometheus duration, longer than nothing."""
        return self._parsed(key, timedelta(), default, _duration)

    def size(self, key: str, default: int | None = None) -> int:
        """Bytes: a whole number, or text with a unit, ``200GB`` or ``512 MiB``."""
        return self._parsed(key, 0, default, size)

    def texts(self, key: str, default: Sequence[str] | None = None) -> tuple[str, ...]:
        """A list of texts, none of them empty; not empty itself unless it has a default."""
        found: Sequence[Any] = self._one(
            key, (), default, lambda value: isinstance(value, (list, tuple)), "must be a list"
        )
        if self._is_good(key) and not found and default is None:
            self.note(key, "must not be empty")
        for index, item in enumerate(found):
            if not isinstance(item, str) or not item:
                self._note("must be text", key, index)
        return tuple(item for item in found if isinstance(item, str) and item)

    def section(self, key: str) -> Section:
        """A mapping within this one; an empty one where it is not written."""
        if key not in self:
            return Section(Document("", {}, "", {}, {}), (), self.problems)
        return Section(self._document, (*self._path, key), self.problems)

    def named(self, key: str) -> Iterator[tuple[str, Section]]:
        """Mappings by a name of the author's choice: letters, digits, and ``-``, ``_``, ``.`` between them."""
        if key not in self:
            return
        entries = self._value[key]
        if not isinstance(entries, dict):
            self.note(key, "must be a mapping (name: value)")
            return
        for name in entries:
            if _NAME.fullmatch(name):
                yield name, Section(self._document, (*self._path, key, name), self.problems)
            else:
                said = f"{shown(name)} is no name: letters, digits, and '-', '_', '.' between them; at most 128"
                self._note(said, key, name, at_key=True)

    def note(self, key: str, message: str) -> None:
        """There is something wrong with the value of `key`."""
        self._note(message, key)

    def close(self) -> None:
        """Note every key that nobody has asked for."""
        for key in self._value:
            if key not in self._asked:
                self._note(f"unknown key {key!r}{did_you_mean(key, self._asked)}", key, at_key=True)

    def _one(self, key: str, placeholder: T, default: T | None, is_right: Callable[[Any], bool], said: str) -> T:
        def check(value: Any) -> T:
            if not is_right(value):
                raise ValueError(f"{said}, not {shown(value)}")
            return cast(T, value)

        return self._parsed(key, placeholder, default, check)

    def _parsed(self, key: str, placeholder: T, default: T | None, parse: Callable[[Any], T]) -> T:
        if key not in self:
            if default is not None:
                return default
            self._note(f"{key!r} is missing")
            return placeholder
        try:
            return parse(self._value[key])
        except ValueError as error:
            self.note(key, str(error))
            return placeholder

    def _is_good(self, key: str) -> bool:
        """Whether the key is written and nothing was found wrong with it yet."""
        told = f"{where((*self._path, key))}: "
        return key in self and not any(problem.message.startswith(told) for problem in self.problems)

    def _note(self, message: str, *more: str | int, at_key: bool = False) -> None:
        path = (*self._path, *more)
        told = message if at_key or not path else f"{where(path)}: {message}"
        self.problems.append(self._document.problem(path, told, at_key=at_key))


def size(value: Any) -> int:
    """Bytes that a value writes. Raises ValueError with an example."""
    if _is_whole(value) and value > 0:
        return int(value)
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    read = math.floor(float(match[1]) * _UNITS[match[2] or "B"]) if match and len(value) < 32 else 0
    if read < 1:
        raise ValueError(f"{shown(value)} is no size; write bytes, or a number with its unit: 200GB, 512MiB")
    return read


def _duration(value: Any) -> timedelta:
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not a duration; write it with its unit: 90s, 10m, 7d")
    read = duration.parse(value)
    if read <= timedelta():
        raise ValueError("must be longer than 0s")
    return read


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _at(value: Any, path: Path) -> Any:
    for part in path:
        value = value[part]
    return value
