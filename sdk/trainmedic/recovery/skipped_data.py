"""Skipped iterations or batches, recorded for restarts."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from trainmedic.recovery import checkpoints

log = logging.getLogger("trainmedic")

FILE = ".trainmedic-skipped.json"

Ranges = list[tuple[int, int]]  # half-open ranges of numbers


def contains(ranges: Ranges, number: int) -> bool:
    return any(start <= number < stop for start, stop in ranges)


def read(directory: Path) -> Ranges:
    file = directory / FILE
    try:
        return [(int(start), int(stop)) for start, stop in json.loads(file.read_bytes())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, OverflowError) as error:
        log.warning("%s cannot be read; skipped data will come again: %s", file, error)
        return []


def write(directory: Path, ranges: Any) -> None:
    """Replace the file. Raises OSError."""
    checkpoints.write_durably(directory / FILE, json.dumps([list(each) for each in ranges]).encode())


def forget(directory: Path) -> None:
    (directory / FILE).unlink(missing_ok=True)
