"""Record of a run: its events, and the times of its steps.

Each line is written at once, so that killed processes leave theirs, and several may write. ``trainer`` and ``intruder``
write, ``__main__`` reads.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

_EVENTS, _STEPS = "events.jsonl", "steps.txt"


class Execution(NamedTuple):
    """One execution of a step, in seconds since 1970."""

    step: int
    began: float
    ended: float


class Journal:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._events, self._steps = directory / _EVENTS, directory / _STEPS
        self._files: dict[Path, int] = {}

    def tell(self, event: str, **details: Any) -> None:
        self._append(self._events, json.dumps({"event": event, "time": time.time(), **details}))

    def step(self, step: int, began: float, ended: float) -> None:
        self._append(self._steps, f"{step} {began:.4f} {ended:.4f}")

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._lines(self._events)]

    def executions(self) -> list[Execution]:
        split = [line.split() for line in self._lines(self._steps)]
        return [Execution(int(step), float(began), float(ended)) for step, began, ended in split]

    def _lines(self, path: Path) -> list[str]:
        return path.read_text().splitlines() if path.exists() else []

    def _append(self, path: Path, line: str) -> None:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(self._files[path], f"{line}\n".encode())
