"""A training job for the chaos: a plain loop whose changes are on disk before they are answered. A program.

    python training_job.py NAME CHANGES [forgetful]

CHANGES gets one JSON line for each change, on disk before the handler returns: what was changed outlives the
process, as in a script that keeps its learning rate in its checkpoints. One command in ten fails without a change. A
forgetful job does not tell the SDK what is in force, so where Redis is emptied and the job starts again, what it has
to take back stays owed.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import trainmedic


class Changes:
    """What was done to this job, over all of its processes."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        known = [json.loads(line) for line in path.read_text().splitlines()]
        self._applied = {change["id"] for change in known}
        self._taken_back = {change["undo_of"] for change in known}

    def is_in_force(self, command_id: str) -> bool:
        return command_id in self._applied - self._taken_back

    def carry_out(self, command: trainmedic.JobCommand) -> dict[str, Any]:
        if command.undo_of is not None and command.undo_of not in self._applied:
            return {"nothing_to_undo": True}
        if random.random() < 0.1:
            command.failed("not now")
            return {}
        change = {
            "id": command.id,
            "action": command.action,
            "undo_of": command.undo_of,
            "at": time.time(),
            "pid": os.getpid(),
        }
        os.write(self._file, json.dumps(change).encode() + b"\n")
        os.fsync(self._file)
        self._applied.add(command.id)
        self._taken_back.add(command.undo_of)
        return {}


def main(name: str, path: Path, is_forgetful: bool) -> None:
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    changes = Changes(path)
    with trainmedic.connect(job=name) as medic:
        for action in ("job.scale_lr", "job.checkpoint", "job.accumulate"):
            medic.on(action, in_force=None if is_forgetful else changes.is_in_force)(changes.carry_out)
        for step in itertools.count():
            medic.report(step=step, loss=2.0)
            medic.commands(step)
            if over.wait(0.01):
                return


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), is_forgetful="forgetful" in sys.argv[3:])
