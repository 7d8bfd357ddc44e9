"""Cost of the SDK per training step without commands: one `report` and one `commands`.

Measured with a Redis, over the same loop without them, in the same run, with blocks of both in turn. The time itself is
printed too, because an empty loop's step takes tens of nanoseconds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable

import redis

import trainmedic
from tests.support.programs import free_port

_BLOCK = 20_000


def empty_block() -> None:
    for _ in range(_BLOCK):
        pass


def idle_block(medic: trainmedic.Medic) -> None:
    for step in range(_BLOCK):
        medic.report(step=step, loss=2.5, grad_norm=0.5, learning_rate=1e-4, samples=8)
        medic.commands(step)


def seconds_per_step(block: Callable[[], None]) -> float:
    began = time.perf_counter()
    block()
    return (time.perf_counter() - began) / _BLOCK


def measure(url: str, rounds: int) -> tuple[float, float]:
    """Return seconds per step of the empty and the idle loop, the median of their blocks."""
    empty, idle = [], []
    with trainmedic.connect(job="idle", redis_url=url) as medic:
        for _ in range(rounds):
            empty.append(seconds_per_step(empty_block))
            idle.append(seconds_per_step(lambda: idle_block(medic)))
    return statistics.median(empty), statistics.median(idle)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    with tempfile.TemporaryDirectory() as directory:
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--dir", directory, "--save", ""]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            wait_for(url)
            empty, idle = measure(url, options.rounds)
        finally:
            server.kill()
            server.wait()
    print(f"SDK, idle step: {idle * 1e6:.2f} us, {idle / empty:.0f} x an empty step of {empty * 1e9:.0f} ns")


def wait_for(url: str) -> None:
    for _ in range(500):
        try:
            with redis.Redis.from_url(url) as client:
                client.ping()
            return
        except redis.RedisError:
            time.sleep(0.01)
    raise RuntimeError("redis-server does not answer")


if __name__ == "__main__":
    main()
