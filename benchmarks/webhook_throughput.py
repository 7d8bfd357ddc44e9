"""Durable single-alert webhooks per second, over those of an empty FastAPI endpoint on the same machine.

Both servers run with uvicorn's settings as ``trainmedic serve`` uses them, and are sent the same requests by
the same client, in turns, so that a busy machine slows both. A webhook counts when its reply says that it is
committed. By default no playbook matches, which is the bare cost of keeping an alert; ``--matched`` sends
alerts that each start a run of a playbook in mode observe.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import uvloop

from benchmarks.sender import alert, send_all, webhook
from tests.support.programs import ROOT, Program, free_port, start_server

PLAYBOOK = """\
playbook: benchmark
mode: observe
on: {alert: Benchmark}
target: job
steps:
  - action: job.scale_lr
    with: {factor: 0.5}
"""

AS_SERVED = (
    *("--loop", "uvloop", "--http", "httptools", "--ws", "none", "--lifespan", "off"),
    *("--no-access-log", "--no-server-header", "--no-proxy-headers", "--log-level", "warning"),
)
"""The settings of ``trainmedic_server.server.listener``."""


def start_endpoint(directory: Path, kind: str) -> tuple[Program, str]:
    """What is compared with: the ``empty`` endpoint, or the ``forking`` one."""
    port = free_port()
    argv = [sys.executable, "-m", "uvicorn", f"benchmarks.{kind}_endpoint:app", "--port", str(port)]
    program = Program([*argv, *AS_SERVED], directory / f"{kind}.log", {"PYTHONPATH": os.fspath(ROOT)})
    url = f"http://127.0.0.1:{port}"
    return program.wait_for(f"{url}/openapi.json"), url


def requests(matched: bool) -> Iterator[bytes]:
    """Webhooks of about the size that Alertmanager's have, each with an alert that is new."""
    name = "Benchmark" if matched else "NobodyMatchesThis"
    for number in count():
        labels = {"alertname": name, "severity": "critical", "job_name": f"job-{number}", "node": f"node-{number % 64}"}
        yield webhook([alert(labels)])


async def rate(url: str, batch: list[bytes], concurrency: int) -> float:
    exchanges = await send_all(url, batch, concurrency)
    refused = [exchange for exchange in exchanges if exchange.status != 200]
    if refused:
        raise SystemExit(f"{len(refused)} of {len(batch)} webhooks were not accepted: {refused[0].status}")
    return len(exchanges) / (max(e.replied_at for e in exchanges) - min(e.sent_at for e in exchanges))


async def measure(ours: str, empty: str, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    source = requests(options.matched)
    rates: tuple[list[float], list[float]] = ([], [])
    for round_number in range(options.rounds + 1):
        batch = list(islice(source, options.webhooks))
        for url, kept in ((empty, rates[1]), (ours, rates[0])):
            reached = await rate(url, batch, options.concurrency)
            if round_number > 0:  # the first round warms both up
                kept.append(reached)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--webhooks", type=int, default=3000, help="in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--matched", action="store_true", help="let every alert start a run in mode observe")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        playbooks = Path(directory) / "playbooks"
        playbooks.mkdir()
        (playbooks / "benchmark.yaml").write_text(PLAYBOOK)
        server, ours = start_server(Path(directory), playbooks=playbooks)
        with server:
            endpoint, empty = start_endpoint(Path(directory), "empty")
            with endpoint:
                durable, nothing = uvloop.run(measure(ours, empty, options))
    ratio = statistics.median(one / other for one, other in zip(durable, nothing, strict=True))
    print(
        f"webhook throughput: {ratio:.2f} = {statistics.median(durable):.0f} durable webhooks/s"
        f" / {statistics.median(nothing):.0f} requests/s of an empty FastAPI endpoint"
        f" (median of {options.rounds} rounds of {options.webhooks}, {options.concurrency} connections,"
        f" {'a run for every alert' if options.matched else 'no playbook matching'})"
    )


if __name__ == "__main__":
    main()
