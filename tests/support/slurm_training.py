"""A training of one process per node without tensors. Rank 0 uses the SDK.

A step counts if both ranks have worked on it: each writes its node and the step's number to a file of its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import trainmedic

WORK = Path(sys.argv[1])
RANK = int(os.environ["SLURM_PROCID"])
NODE = os.environ["SLURMD_NODENAME"]
SAVED = WORK / "checkpoint.json"
PAUSE = 0.05
"""Seconds of one step."""
LEAVES = 94
"""Exit code after a command to leave a node."""


def write(file: Path, content: object) -> None:
    """Replace the file at once."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content))
    temporary.rename(file)


def read(file: Path) -> dict[str, object]:
    try:
        found: dict[str, object] = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    return found


def work_as_other() -> None:
    attempt = 0
    while True:
        attempt += 1
        write(WORK / "rank-1.json", {"node": NODE, "at": time.time(), "beat": attempt})
        time.sleep(PAUSE)


def train() -> None:
    began_from = step = int(str(read(SAVED).get("step", 0)))
    medic = trainmedic.connect(rank=0, world_size=1)
    signal.signal(signal.SIGTERM, lambda number, frame: (write(SAVED, {"step": step}), os._exit(1)))
    is_leaving = False
    while True:
        time.sleep(PAUSE)
        other = read(WORK / "rank-1.json")
        if time.time() - float(str(other.get("at", 0))) > 1:
            continue  # the collective operation waits
        step += 1
        medic.report(step=step, loss=1 / step)
        line = {"step": step, "from": began_from, "nodes": [NODE, other["node"]], "at": time.time()}
        with (WORK / "steps.jsonl").open("a") as file:
            file.write(f"{json.dumps(line)}\n")
        for command in medic.commands(step):
            if command.action == "job.checkpoint":
                write(SAVED, {"step": step})
                command.applied({"step": step})
            elif command.action == "test.leave":
                (WORK / "left").write_text(str(command.params["node"]))
                command.applied()
                is_leaving = True
            else:
                command.unsupported()
        if is_leaving:
            medic.close()
            os._exit(LEAVES)


if RANK == 0:
    train()
else:
    work_as_other()
