"""What a cleaning costs its node: time and memory for a directory of a million files, and what a reader feels.

The cleaning runs in a process of its own, as gently as in an agent: low priority, pauses. Its time is told
per 100,000 files, over that of ``find -delete`` on an equal directory in the same run; its memory as what it
adds to the process. The reader, a data loader in small, reads blocks at random places of a file that does not
fit the page cache's mood (O_DIRECT where the filesystem has it); its reads per second while the cleaning runs
are told over those while nothing runs.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_BLOCK = 64 * 1024
_CLEAN = """
import json, resource, sys, threading, time
from app.agent.disk import pace, reading
from app.agent.disk.cleaner import Cleaner, Request
rule = {"roots": [sys.argv[1]], "globs": ["**"], "min_age": "1d", "age_by": "modified"}
cleaning = reading.read({"rules": {"tmp": rule}, "max_files": 10_000_000})
def resident():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
pace.take_low_priority()
peak = before = resident()
began, used = time.monotonic(), time.process_time()
done = threading.Event()
def watch():
    global peak
    while not done.wait(0.05):
        peak = max(peak, resident())
threading.Thread(target=watch, daemon=True).start()
output = Cleaner(cleaning).clean(Request(("tmp",), time.time() + 3600, dry_run=sys.argv[2] == "dry"), lambda: False)
done.set()
print(json.dumps({"files": output["files"], "seconds": time.monotonic() - began,
                  "cpu": time.process_time() - used, "before": before, "peak": peak, "after": resident()}))
"""


def fill(root: Path, count: int) -> None:
    """One directory of `count` small files of different ages, all older than a day."""
    root.mkdir()
    directory = os.open(root, os.O_RDONLY)
    at = time.time() - 10 * 86_400
    for number in range(count):
        name = f"cache-{number:09}.bin"
        fd = os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=directory)
        os.write(fd, b"x")
        os.close(fd)
        moment = at + random.random() * 86_400
        os.utime(name, (moment, moment), dir_fd=directory)
    os.close(directory)


def started(root: Path, how: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", _CLEAN, str(root), how], stdout=subprocess.PIPE, text=True)


class Reader:
    """Reads blocks of a file at random."""

    def __init__(self, path: Path, size: int) -> None:
        self._blocks = size // _BLOCK
        with path.open("wb") as file:
            for _ in range(self._blocks):
                file.write(os.urandom(_BLOCK))
            os.fsync(file.fileno())
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            self._fd = os.open(path, os.O_RDONLY)
        self._buffer = mmap.mmap(-1, _BLOCK)

    def rate(self, process: subprocess.Popen[str] | None, seconds: float) -> float:
        """Reads per second, for so long or until the process ends."""
        began, reads = time.monotonic(), 0
        while time.monotonic() - began < seconds and (process is None or process.poll() is None):
            os.preadv(self._fd, [self._buffer], random.randrange(self._blocks) * _BLOCK)
            reads += 1
        return reads / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--reader-mib", type=int, default=2048)
    parser.add_argument(
        "--directory", type=Path, help="on the disk that is to be measured (default: the temporary directory)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        measure(Path(name), options.files, options.reader_mib * 2**20)


def measure(base: Path, count: int, size: int) -> None:
    fill(base / "naive", count // 10)
    began = time.monotonic()
    subprocess.run(["find", base / "naive", "-type", "f", "-delete"], check=True)
    naive = (time.monotonic() - began) / (count // 10) * 100_000
    fill(base / "root", count)
    with started(base / "root", "dry") as looking:
        trial = result(looking)
    reader = Reader(base / "data", size)
    alone = reader.rate(None, 5)
    with started(base / "root", "run") as cleaning:
        beside = reader.rate(cleaning, 600)
        run = result(cleaning)
    alone = (alone + reader.rate(None, 5)) / 2
    for what, of in (("trial run", trial), ("cleaning", run)):
        each = of["seconds"] / of["files"] * 100_000
        print(
            f"{what}: {of['files']} files, {each:.1f} s per 100,000 ({each / naive:.1f} x find -delete), "
            f"{100 * of['cpu'] / of['seconds']:.0f} % of a core, memory +{(of['peak'] - of['before']) / 1024:.1f} MiB, "
            f"+{(of['after'] - of['before']) / 1024:.1f} MiB afterwards"
        )
    print(f"a reader beside it: {beside / alone:.2f} of its {alone:.0f} reads per second")


def result(process: subprocess.Popen[str]) -> dict[str, float]:
    output, _ = process.communicate()
    found: dict[str, float] = json.loads(output)
    return found


if __name__ == "__main__":
    main()
