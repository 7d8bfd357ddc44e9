"""Cost of a cleaning for its node: time and memory for a million files, and a concurrent reader's loss.

The cleaning runs in a process of its own, with an agent's low priority and pauses. Its time is printed per 100,000
files, next to that of ``find -delete`` on an equal directory; its memory is the increase. The reader reads random
blocks of a file without the page cache (O_DIRECT). Blocks of seconds in which the cleaning runs or is held take turns,
so that other load affects both alike. The rest is cleaned without a reader.
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
_SETTLES = 0.5
"""Seconds until the held cleaning has ended its last piece of work."""
_CLEAN = """
import json, os, sys, threading, time
from trainmedic_agent.disk import throttle
from trainmedic_agent.disk.cleaner import Cleaner, CleaningRequest
from trainmedic_agent.disk.rules import read_cleaning
held = 0.0
def sleep(seconds):
    global held
    time.sleep(seconds)
    began = time.monotonic()
    while os.path.exists(sys.argv[3]):
        time.sleep(0.02)
    held += time.monotonic() - began
rule = {"roots": [sys.argv[1]], "globs": ["**"], "min_age": "1d", "age_by": "modified"}
cleaning = read_cleaning({"rules": {"tmp": rule}, "max_files": 10_000_000}, [])
def resident():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
throttle.take_low_priority()
peak = before = resident()
began, used = time.monotonic(), time.process_time()
done = threading.Event()
def watch():
    global peak
    while not done.wait(0.05):
        peak = max(peak, resident())
threading.Thread(target=watch, daemon=True).start()
request = CleaningRequest(("tmp",), time.time() + float(sys.argv[4]), dry_run=sys.argv[2] == "dry")
output = Cleaner(cleaning, throttle.Clocks(sleep=sleep)).clean(request, lambda: False)
done.set()
print(json.dumps({"files": output["files"], "seconds": time.monotonic() - began - held,
                  "cpu": time.process_time() - used, "before": before, "peak": peak, "after": resident()}))
"""


def fill(root: Path, count: int) -> None:
    """Create `count` small files of different ages, all older than a day, in one directory."""
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


def started(root: Path, how: str, at_most: float) -> subprocess.Popen[str]:
    """Start a cleaning, which is held at its next pause while the file next to the root exists."""
    argv = [sys.executable, "-c", _CLEAN, root, how, held(root), str(at_most)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def held(root: Path) -> Path:
    return root.with_suffix(".held")


class Reader:
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

    def reads(self, seconds: float) -> float:
        """Return the reads per second during so many seconds."""
        began, reads = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            os.preadv(self._fd, [self._buffer], random.randrange(self._blocks) * _BLOCK)
            reads += 1
        return reads / (time.monotonic() - began)

    def beside(
        self, process: subprocess.Popen[str], pause: Path, turns: int, seconds: float
    ) -> list[tuple[float, float]]:
        """Return reads per second while the process works and while it is held, turn by turn until it ends."""
        found = []
        while process.poll() is None and len(found) < turns:
            pause.unlink(missing_ok=True)
            working = self.reads(seconds)
            if process.poll() is not None:
                break
            pause.touch()
            self.reads(_SETTLES)
            found.append((working, self.reads(seconds)))
        pause.unlink(missing_ok=True)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--reader-mib", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=30, help="of the reader with and without the cleaning")
    parser.add_argument("--seconds", type=float, default=3600, help="at most, of the trial run and of the cleaning")
    parser.add_argument("--block", type=float, default=3.0, help="seconds of a block")
    parser.add_argument(
        "--directory", type=Path, help="on the disk that is to be measured (default: the temporary directory)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        measure(Path(name), options)


def measure(base: Path, options: argparse.Namespace) -> None:
    count = options.files
    fill(base / "naive", count // 10)
    began = time.monotonic()
    subprocess.run(["find", base / "naive", "-type", "f", "-delete"], check=True)
    naive = (time.monotonic() - began) / (count // 10) * 100_000
    fill(base / "root", count)
    with started(base / "root", "dry", options.seconds) as looking:
        trial = result(looking)
    reader = Reader(base / "data", options.reader_mib * 2**20)
    with started(base / "root", "run", options.seconds) as cleaning:
        turns = reader.beside(cleaning, held(base / "root"), options.turns, options.block)
        run = result(cleaning)
    for what, of in (("trial run", trial), ("cleaning", run)):
        each = of["seconds"] / of["files"] * 100_000
        print(
            f"{what}: {of['files']} files, {each:.1f} s per 100,000 ({each / naive:.1f} x find -delete), "
            f"{100 * of['cpu'] / of['seconds']:.0f} % of a core, memory +{(of['peak'] - of['before']) / 1024:.1f} MiB, "
            f"+{(of['after'] - of['before']) / 1024:.1f} MiB afterwards"
        )
    working, alone = (sum(one) / len(turns) for one in zip(*turns, strict=True))
    shares = sorted(beside / without for beside, without in turns)
    print(
        f"a reader beside it: {working / alone:.3f} of its {alone:.0f} reads per second, in {len(turns)} turns of "
        f"{options.block:g} s with and without; median turn {shares[len(shares) // 2]:.3f}"
    )


def result(process: subprocess.Popen[str]) -> dict[str, float]:
    output, _ = process.communicate()
    found: dict[str, float] = json.loads(output)
    return found


if __name__ == "__main__":
    main()
