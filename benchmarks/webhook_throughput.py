"""Durable single-alert webhooks per second, over those of an empty FastAPI endpoint on the same machine.

Both servers have uvicorn's settings of ``trainmedic serve``, and get the same requests by the same client, in turns, so
that a busy machine slows both. A webhook counts when its reply says that it is committed. By default no playbook
matches, which shows the cost of keeping an alert; with ``--matched`` each alert starts a run of a playbook in mode
observe. Debian's ``webhook``, if installed or named by ``--executor``, gets the same: it replies at once and then forks
a command, here ``true``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import uvloop

from benchmarks.peers import add_programs
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
"""Settings of ``trainmedic_server.http.listener``."""


def start_endpoint(directory: Path, kind: str) -> tuple[Program, str]:
    """Start the ``empty`` or the ``forking`` endpoint."""
    port = free_port()
    argv = [sys.executable, "-m", "uvicorn", f"benchmarks.{kind}_endpoint:app", "--port", str(port)]
    program = Program([*argv, *AS_SERVED], directory / f"{kind}.log", {"PYTHONPATH": os.fspath(ROOT)})
    url = f"http://127.0.0.1:{port}"
    return program.wait_for(f"{url}/openapi.json"), url


def requests(matched: bool) -> Iterator[bytes]:
    """Yield webhooks of Alertmanager's usual size, each with a new alert."""
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


@contextlib.contextmanager
def started_executor(directory: Path, program: str | Path) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yield its URL, and whether commands of answered webhooks still run."""
    (directory / "hooks.json").write_text(json.dumps([{"id": "webhook", "execute-command": "/bin/true"}]))
    port = free_port()
    argv = [program, "-hooks", directory / "hooks.json", "-ip", "127.0.0.1", "-port", str(port), "-urlprefix", ""]
    with Program(argv, directory / "executor.log") as running:
        pid = running.process.pid
        url = f"http://127.0.0.1:{port}"
        running.wait_for(url)
        yield url, lambda: any(each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/children"))


class Rates(NamedTuple):
    """Requests per second of one server, by round: answered, and acted on."""

    replied: list[float]
    done: list[float]


async def measure(urls: Sequence[str], options: argparse.Namespace, is_busy: Callable[[], bool]) -> list[Rates]:
    """Measure all in turns."""
    source = requests(options.matched)
    rates = [Rates([], []) for _ in urls]
    for round_number in range(options.rounds + 1):
        batch = list(islice(source, options.webhooks))
        for url, kept in zip(urls, rates, strict=True):
            began = time.monotonic()
            reached = await rate(url, batch, options.concurrency)
            while is_busy():
                await asyncio.sleep(0.002)
            if round_number > 0:  # the first round warms all up
                kept.replied.append(reached)
                kept.done.append(len(batch) / (time.monotonic() - began))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--webhooks", type=int, default=3000, help="in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--matched", action="store_true", help="let every alert start a run in mode observe")
    add_programs(parser, ["--executor"])
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        playbooks = directory / "playbooks"
        playbooks.mkdir()
        (playbooks / "benchmark.yaml").write_text(PLAYBOOK)
        server, ours = start_server(directory, playbooks=playbooks)
        stack.enter_context(server)
        endpoint, empty = start_endpoint(directory, "empty")
        stack.enter_context(endpoint)
        urls, is_busy = [empty, ours], lambda: False
        if options.executor:
            forking, is_busy = stack.enter_context(started_executor(directory, options.executor))
            urls.append(forking)
        nothing, durable, *others = uvloop.run(measure(urls, options, is_busy))
    beside = "".join(
        f"; {over(durable.replied, forked.done):.2f} of the {statistics.median(forked.done):.0f}/s for which the one"
        f" that forks has run its command (it replies to {statistics.median(forked.replied):.0f}/s before)"
        for forked in others
    )
    print(
        f"webhook throughput: {over(durable.replied, nothing.replied):.2f}"
        f" = {statistics.median(durable.replied):.0f} durable webhooks/s"
        f" / {statistics.median(nothing.replied):.0f} requests/s of an empty FastAPI endpoint{beside}"
        f" (median of {options.rounds} rounds of {options.webhooks}, {options.concurrency} connections,"
        f" {'a run for every alert' if options.matched else 'no playbook matching'})"
    )


def over(rates: Sequence[float], others: Sequence[float]) -> float:
    """Return the median ratio of the rounds."""
    return statistics.median(one / other for one, other in zip(rates, others, strict=True))


if __name__ == "__main__":
    main()
