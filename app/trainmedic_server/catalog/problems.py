"""What is wrong with a file, and where: the value that every check here returns.

Not here: finding anything wrong.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

DocumentPath = tuple[str | int, ...]
"""The way from a document's top to a value: keys and indexes."""


@dataclass(frozen=True, slots=True)
class FileProblem:
    """One mistake. ``line`` and ``column`` count from 1; None where the file as a whole is meant."""

    file: str
    line: int | None
    column: int | None
    message: str

    def __str__(self) -> str:
        if self.line is None:
            return f"{self.file}: {self.message}"
        return f"{self.file}:{self.line}:{self.column}: {self.message}"

    def __lt__(self, other: FileProblem) -> bool:
        return self._place() < other._place()

    def _place(self) -> tuple[str, int, int, str]:
        return (self.file, self.line or 0, self.column or 0, self.message)


def did_you_mean(wrong: str, right: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the nearest right name, or nothing where none is near."""
    choices = {name.lower(): str(name) for name in right}
    near = difflib.get_close_matches(wrong.lower()[:80], choices, n=1, cutoff=0.6)
    return f"; did you mean {choices[near[0]]!r}?" if near else ""


def shown(value: object, limit: int = 60) -> str:
    """Return a value as a message shows it: on one line, cut."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def path_text(path: DocumentPath) -> str:
    """Return a path as people write it: ``steps[0].with.percent``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
