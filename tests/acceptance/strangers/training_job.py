"""A training job of one rank, as a program: it carries out every command by writing it down as a line of JSON.

The rank reports that it computes on the GPU that ``GPU`` names. The file is ``commands`` in the working directory. The
program ends with SIGTERM.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import trainmedic
from tests.integration.placed_job import Store

COMMANDS = (
    *("job.checkpoint", "job.rollback", "job.scale_lr", "job.scale_batch", "job.accumulate", "job.dataloader_workers"),
    *("job.empty_cache", "job.pause", "job.resume", "job.stop"),
)


def main() -> None:
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    with trainmedic.connect(rank=0, world_size=1) as medic, Path("commands").open("a", buffering=1) as log:

        def carry_out(command: trainmedic.JobCommand) -> dict[str, Any]:
            log.write(json.dumps({"action": command.action, "params": dict(command.params)}) + "\n")
            return {"step": medic.step}

        for name in COMMANDS:
            medic.on(name)(carry_out)
        medic.join_ranks(Store(), lambda: os.environ["GPU"], every=1, patience=10.0, call_patience=10.0)
        for step in itertools.count():
            medic.commands(step)
            if over.wait(0.02):
                break


if __name__ == "__main__":
    main()
