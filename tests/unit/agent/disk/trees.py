"""Directory trees to clean, and cleaning them: real files, with times and free space as a test wants them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainmedic_agent.disk.cleaner import Cleaner, CleaningRequest
from trainmedic_agent.disk.filesystems import DiskSpace, MeasureSpace
from trainmedic_agent.disk.rules import read_cleaning
from trainmedic_agent.disk.throttle import Clocks

DAY = 86_400
NEVER = 1e11
"""A deadline that does not come."""


def put(path: Path, *, days: float = 30, size: int = 100) -> Path:
    """A file, and the directories that it needs, last used so many days ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    aged(path, days)
    return path


def aged(path: Path, days: float) -> None:
    at = time.time() - days * DAY
    os.utime(path, (at, at), follow_symlinks=False)


def checkpoint(path: Path, *, days: float = 30, mark: str | None = ".trainmedic-complete", size: int = 5000) -> Path:
    """A checkpoint directory with two files and, if one is given, a mark of completeness."""
    for name in ("model.pt", "ranks/0/optimizer.pt", *([mark] if mark else [])):
        put(path / name, days=days, size=size)
    for directory in (path / "ranks" / "0", path / "ranks", path):
        aged(directory, days)
    return path


def cleaner(
    rules: Mapping[str, Any],
    *,
    measure: MeasureSpace | None = None,
    clocks: Clocks | None = None,
    proc: Path = Path("/proc"),
    **bounds: Any,
) -> Cleaner:
    """A cleaner with these rules; age is by modification where a rule says nothing else, as tests set that alone."""
    written = {
        name: {"globs": "**", "min_age": "7d", "age_by": "modified", **rule}
        | {"roots": [str(root) for root in rule["roots"]]}
        for name, rule in rules.items()
    }
    return Cleaner(
        read_cleaning({"rules": written, **bounds}, []),
        clocks=clocks or Clocks(sleep=lambda _: None),
        proc=str(proc),
        **({} if measure is None else {"measure": measure}),
    )


def clean(
    by: Cleaner,
    *rules: str,
    until: float | None = None,
    dry_run: bool = False,
    stopping: Callable[[], bool] | None = None,
) -> Mapping[str, Any]:
    """Clean by the named rules, or by all."""
    request = CleaningRequest(rules or tuple(by.cleaning.rules), NEVER, until, dry_run)
    return by.clean(request, stopping or (lambda: False))


def filled_by(root: Path, total: int) -> MeasureSpace:
    """A filesystem of `total` bytes that holds the files below `root` and nothing else."""

    def measure(_: int) -> DiskSpace:
        return DiskSpace(total - stored_below(root), total)

    return measure


def stored_below(root: Path) -> int:
    seen: dict[int, int] = {}
    for directory, _, names in os.walk(root):
        for name in names:
            facts = Path(directory, name).lstat()
            seen[facts.st_ino] = facts.st_blocks * 512
    return sum(seen.values())


def left(output: Mapping[str, Any], rule: str) -> dict[str, int]:
    """How many a rule left, by reason."""
    return {reason: entry["count"] for reason, entry in output["rules"][rule]["left"].items()}


def names(root: Path) -> set[str]:
    """What is below a directory that is not a directory, as paths from there."""
    return {
        str(Path(directory, name).relative_to(root))
        for directory, directories, files in os.walk(root)
        for name in [*files, *(one for one in directories if Path(directory, one).is_symlink())]
    }
