from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice

from msgspec import Struct
from msgspec.structs import force_setattr

DocumentPath = tuple[str | int, ...]
"""Keys and indexes from a document's root."""


def entry_of(path: DocumentPath) -> DocumentPath:
    """Return a path up to its first index, or its first key if it has none."""
    end = next((place for place, part in enumerate(path) if isinstance(part, int)), 0)
    return path[: end + 1]


# Characters. A message may quote a key, which can be as long as its file.
_LONGEST_MESSAGE = 1_000


class FileProblem(Struct, frozen=True):
    """``line`` and ``column`` count from 1; None for the whole file."""

    file: str
    line: int | None
    column: int | None
    message: str

    def __post_init__(self) -> None:
        if len(self.message) > _LONGEST_MESSAGE:
            force_setattr(self, "message", self.message[: _LONGEST_MESSAGE - 1] + "…")

    def __str__(self) -> str:
        if self.line is None:
            return f"{self.file}: {self.message}"
        return f"{self.file}:{self.line}:{self.column}: {self.message}"

    def __lt__(self, other: FileProblem) -> bool:
        return self._place() < other._place()

    def _place(self) -> tuple[str, int, int, str]:
        return (self.file, self.line or 0, self.column or 0, self.message)


# Comparing one takes about 10 µs.
_CHOICES = 200
_LONGEST_CHOICE = 80


def did_you_mean(wrong: str, right: Iterable[str], likeness: float = 0.6) -> str:
    """Return ``; did you mean 'x'?`` for the most similar name, or "" below `likeness` (0 to 1)."""
    choices = {name.lower(): str(name) for name in islice(right, _CHOICES) if len(name) <= _LONGEST_CHOICE}
    near = difflib.get_close_matches(wrong.lower()[:_LONGEST_CHOICE], choices, n=1, cutoff=likeness)
    return f"; did you mean {choices[near[0]]!r}?" if near else ""


def shown(value: object, limit: int = 60) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()  # as YAML and JSON write them
    # Cut before quoting, which takes time proportional to the length.
    return cut(repr(value[:limit] if isinstance(value, str) else value), limit)


def cut(text: str, limit: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def path_text(path: DocumentPath) -> str:
    """Return a path as ``steps[0].with.percent``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text
