"""Milliseconds from a webhook to its command in the loop of a training job that uses the SDK.

Server, embedded Redis and job are processes of their own. The next alert is sent when the last run has closed. Two such
sets run at the same time, without and with a signing key, and take turns in blocks, so that the ratio shows the cost of
signatures: of commands, replies and presences.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from benchmarks.sender import Connection, alert, get, webhook
from tests.support.programs import PYTHON_PATH, Program, eventually, start_server

JOB = "waiting-job"
BLOCK = 20  # alerts to the one, before the other has its turn
PLAYBOOK = """\
playbook: latency
on: {alert: Latency}
target: job
steps:
  - action: job.scale_lr
    with: {factor: 0.5}
"""


@dataclass
class Deployment:
    """A server and a waiting job. ``taken``: seconds from each webhook to its handling."""

    url: str
    job: Program
    taken: list[float] = field(default_factory=list)

    async def measure(self, rounds: int) -> None:
        connection = await Connection.open(self.url)
        for _ in range(rounds):
            number = len(self.taken)
            labels = {"alertname": "Latency", "severity": "critical", "job_name": JOB, "number": str(number)}
            exchange = await connection.send(webhook([alert(labels)]))
            runs = exchange.json()["runs"] if exchange.status == 200 else []
            if [run["decision"] for run in runs] != ["started"]:
                raise SystemExit(f"alert {number} started no run: {exchange.status} {exchange.body.decode()}")
            handled = await nth_line(self.job.log, number + 1)
            self.taken.append(float(handled) - exchange.sent_at)
            await closed(connection, runs[0]["run_id"])
        connection.close()

    def __str__(self) -> str:
        slow = statistics.quantiles(self.taken, n=20, method="inclusive")[18] if len(self.taken) > 1 else self.taken[0]
        return f"{statistics.median(self.taken) * 1000:.1f} ms, p95 {slow * 1000:.1f} ms"


@contextmanager
def deployed(directory: Path, step_seconds: float, keys: Mapping[str, str]) -> Iterator[Deployment]:
    """Run server and job with the environment ``keys``."""
    (directory / "playbooks").mkdir(parents=True)
    (directory / "playbooks" / "latency.yaml").write_text(PLAYBOOK)
    server, url = start_server(directory, "--mode", "enforce", environment=keys, playbooks=directory / "playbooks")
    environment = {"PYTHONPATH": PYTHON_PATH, "TRAINMEDIC_STATE_DIR": str(directory / "state"), **keys}
    argv = [sys.executable, "-m", "benchmarks.waiting_job", JOB, str(step_seconds)]
    with server, Program(argv, directory / "job.log", environment) as job:
        eventually(lambda: job.log.read_text().startswith("ready"), 20, "the job")
        yield Deployment(url, job)


async def take_turns(deployments: list[Deployment], rounds: int) -> None:
    """Measure each so many times, in alternating blocks."""
    left = rounds
    while left > 0:
        for deployment in deployments:
            await deployment.measure(min(left, BLOCK))
        left -= BLOCK


async def nth_line(log: Path, number: int, within: float = 10.0) -> str:
    """Return line `number` of the job's output, from 0, once it is there."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        lines = log.read_text().splitlines()
        if len(lines) > number:
            return lines[number]
        await asyncio.sleep(0.002)
    raise SystemExit(f"the job did not get its command within {within:g} s:\n{log.read_text()}")


async def closed(connection: Connection, run_id: str, within: float = 10.0) -> None:
    """Wait until the run has succeeded."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        run = (await connection.send(get(f"/history/{run_id}"))).json()
        if run["status"] == "succeeded":
            return
        await asyncio.sleep(0.005)
    raise SystemExit(f"run {run_id} is {run['status']} after {within:g} s: {run['message']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=1.0, help="length of the job's training step")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        unsigned, signed = (
            stack.enter_context(deployed(Path(name) / kind, options.step_ms / 1000, keys))
            for kind, keys in (("unsigned", {}), ("signed", {"TRAINMEDIC_SIGNING_KEY": "k" * 32}))
        )
        uvloop.run(take_turns([unsigned, signed], options.rounds))
    ratio = statistics.median(signed.taken) / statistics.median(unsigned.taken)
    print(
        f"receipt to handler: {unsigned}; signed {signed}, ratio {ratio:.2f}"
        f" (median of {options.rounds}, steps of {options.step_ms:g} ms, of which half is waited for on average)"
    )


if __name__ == "__main__":
    main()
