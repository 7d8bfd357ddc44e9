"""Megabytes per second at which `trainmedic diagnose --dir` reads a folder, on one core, and its memory.

Three folders of the given size, each with a failure at its end: one log of all ranks, as by `kubectl logs` or Slurm;
the SDK's step records of eight ranks; and a log full of caught exceptions, which is the worst case.

    python -m benchmarks.diagnose_folder [--megabytes 80]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from benchmarks.log_rules import shipped
from trainmedic_logs.folder_diagnosis import diagnose_folder
from trainmedic_server import telemetry

RANKS = 8
FAILED = 3
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
RAISED = (
    "[rank{rank}]: Traceback (most recent call last):",
    '[rank{rank}]:   File "/app/train.py", line 214, in main',
    "[rank{rank}]: KeyError: 'labels'",
)
CAUGHT = (
    "Traceback (most recent call last):",
    '  File "/app/data.py", line 14, in read',
    "ValueError: sample {number} has no labels",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=80, help="size of each folder (80)")
    size = int(parser.parse_args().megabytes * 1e6)
    telemetry.configure_logging("CRITICAL")
    for name, folder in {"one log": one_log, "step records": records, "caught exceptions": caught}.items():
        with tempfile.TemporaryDirectory() as directory:
            folder(Path(directory), size)
            measured(name, Path(directory))


def measured(name: str, directory: Path) -> None:
    """Diagnose in a process of its own, to measure its memory alone."""
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        return
    size, rules = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()), shipped()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    verdict = diagnose_folder(directory, rules).attempts[-1].verdict
    took = time.process_time() - began
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"diagnose --dir, {name}: {size / 1e6:.0f} MB in {took:.1f} s of one core, {size / 1e6 / took:.1f} MB/s,"
        f" {memory:.0f} MB of memory; {verdict.cause} on rank {', '.join(map(str, verdict.ranks))}",
        flush=True,
    )
    os._exit(0)


def one_log(directory: Path, size: int) -> None:
    """Write eight ranks' lines into one stream."""
    _write(directory / "slurm-77.out", size, _printed)


def records(directory: Path, size: int) -> None:
    """Write the SDK's step records, a file for each rank."""
    for rank in range(RANKS):
        _write(directory / f"rank{rank}.jsonl", size // RANKS, partial(_step, rank))
    with (directory / f"rank{FAILED}.jsonl").open("a") as file:
        file.writelines(f"{line}\n" for line in _raised())


def caught(directory: Path, size: int) -> None:
    """Write exceptions, each followed by steps that prove that it was caught."""
    _write(directory / "train.log", size, _caught)


def _write(path: Path, size: int, lines: Callable[[int], list[str]]) -> None:
    written, number = 0, 0
    with path.open("w") as file:
        while written < size:
            written += file.write("".join(f"{line}\n" for line in lines(number)))
            number += 1
        if path.suffix != ".jsonl":
            file.writelines(f"{line}\n" for line in _raised())


def _raised() -> Iterator[str]:
    return (line.format(rank=FAILED) for line in RAISED)


def _printed(number: int) -> list[str]:
    at, rank = BEGAN + timedelta(seconds=number), number % RANKS
    return [
        f"[rank{rank}]: {at:%Y-%m-%d %H:%M:%S},030 [INFO] [logging.py:96:log_dist] step={number}, lr=[1e-05]",
        f"node-{rank}:533:1765 [2] NCCL INFO Channel 04/0 : 0[0] -> 32[0] [receive] via NET/IB/7 comm 0x7f{number}",
        f"[rank{rank}]: INFO:root:saving checkpoint at iteration {number} to /checkpoints/gpt, no error and no timeout",
        f" 22%|##        | {number}/50000 [1:56:21<6:51:20,  6.83s/it]",
        f" iteration {number}/ 500000 | consumed samples: 2048 | lm loss: 2.1E+00 | grad norm: 0.25 |",
        f"{{'loss': 2.1, 'grad_norm': 0.4, 'learning_rate': 1e-05, 'epoch': {number / 1000}}}",
    ]


def _step(rank: int, number: int) -> list[str]:
    at = (BEGAN + timedelta(seconds=number)).isoformat().replace("+00:00", "Z")
    parts = {"data_s": 0.02, "compute_s": 0.71, "wait_s": 0.18}
    said = {"ts": at, "job": "llm-1", "rank": rank, "node": "node-1", "level": "info", "event": "step", "step": number}
    return [json.dumps({**said, "loss": 2.15, "grad_norm": 0.42, "learning_rate": 1.5e-5, **parts})]


def _caught(number: int) -> list[str]:
    steps = [f"{{'loss': 2.1, 'learning_rate': 1e-05, 'epoch': {number / 1000}}}"] * 3
    return [line.format(number=number) for line in CAUGHT] + steps


if __name__ == "__main__":
    main()
