"""Seconds from the start of ``trainmedic serve`` to its first 200 on ``/ready``, with embedded Redis.

The first start creates the database, the next ones find it; both are printed, with the server's processor time. An
earlier start creates the modules' bytecode.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.agent_idle import processor_seconds
from tests.support.programs import start_server

_KEEPS_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}


class StartCost(NamedTuple):
    """Seconds until a server was ready: elapsed, and of a processor."""

    clock: float
    processor: float


def start_cost(directory: Path) -> StartCost:
    started = time.monotonic()
    server, _ = start_server(directory, environment=_KEEPS_BYTECODE)
    with server:
        return StartCost(time.monotonic() - started, processor_seconds(server.process.pid))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    fresh, again = [], []
    with tempfile.TemporaryDirectory() as directory:
        start_cost(Path(directory))
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as directory:
            fresh.append(start_cost(Path(directory)))
            again.append(start_cost(Path(directory)))
    print(
        f"time to ready: {statistics.median(each.clock for each in again):.2f} s with a database,"
        f" {statistics.median(each.clock for each in fresh):.2f} s without; of a processor"
        f" {statistics.median(each.processor for each in again):.2f} and"
        f" {statistics.median(each.processor for each in fresh):.2f} s"
        f" (median of {options.rounds}; slowest {max(again + fresh).clock:.2f} s)"
    )


if __name__ == "__main__":
    main()
