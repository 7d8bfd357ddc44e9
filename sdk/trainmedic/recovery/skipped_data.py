"""What rollbacks have left out of the data, remembered beside the checkpoints, so that it stays left out over restarts.

For frameworks whose place in the data is a number that counts up: iterations, or batches of a rank. Not here: what is
left out then (``megatron.training``, ``torchtitan.training``).
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from trainmedic.recovery import checkpoints

log = logging.getLogger("trainmedic")

FILE = ".trainmedic-skipped.json"

Ranges = list[tuple[int, int]]
"""Numbers that are left out: from the first of each pair on, up to but without the second."""


def contains(ranges: Ranges, number: int) -> bool:
    """Whether it is left out."""
    return any(start <= number < stop for start, stop in ranges)


def read(directory: Path) -> Ranges:
    """What `write` wrote there; nothing where the file is not there or cannot be read."""
    file = directory / FILE
    try:
        return [(int(start), int(stop)) for start, stop in json.loads(file.read_bytes())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s cannot be read; what was left out comes again: %s", file, error)
        return []


def write(directory: Path, ranges: Any) -> None:
    """Raises OSError."""
    checkpoints.write_durably(directory / FILE, json.dumps([list(each) for each in ranges]).encode())


def forget(directory: Path) -> None:
    """A training begins anew. Raises OSError."""
    (directory / FILE).unlink(missing_ok=True)
