"""A rank's status file for its launcher, independent of Redis."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Callable, Sequence

from trainmedic.job.progress import Progress

FILE_NAME = "rank-0.json"
VARIABLE = "TRAINMEDIC_ATTEMPT_DIR"  # set by the launcher: directory of the file
WAITING = "TRAINMEDIC_WAITING"
"""Likewise: comma-separated IDs of rollbacks waiting when the last attempt ended."""
_MOST_WAITING = 16
_WRITE_INTERVAL_S = 2.0
_CHECK_INTERVAL_S = 0.25


class StatusFile:
    """Periodic writer until `close`. ``waiting`` returns the IDs of waiting rollbacks."""

    def __init__(self, progress: Progress, path: Path, waiting: Callable[[], Sequence[str]]) -> None:
        self._progress = progress
        self._waiting = waiting
        self._path = path
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainmedic-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(_WRITE_INTERVAL_S)

    def _run(self) -> None:
        due_at, checkpoint = 0.0, None
        while not self._over.wait(_CHECK_INTERVAL_S):
            if time.monotonic() >= due_at or self._progress.checkpoint is not checkpoint:
                due_at, checkpoint = time.monotonic() + _WRITE_INTERVAL_S, self._progress.checkpoint
                self._write()
        self._write()

    def _write(self) -> None:
        progress = self._progress
        stall = progress.stall(time.perf_counter())
        status = {
            "step": progress.step,
            "checkpoint": progress.checkpoint[0] if progress.checkpoint is not None else None,
            "stall": round(stall.seconds, 1),
            "limit": round(stall.limit, 1),
            "over": self._over.is_set(),
            "waiting": list(self._waiting())[:_MOST_WAITING],
        }
        unfinished = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            unfinished.write_text(json.dumps(status))
            unfinished.replace(self._path)
        except OSError:
            pass  # the launcher then knows less


def begin_status_file(progress: Progress, rank: int, waiting: Callable[[], Sequence[str]]) -> StatusFile | None:
    directory = os.environ.get(VARIABLE)
    # One rank per node suffices: each node's launcher reads a file.
    is_first = rank == 0 or os.environ.get("LOCAL_RANK") == "0"
    return StatusFile(progress, Path(directory) / f"rank-{rank}.json", waiting) if directory and is_first else None


def waited_before() -> frozenset[str]:
    return frozenset(filter(None, os.environ.get(WAITING, "").split(",")))
