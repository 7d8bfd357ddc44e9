"""Seconds from the start of ``trainmedic serve`` to its first 200 on ``/ready``, embedded Redis included.

The first start makes the database, the next ones find it; both are told.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from tests.support.programs import start_server


def seconds_to_ready(directory: Path) -> float:
    started = time.monotonic()
    server, _ = start_server(directory)
    with server:
        return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    fresh, again = [], []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as directory:
            fresh.append(seconds_to_ready(Path(directory)))
            again.append(seconds_to_ready(Path(directory)))
    print(
        f"time to ready: {statistics.median(again):.2f} s with a database, {statistics.median(fresh):.2f} s without"
        f" (median of {options.rounds}; slowest {max(again + fresh):.2f} s)"
    )


if __name__ == "__main__":
    main()
