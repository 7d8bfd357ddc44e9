"""Field-by-field validation of the policy, which collects all errors.

Pydantic would add 8 MB, a fifth, to the agent's memory (``docs/decisions.md``).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeVar

from msgspec import Struct

from trainmedic_core import duration

T = TypeVar("T")
Choice = TypeVar("Choice", bound=StrEnum)
FieldPath = tuple[str | int, ...]


class FieldFault(Struct, frozen=True):
    """An invalid field. ``path`` has keys and positions from the top: ("cleaning", "rules", "tmp", "do")."""

    path: FieldPath
    message: str

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path))}: {self.message}" if self.path else self.message


class MappingReader:
    def __init__(
        self, path: FieldPath, raw: object, keys: tuple[str, ...], faults: list[FieldFault] | None = None
    ) -> None:
        """Keys other than `keys` are faults."""
        self.path = path
        self.faults: list[FieldFault] = [] if faults is None else faults  # a nested reader adds to its parent's
        self._is_usable = isinstance(raw, Mapping)
        self._raw: Mapping[Any, Any] = raw if isinstance(raw, Mapping) else {}
        if not self._is_usable:
            self.fault((), f"must be a mapping (name: value), not {shown(raw)}")
        for key in self._raw:
            if key not in keys:
                near = difflib.get_close_matches(str(key), keys, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(keys)}"
                self.fault((str(key),), f"is not known here; {hint}")

    def fault(self, path: FieldPath, message: str) -> None:
        self.faults.append(FieldFault((*self.path, *path), message))

    def required(self, key: str, parse: Callable[[Any], T], otherwise: T) -> T:
        """Return the parsed value, or `otherwise` after a fault."""
        if key not in self._raw and self._is_usable:
            self.fault((), f"{key} is missing")
        return self.optional(key, parse, otherwise)

    def optional(self, key: str, parse: Callable[[Any], T], otherwise: T) -> T:
        if key not in self._raw:
            return otherwise
        try:
            return parse(self._raw[key])
        except ValueError as error:
            self.fault((key,), str(error))
            return otherwise

    def listed(self, key: str) -> Sequence[Any]:
        raw = self._raw.get(key)
        return raw if isinstance(raw, list | tuple) else [raw] if raw is not None else []

    def each(self, key: str, parse: Callable[[Any], T], *, required: bool = False) -> tuple[T, ...]:
        raw, values = self._raw.get(key), self.listed(key)
        if required and not values and self._is_usable:
            self.fault((key,) if key in self._raw else (), f"{key} is missing" if raw is None else "must not be empty")
        parsed = []
        for index, value in enumerate(values):
            try:
                parsed.append(parse(value))
            except ValueError as error:
                self.fault((key, index) if isinstance(raw, list | tuple) else (key,), str(error))
        return tuple(parsed)


def shown(raw: object) -> str:
    return "nothing" if raw is None else repr(raw)[:80]


def mapping(raw: object) -> Mapping[Any, Any]:
    if not isinstance(raw, Mapping):
        raise ValueError(f"must be a mapping (name: value), not {shown(raw)}")
    return raw


def text(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError(f"must be text, not {shown(raw)}; put it in quotes")
    return raw


def age(raw: object) -> timedelta:
    if not isinstance(raw, str):
        raise ValueError(f"{raw!r} is not a duration; write it with its unit: 30m, 12h, 7d")
    return duration.check_back(duration.parse(raw))


def whole(least: int, most: int) -> Callable[[object], int]:
    def parse(raw: object) -> int:
        if not isinstance(raw, int) or isinstance(raw, bool) or not least <= raw <= most:
            raise ValueError(f"must be a whole number from {least} to {most}, not {shown(raw)}")
        return raw

    return parse


def percent(raw: object) -> float:
    if isinstance(raw, int | float) and not isinstance(raw, bool) and 0 < raw < 100:
        return float(raw)
    raise ValueError(f"must be a percentage above 0 and below 100, as a number, not {shown(raw)}")


def one_of(kinds: type[Choice]) -> Callable[[object], Choice]:
    def parse(raw: object) -> Choice:
        try:
            return kinds(text(raw))
        except ValueError:
            raise ValueError(f"must be {' or '.join(kinds)}, not {shown(raw)}") from None

    return parse
