"""Seconds to search the last minute of a log of 1 GB, over those of ``grep`` for the whole file.

Two logs of 24 hours: one whose lines state their time as Python's logging does, and one without times, whose arrivals
the agent has recorded. Each is searched as for ``logs --since 1m``, and read as a whole by ``grep`` for a text that is
not in it; the best of five, in one run. The logs are deleted.

    python -m benchmarks.log_search [--megabytes 1000] [--directory DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.support.search_in_process import searcher_of
from trainmedic.wire.log_layout import AttemptLogs
from trainmedic_agent.journal import Journal
from trainmedic_agent.log_reading.arrivals import ArrivalIndex
from trainmedic_agent.log_reading.log_policy import LogsPolicy
from trainmedic_logs.domain.log_search import LogQuery

HOURS = 24
PIECE = 1024 * 1024
TEXT = "epoch 3 batch {} loss 2.1234 grad norm 0.2512 tokens 8123.4 a second, of which some are padding"
TIMED, BARE = "timed", "bare"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000, help="size of each log (1000)")
    parser.add_argument("--directory", type=Path, help="where the logs are written; a temporary directory by default")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        for job in (TIMED, BARE):
            measure(Path(directory), job, arguments.megabytes)


def measure(directory: Path, job: str, megabytes: int) -> None:
    """Write one log, search it, read it, and print the durations."""
    logs = AttemptLogs.of(directory / "logs", job, 1)
    logs.path.mkdir(parents=True)
    log = logs.launcher("n1")
    with contextlib.closing(Journal(directory / f"state-{job}")) as journal:
        arrivals = ArrivalIndex(journal)
        ended = write(log, megabytes, arrivals, has_times=job == TIMED)
        arrivals.store_due(0.0)
        policy = LogsPolicy(roots=(str(directory / "logs"),))
        search = searcher_of(policy, "n1", arrivals=arrivals, zone=UTC)
        query = LogQuery(job, ended - timedelta(minutes=1))
        count = len(search.page(query, {}).lines)
        searching = best(lambda: search.page(query, {}))
        cold = best(lambda: searcher_of(policy, "n1", arrivals=arrivals, zone=UTC).page(query, {}))
    reading = best(lambda: read(log))
    size = log.stat().st_size / 1e6
    log.unlink()
    print(
        f"{job} lines, {size:.0f} MB: the last minute ({count} lines) in {searching * 1000:.0f} ms, with a look at the "
        f"directories {cold * 1000:.0f} ms; grep reads the whole file in {reading * 1000:.0f} ms; "
        f"ratio {searching / reading:.3f}"
    )


def write(log: Path, megabytes: int, arrivals: ArrivalIndex, *, has_times: bool) -> datetime:
    """Write a log that grew evenly until now, with a look each second. Return its last line's time."""
    ended = datetime.now(UTC).replace(microsecond=0)
    seconds = HOURS * 3600
    of_second = megabytes * 1_000_000 // seconds
    line_number, size = 0, 0
    with log.open("wb", buffering=8 * PIECE) as file:
        facts = os.fstat(file.fileno())
        for second in range(seconds):
            now = ended - timedelta(seconds=seconds - 1 - second)
            began = size
            while size - began < of_second:
                stated = f"{now:%Y-%m-%d %H:%M:%S},000 INFO " if has_times else ""
                size += file.write(f"{stated}{TEXT.format(line_number)}\n".encode())
                line_number += 1
            if not has_times:
                arrivals.record_look((facts.st_dev, facts.st_ino), size, int(now.timestamp() * 1e9), now)
    return ended


def read(log: Path) -> None:
    """Have grep read a whole file."""
    subprocess.run(["grep", "-c", "loss 9[.]9 of", str(log)], stdout=subprocess.DEVNULL, check=False)


def best(act: Callable[[], object]) -> float:
    """Return the seconds of the fastest of five calls."""
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


if __name__ == "__main__":
    main()
