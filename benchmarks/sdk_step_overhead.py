"""Cost of an attached and idle SDK for a training step: the same loop with it over without.

The loop is a plain PyTorch one over a `DataLoader`; its step computes for a given time. Blocks of each kind take turns
in one run, connected to a Redis, and the median step of each kind counts. On a busy machine the fastest tenth is
disturbed less, and is printed too.

A third kind is attached without fingerprints of its batches, so that their share shows. The batches are those of a
language model: three tensors of tokens, 16 by 2048. One record is written for ten steps.

With ``--beside REVISION`` the SDK of that revision runs the same loop in a second process, with steps that do nothing
else. Short blocks of both take turns. The processor time of the training's thread is compared pair by pair, so that
other work on the machine shows little: medians, each with an interval of 95 % that assumes no distribution.

The SDK's own threads take turns with the training in Python. Their processor time is printed last; a training that
never waits in C could lose as much.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import trainmedic
from benchmarks.sdk_loop import Loop
from benchmarks.unattended.trees import HERE, Tree, checked_out
from tests.conftest import RedisServer
from trainmedic.torch import verification

WITHOUT, ATTACHED, UNPRINTED = "without", "attached", "attached, without fingerprints"


def timed(steps: Iterator[None], count: int) -> list[float]:
    """Return the seconds of each of so many steps, with everything between them."""
    found = []
    began = time.perf_counter()
    for _ in range(count):
        next(steps)
        ended = time.perf_counter()
        found.append(ended - began)
        began = ended
    return found


Steps = list[float]


def measure(url: str, directory: Path, seconds: float, rounds: int, count: int) -> tuple[dict[str, Steps], float]:
    """Return the seconds of each step, without the SDK and with it; and its threads' processor share."""
    loop = Loop(seconds)
    with trainmedic.connect(job="idle", redis_url=url, log_dir=directory / "logs") as medic:
        attached = loop.attached(medic, directory / "saved")
        kinds: dict[str, tuple[Iterator[None], list[float]]] = {
            WITHOUT: (loop.without(), []),
            ATTACHED: (attached, []),
            UNPRINTED: (attached, []),
        }
        for steps, _ in kinds.values():
            timed(steps, 5)  # what happens once
        gc.collect()
        began = time.perf_counter(), threads_beside()
        for number in range(rounds):
            order: Callable[[Any], Any] = reversed if number % 2 else list
            for kind in order(list(kinds)):
                steps, found = kinds[kind]
                with no_fingerprints() if kind == UNPRINTED else nullcontext():
                    found.extend(timed(steps, count))
        beside = (threads_beside() - began[1]) / (time.perf_counter() - began[0])
        attached.close()  # type: ignore[attr-defined]
    return {kind: found for kind, (_, found) in kinds.items()}, beside


def threads_beside() -> float:
    """Return the processor seconds of all threads but this one."""
    return time.process_time() - time.thread_time()


def no_fingerprints() -> Any:
    def nothing(batch: Any) -> int:  # a mock would keep each batch that it is called with
        return 0

    return mock.patch.object(verification, "fingerprint", nothing)


def compared(without: Steps, attached: Steps, statistic: Callable[[Steps], float]) -> str:
    one, other = statistic(without), statistic(attached)
    return f"{other / one:.5f} ({(other - one) * 1e6:+.1f} us)"


def fast(steps: Steps) -> float:
    """Return the step time that a tenth of the steps undercut."""
    return statistics.quantiles(steps, n=10)[0]


class Other:
    """The loop in a process of its own, with the SDK of a tree."""

    def __init__(self, tree: Tree, url: str, directory: Path) -> None:
        argv = [sys.executable, "-m", "benchmarks.sdk_loop", url, str(directory)]
        environment = {**os.environ, "PYTHONPATH": tree.python_path, "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, env=environment, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        found = self._out.readline().strip()
        if not Path(found).is_relative_to(tree.root):
            raise SystemExit(f"{found or 'nothing'} was loaded in place of the SDK in {tree.root}")

    def steps(self, count: int) -> tuple[float, float]:
        """The processor seconds of an attached step and of one without, means of so many."""
        print(count, file=self._in, flush=True)
        attached, without = map(float, self._out.readline().split())
        return attached, without

    def close(self) -> None:
        self._in.close()
        self._process.wait(60)


def compare(revision: str, url: str, directory: Path, pairs: int, count: int) -> str:
    """What the attached step of this checkout costs against that of the revision."""
    with checked_out(revision, directory / "tree") as tree:
        loops = {"then": Other(tree, url, directory / "then"), "now": Other(HERE, url, directory / "now")}
        found: dict[str, list[float]] = {"then": [], "now": []}
        bases: list[float] = []
        for loop in loops.values():
            loop.steps(200)  # what happens once
        for number in range(pairs):
            for name in ("then", "now") if number % 2 else ("now", "then"):
                attached, without = loops[name].steps(count)
                found[name].append(attached)
                bases.append(without)
        for loop in loops.values():
            loop.close()
    then, now, base = (statistics.median(each) for each in (found["then"], found["now"], bases))
    ratios = [one / other for one, other in zip(found["now"], found["then"], strict=True)]
    differences = [one - other for one, other in zip(found["now"], found["then"], strict=True)]
    median, low, high = interval(differences)
    return (
        f"attached step beside {revision}: {base * 1e6:.1f} us without the SDK, {then * 1e6:.1f} us then, "
        f"{now * 1e6:.1f} us now, of processor time\n"
        f"difference {median * 1e6:+.2f} us (95 %: {low * 1e6:+.2f} to {high * 1e6:+.2f}), ratio of the steps "
        "{:.4f} (95 %: {:.4f} to {:.4f}), {pairs} pairs of {count} steps".format(
            *interval(ratios), pairs=pairs, count=count
        )
    )


def interval(values: Steps) -> tuple[float, float, float]:
    """The median, and the limits between which it is with 95 %: order statistics, by the binomial distribution."""
    ordered, count = sorted(values), len(values)
    away = math.ceil(0.98 * math.sqrt(count))
    low, high = max(count // 2 - away, 0), min((count - 1) // 2 + away, count - 1)
    return statistics.median(ordered), ordered[low], ordered[high]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30, help="blocks of each kind")
    parser.add_argument("--block", type=float, default=0.5, metavar="SECONDS", help="about how long a block takes")
    parser.add_argument("--step", type=float, nargs="+", default=[0.01, 0.1], metavar="SECONDS")
    parser.add_argument("--beside", metavar="REVISION", help="only compare the attached step with this revision's")
    parser.add_argument("--pairs", type=int, default=200, help="blocks of each revision")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        server = RedisServer(Path(directory))
        server.start()
        try:
            if options.beside:
                print(compare(options.beside, server.url, Path(directory), options.pairs, 100))
                return
            for seconds in options.step:
                count = max(int(options.block / seconds), 1)
                steps, beside = measure(server.url, Path(directory), seconds, options.rounds, count)
                for name, base, kind in (
                    ("SDK attached", WITHOUT, ATTACHED),
                    ("  of it fingerprints", UNPRINTED, ATTACHED),
                ):
                    median, tenth = (compared(steps[base], steps[kind], how) for how in (statistics.median, fast))
                    print(f"{name}, step of {seconds * 1e3:g} ms: {median} x, the fastest tenth {tenth} x")
                print(f"threads of the SDK, step of {seconds * 1e3:g} ms: {beside:.4%} of a processor")
        finally:
            server.kill()


if __name__ == "__main__":
    main()
