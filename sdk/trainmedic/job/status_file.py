"""How a rank goes, in a file for the launcher that has started it (``trainmedic.launch``): it needs no Redis.

The launcher names a directory in ``TRAINMEDIC_ATTEMPT_DIR``. A thread writes there every two seconds, and after
each checkpoint, how far the job has come, how long no step was completed, from when on that is a hang, and which
rollbacks wait for the loop. The launcher ends a hang for those, and names them in ``TRAINMEDIC_WAITING`` to the next
attempt, which carries them out. Rank 0 writes, and on other nodes the first rank of each: a launcher there has to see
progress, too.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Callable, Sequence

from trainmedic.job.progress import Progress

FILE_NAME = "rank-0.json"
"""The file of rank 0; others have their own number."""
VARIABLE = "TRAINMEDIC_ATTEMPT_DIR"
WAITING = "TRAINMEDIC_WAITING"
"""The variable with the ids of the rollbacks that waited when the attempt before was ended, with commas between."""
_MOST_WAITING = 16
_EVERY = 2.0
_LOOK_EVERY = 0.25


class StatusFile:
    """Writes until it is closed. A directory that cannot be written is passed over: training goes on without.

    ``waiting`` returns the ids of the rollbacks that wait for the loop.
    """

    def __init__(self, progress: Progress, path: Path, waiting: Callable[[], Sequence[str]]) -> None:
        self._progress = progress
        self._waiting = waiting
        self._path = path
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainmedic-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say that there is nothing to wait for any more."""
        self._over.set()
        self._thread.join(_EVERY)

    def _run(self) -> None:
        due_at, checkpoint = 0.0, None
        while not self._over.wait(_LOOK_EVERY):
            if time.monotonic() >= due_at or self._progress.checkpoint is not checkpoint:
                due_at, checkpoint = time.monotonic() + _EVERY, self._progress.checkpoint
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
    """Begin to write, on rank 0 and the first rank of each node, in a job that a launcher has started."""
    directory = os.environ.get(VARIABLE)
    is_first = rank == 0 or os.environ.get("LOCAL_RANK") == "0"
    return StatusFile(progress, Path(directory) / f"rank-{rank}.json", waiting) if directory and is_first else None


def waited_before() -> frozenset[str]:
    """The ids of the rollbacks that waited for the loop when the attempt before was ended."""
    return frozenset(filter(None, os.environ.get(WAITING, "").split(",")))
