"""Milliseconds from the sending of a webhook to its command in the loop of a training job that uses the SDK.

Server, Redis (the embedded one) and job are processes of their own, as in use. One alert at a time: the next
is sent when the run of the last has closed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from benchmarks.sender import Connection, alert, get, webhook
from tests.support.programs import PYTHON_PATH, Program, eventually, start_server

JOB = "waiting-job"
PLAYBOOK = """\
playbook: latency
on: {alert: Latency}
target: job
steps:
  - action: job.scale_lr
    with: {factor: 0.5}
"""


async def measure(url: str, job: Program, rounds: int) -> list[float]:
    """Seconds from each webhook's sending to its handling, in order."""
    connection = await Connection.open(url)
    taken: list[float] = []
    for number in range(rounds):
        labels = {"alertname": "Latency", "severity": "critical", "job_name": JOB, "number": str(number)}
        exchange = await connection.send(webhook([alert(labels)]))
        runs = exchange.json()["runs"] if exchange.status == 200 else []
        if [run["decision"] for run in runs] != ["started"]:
            raise SystemExit(f"alert {number} started no run: {exchange.status} {exchange.body.decode()}")
        handled = await nth_line(job.log, number + 1)
        taken.append(float(handled) - exchange.sent_at)
        await closed(connection, runs[0]["run_id"])
    connection.close()
    return taken


async def nth_line(log: Path, number: int, within: float = 10.0) -> str:
    """Line `number` of the job's output, counted from 0, once it is there."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        lines = log.read_text().splitlines()
        if len(lines) > number:
            return lines[number]
        await asyncio.sleep(0.002)
    raise SystemExit(f"the job did not get its command within {within:g} s:\n{log.read_text()}")


async def closed(connection: Connection, run_id: str, within: float = 10.0) -> None:
    """Return when the run has succeeded."""
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
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "playbooks").mkdir()
        (directory / "playbooks" / "latency.yaml").write_text(PLAYBOOK)
        server, url = start_server(directory, "--mode", "enforce", playbooks=directory / "playbooks")
        environment = {
            "PYTHONPATH": PYTHON_PATH,
            "TRAINMEDIC_STATE_DIR": str(directory / "state"),
        }
        argv = [sys.executable, "-m", "benchmarks.waiting_job", JOB, str(options.step_ms / 1000)]
        with server, Program(argv, directory / "job.log", environment) as job:
            eventually(lambda: job.log.read_text().startswith("ready"), 20, "the job")
            taken = uvloop.run(measure(url, job, options.rounds))
    slow = statistics.quantiles(taken, n=20, method="inclusive")[18]
    print(
        f"receipt to handler: {statistics.median(taken) * 1000:.1f} ms, p95 {slow * 1000:.1f} ms"
        f" (median of {options.rounds}, steps of {options.step_ms:g} ms, of which half is waited for on average)"
    )


if __name__ == "__main__":
    main()
