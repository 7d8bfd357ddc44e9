"""Runs a second, processor time and a storm's 99th percentile of this checkout, over those of another revision.

Both servers get the same requests by the same client in turns, so that other work on the machine slows both. Each
ratio is the median over the rounds, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import redis
import uvloop

from benchmarks import alert_storm, webhook_throughput
from benchmarks.sender import send_all
from benchmarks.unattended.trees import HERE, Tree, checked_out
from tests.support.programs import start_server

_TICKS = os.sysconf("SC_CLK_TCK")  # of processor time in a second


class Runs(NamedTuple):
    per_second: float
    cpu: float  # seconds for each run


class Storm(NamedTuple):
    seconds: float  # from the first webhook to the last command in Redis
    p99: float  # seconds, of the replies


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def runs_of(trees: Sequence[Tree], directory: Path, webhooks: int, rounds: int) -> list[list[Runs]]:
    """Return the rounds of each tree: webhooks of one alert each, which starts a run in mode observe."""
    playbooks = directory / "playbooks"
    playbooks.mkdir(parents=True)
    (playbooks / "benchmark.yaml").write_text(webhook_throughput.PLAYBOOK)
    source, found = webhook_throughput.requests(True), [list[Runs]() for _ in trees]
    with ExitStack() as stack:
        servers = []
        for number, tree in enumerate(trees):
            environment = {"PYTHONPATH": tree.python_path}
            server, url = start_server(directory / str(number), environment=environment, playbooks=playbooks)
            servers.append((stack.enter_context(server).process.pid, url))
        for round_number in range(rounds + 1):
            batch = list(islice(source, webhooks))
            for (pid, url), kept in zip(servers, found, strict=True):
                before = processor_seconds(pid)
                rate = uvloop.run(webhook_throughput.rate(url, batch, 64))
                if round_number > 0:  # the first round warms all up
                    kept.append(Runs(rate, (processor_seconds(pid) - before) / webhooks))
    return found


def storm(tree: Tree, directory: Path, alerts: int) -> Storm:
    playbooks = directory / "playbooks"
    playbooks.mkdir(parents=True)
    (playbooks / "storm.yaml").write_text(alert_storm.PLAYBOOK)
    with alert_storm.redis_server(directory) as redis_url:
        environment, settings = {"PYTHONPATH": tree.python_path}, ("--mode", "enforce", "--redis", redis_url)
        server, url = start_server(directory, *settings, environment=environment, playbooks=playbooks)
        with server, redis.Redis.from_url(redis_url) as client:
            exchanges = uvloop.run(send_all(url, alert_storm.deliveries(alerts, 100), 10))
            if any(exchange.status != 200 for exchange in exchanges):
                raise SystemExit("a webhook was not accepted")
            last = max(alert_storm.command_times(client, alerts, 300))
    seconds = [exchange.seconds for exchange in exchanges]
    p99 = statistics.quantiles(seconds, n=100, method="inclusive")[98]
    return Storm(last - min(exchange.sent_at for exchange in exchanges), p99)


def over(ours: Sequence[float], theirs: Sequence[float]) -> str:
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("revision")
    parser.add_argument("--webhooks", type=int, default=3000, help="in each round")
    parser.add_argument("--alerts", type=int, default=10_000, help="of a storm, in 100 webhooks")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        checked_out(options.revision, Path(name) / "tree") as tree,
    ):
        ours, theirs = runs_of((HERE, tree), Path(name) / "runs", options.webhooks, options.rounds)
        storms = [
            [
                storm(each, Path(name) / f"storm-{turn}-{place}", options.alerts)
                for place, each in enumerate((HERE, tree))
            ]
            for turn in range(options.rounds)
        ]
    beside = f"this checkout over {options.revision}, {options.rounds} rounds"
    print(f"runs a second: {over([run.per_second for run in ours], [run.per_second for run in theirs])}, {beside}")
    print(f"processor time of a run: {over([run.cpu for run in ours], [run.cpu for run in theirs])}")
    print(f"a storm's p99: {over([here.p99 for here, _ in storms], [there.p99 for _, there in storms])}")
    print(f"a storm's seconds: {over([here.seconds for here, _ in storms], [there.seconds for _, there in storms])}")


if __name__ == "__main__":
    main()
