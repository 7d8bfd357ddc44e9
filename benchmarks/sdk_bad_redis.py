"""Cost of a bad Redis for a training loop: steps per second with one, over those with a good one.

The loop computes for a given time and calls `report` and `commands` on each step, in a process of its own for each
block; blocks of all kinds take turns. On a busy machine the best block is disturbed least, and is printed next to the
median. The kinds:

- ``gone``: nobody listens.
- ``silent``: connections are accepted, without answers.
- ``slow``: a real Redis, each of whose answers takes half a second.
- ``empty``: every request is answered at once, with nothing, even waits.
- ``lying``: every request is answered at once, with a wrong answer.
"""

from __future__ import annotations

import argparse
import os
import random
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import trainmedic
from tests.conftest import RedisServer
from tests.support.programs import PYTHON_PATH, ROOT, free_port, inherited

GOOD = "good"
_SETTLE_SECONDS = 1.0
_DELAY_SECONDS = 0.5
_LIES = (
    *(b"+OK\r\n", b":1\r\n", b"$-1\r\n", b"*-1\r\n", b"*0\r\n", b"-ERR no\r\n", b"-NOGROUP no\r\n", b"-LOADING\r\n"),
    *(b"$3\r\nfoo\r\n", b"*1\r\n*2\r\n$1\r\ns\r\n*1\r\n*2\r\n$3\r\n1-0\r\n*2\r\n$7\r\ncommand\r\n$2\r\n{}\r\n"),
    *(b"garbage\r\n", b"*3\r\n:1\r\n", b"$99999999\r\nabc", b"*1\r\n*1\r\n:5\r\n"),
)


class Pretender:
    """Server that pretends to be a Redis, with one thread."""

    def __init__(self, kind: str, real_port: int) -> None:
        self._kind = kind
        self._real_port = real_port
        self._chance = random.Random(7)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._over = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._others: dict[socket.socket, socket.socket] = {}
        self._due: list[tuple[float, socket.socket, bytes]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Pretender:
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()

    def _run(self) -> None:
        while not self._over.is_set():
            for key, _ in self._selector.select(0.01 if self._due else 0.1):
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj is self._socket:
                    self._welcome(self._socket.accept()[0])
                else:
                    self._hear(key.fileobj)
            while self._due and self._due[0][0] <= time.monotonic():
                _, to, data = self._due.pop(0)
                self._send(to, data)

    def _welcome(self, guest: socket.socket) -> None:
        self._selector.register(guest, selectors.EVENT_READ)
        if self._kind == "slow":
            real = socket.create_connection(("127.0.0.1", self._real_port))
            self._selector.register(real, selectors.EVENT_READ)
            self._others[guest], self._others[real] = real, guest

    def _hear(self, one: socket.socket) -> None:
        try:
            data = one.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._drop(one)
        elif self._kind == "slow":
            self._due.append((time.monotonic() + _DELAY_SECONDS / 2, self._others[one], data))
        elif self._kind != "silent":
            requests = data.count(b"\r\n*") + data.startswith(b"*")  # pipelined ones too
            lies = (b"*-1\r\n",) if self._kind == "empty" else _LIES
            self._send(one, b"".join(self._chance.choice(lies) for _ in range(requests)))

    def _send(self, to: socket.socket, data: bytes) -> None:
        with suppress(OSError):  # it is gone, and is dropped when it is read from
            to.sendall(data)

    def _drop(self, one: socket.socket) -> None:
        for gone in (one, self._others.pop(one, None)):
            if gone is not None:
                self._others.pop(gone, None)
                self._selector.unregister(gone)
                gone.close()


def train(url: str, seconds: float, compute: float) -> int:
    """Return the number of steps in so many seconds, once the connection has settled."""
    medic = trainmedic.connect(job="tried", redis_url=url, signing_key="key", rank=0, world_size=1)
    settled = time.perf_counter() + _SETTLE_SECONDS
    step = counted = 0
    while (now := time.perf_counter()) < settled + seconds:
        step += 1
        while time.perf_counter() < now + compute:
            pass
        medic.report(step=step, loss=2.5, grad_norm=0.5, learning_rate=1e-4, samples=8)
        medic.commands(step)
        counted += now > settled
    return counted


def steps_per_second(url: str, seconds: float, compute: float) -> float:
    """Measure in a process of its own."""
    argv = [sys.executable, "-m", "benchmarks.sdk_bad_redis", "--train", url]
    argv += ["--block", str(seconds), "--step", str(compute)]
    environment = {**inherited(), "PYTHONPATH": PYTHON_PATH}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60)
    return int(done.stdout) / seconds


@contextmanager
def urls() -> Iterator[dict[str, str]]:
    """Yield the good URL and the bad ones, by kind."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        server = RedisServer(Path(directory))
        server.start()
        stack.callback(server.kill)
        found = {GOOD: server.url, "gone": f"redis://127.0.0.1:{free_port()}/0"}
        real_port = int(server.url.rpartition(":")[2].partition("/")[0])
        for kind in ("silent", "slow", "empty", "lying"):
            found[kind] = f"redis://127.0.0.1:{stack.enter_context(Pretender(kind, real_port)).port}/0"
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="blocks of each kind")
    parser.add_argument("--block", type=float, default=2.0, metavar="SECONDS")
    parser.add_argument("--step", type=float, default=0.001, metavar="SECONDS", help="what a step computes for")
    parser.add_argument("--train", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        print(train(options.train, options.block, options.step), flush=True)
        os._exit(0)  # without a goodbye, which a bad Redis may hold up for seconds
    with urls() as by_kind:
        rates: dict[str, list[float]] = {kind: [] for kind in by_kind}
        for number in range(options.rounds):
            for kind in sorted(by_kind, reverse=bool(number % 2)):
                rates[kind].append(steps_per_second(by_kind[kind], options.block, options.step))
    good = rates.pop(GOOD)
    for how, statistic in (("median", statistics.median), ("best", max)):
        told = ", ".join(f"{kind} {statistic(found) / statistic(good):.4f} x" for kind, found in rates.items())
        print(f"bad Redis, step of {options.step * 1e3:g} ms, {how} block: {told} ({statistic(good):.0f} steps/s good)")


if __name__ == "__main__":
    main()
