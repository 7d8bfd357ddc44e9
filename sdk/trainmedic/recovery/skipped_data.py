"""Skipped iterations or batches, recorded for restarts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainmedic.recovery import checkpoints
from trainmedic.recovery.json_files import read_or_warn

FILE = ".trainmedic-skipped.json"

Ranges = list[tuple[int, int]]  # half-open ranges of numbers


def contains(ranges: Ranges, number: int) -> bool:
    return any(start <= number < stop for start, stop in ranges)


def read(directory: Path) -> Ranges:
    warning = "%s cannot be read; skipped data will come again: %s"
    return read_or_warn(directory / FILE, _ranges_in, [], warning)


def write(directory: Path, ranges: Any) -> None:
    """Replace the file. Raises OSError."""
    checkpoints.write_durably(directory / FILE, json.dumps([list(each) for each in ranges]).encode())


def _ranges_in(pairs: Any) -> Ranges:
    return [(int(start), int(stop)) for start, stop in pairs]


def forget(directory: Path) -> None:
    (directory / FILE).unlink(missing_ok=True)
