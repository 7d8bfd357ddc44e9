"""Cost of a fleet for server and Redis, delays of commands and webhooks, and a storm.

Server and Redis are real processes, with signing. The agents and jobs are simulated (``fleet_members``), each with its
own connection, in one process on the same machine. CPU is counted by process; times include other load.

For `--seconds`, webhooks arrive at `--rate` per second, each with an alert; every tenth leads to a command to a node.
In the storm, nodes are down, and all of their GPUs and jobs report.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import redis
import uvloop

from benchmarks.alert_storm import redis_server
from benchmarks.fleet_members import GPUS, KEY, gpu
from benchmarks.sender import Connection, Exchange, alert, get, send_all, webhook
from tests.support.programs import PYTHON_PATH, Program, eventually, start_server

PLAYBOOKS = """\
playbook: ask-the-node
on: {alert: Question}
target: node
steps: [{action: node.facts, timeout: 1m}]
---
playbook: node-is-down
on: {alert: NodeDown}
target: node
steps: [{action: node.facts, timeout: 1m}]
---
playbook: gpu-is-lost
on: {alert: GPULost}
target: node
steps: [{action: node.facts, timeout: 1m}]
---
playbook: save-the-job
on: {alert: JobStalled}
target: job
steps: [{action: job.checkpoint, timeout: 1m}]
"""
_TICKS = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    cpu_seconds: float
    rss_mb: float
    peak_mb: float


def usage(pid: int) -> Usage:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    rss, peak = (int(status[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return Usage((int(fields[11]) + int(fields[12])) / _TICKS, rss, peak)


class Processes(NamedTuple):
    """Process IDs of the measurement."""

    server: int
    redis: int
    fleet: int

    def used(self) -> list[Usage]:
        return [usage(pid) for pid in self]


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else float("nan")


def in_ms(values: Sequence[float]) -> str:
    """Format the median, the 99th percentile and the maximum."""
    median, late, worst = (1e3 * each for each in (percentile(values, 0.5), percentile(values, 0.99), max(values)))
    return f"p50 {median:.0f} ms, p99 {late:.0f} ms, worst {worst:.0f} ms"


# --- the steady part ------------------------------------------------------------------------------------------


async def steady(url: str, seconds: float, rate: int, agents: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each webhook, and of each run with a command, by the server's history."""
    connections = [await Connection.open(url) for _ in range(32)]
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for connection in connections:
        free.put_nowait(connection)
    exchanges: list[Exchange] = []
    waited: list[float] = []
    nodes = random.Random(1).sample(range(agents), min(agents, int(seconds * rate / 10) + 1))
    clock = asyncio.get_running_loop().time

    async def send(request: bytes, due: float) -> None:
        connection = await free.get()
        exchanges.append(await connection.send(request))
        waited.append(clock() - due)  # also for a connection: a slow server makes those behind it wait
        free.put_nowait(connection)

    began = clock()
    tasks = []
    for number in range(int(seconds * rate)):
        labels = {"alertname": "Unknown", "node": f"node-{number % agents}", "n": str(number)}
        if number % 10 == 0:
            labels = {"alertname": "Question", "node": f"node-{nodes[number // 10 % len(nodes)]}"}
        due = began + number / rate
        await asyncio.sleep(max(due - clock(), 0))
        tasks.append(asyncio.create_task(send(webhook([alert(labels)]), due)))
    await asyncio.gather(*tasks)
    for connection in connections:
        connection.close()
    if any(exchange.status != 200 for exchange in exchanges):
        raise SystemExit("not every webhook was accepted")
    runs = await closed_runs(url, "ask-the-node", 120)
    return waited, [run["duration_ms"] / 1e3 for run in runs if run["status"] == "succeeded"]


async def closed_runs(url: str, playbook: str, within: float) -> list[Any]:
    """Return a playbook's newest 1,000 runs, once none is open."""
    connection = await Connection.open(url)
    try:
        async with asyncio.timeout(within):
            while (await connection.send(get(f"/history?playbook={playbook}&open=true&limit=1"))).json()["items"]:
                await asyncio.sleep(0.1)
        return list((await connection.send(get(f"/history?playbook={playbook}&limit=1000"))).json()["items"])
    finally:
        connection.close()


# --- the storm ------------------------------------------------------------------------------------------------


def storm_requests(nodes: int, jobs: int) -> list[bytes]:
    """Return the alerts of every node, its GPUs, and the jobs, grouped by alertname, 100 in a webhook."""
    down = [{"alertname": "NodeDown", "node": f"node-{node}"} for node in range(nodes)]
    lost = [
        {"alertname": "GPULost", "node": f"node-{node}", "UUID": gpu(node, index)}
        for node in range(nodes)
        for index in range(GPUS)
    ]
    stalled = [{"alertname": "JobStalled", "job_name": f"job-{number}"} for number in range(jobs)]
    return [
        webhook([alert(labels) for labels in group[first : first + 100]])
        for group in (down, lost, stalled)
        for first in range(0, len(group), 100)
    ]


async def storm(url: str, nodes: int, jobs: int) -> str:
    requests = storm_requests(nodes, jobs)
    began = datetime.now(UTC).timestamp()
    exchanges = await send_all(url, requests, concurrency=4)
    if any(exchange.status != 200 for exchange in exchanges):
        raise SystemExit("not every webhook of the storm was accepted")
    recorded = max(exchange.replied_at for exchange in exchanges) - began
    ends, runs = [], 0
    for playbook in ("node-is-down", "gpu-is-lost", "save-the-job"):
        found = await closed_runs(url, playbook, 300)
        runs += sum(run["status"] == "succeeded" for run in found)
        ends += [
            datetime.fromisoformat(run["timestamp"]).timestamp() + (run["duration_ms"] or 0) / 1e3 for run in found
        ]
    return (
        f"storm of {nodes} nodes, {nodes * GPUS} GPU alerts and {jobs} jobs: recorded in {recorded:.1f} s (a webhook of"
        f" 100: {in_ms([each.seconds for each in exchanges])}), the last of {runs} runs that succeeded closed after"
        f" {max(ends) - began:.1f} s"
    )


# --- the measurement ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fleet(directory: Path, options: argparse.Namespace) -> Iterator[tuple[str, str, Processes]]:
    """Yield the URLs of a server and its Redis, with all members connected."""
    (directory / "playbooks").mkdir()
    for text in PLAYBOOKS.split("---\n"):
        (directory / "playbooks" / f"{text.split()[1]}.yaml").write_text(text)
    with redis_server(directory, "--maxclients", str(options.agents + options.jobs + 64)) as redis_url:
        argv = [sys.executable, "-m", "benchmarks.fleet_members", redis_url, "--agents", str(options.agents)]
        argv += ["--jobs", str(options.jobs), "--ranks", str(options.ranks)]
        with Program(argv, directory / "fleet.log", {"PYTHONPATH": PYTHON_PATH}) as members:
            eventually(lambda: members.log.read_text().startswith("ready"), 300, "the fleet")
            settings = ("--mode", "enforce", "--redis", redis_url, "--breaker-min-nodes", str(options.breaker))
            key = {"TRAINMEDIC_SIGNING_KEY": KEY}
            server, url = start_server(
                directory, *settings, environment=key, playbooks=directory / "playbooks", within=300
            )
            with server, redis.Redis.from_url(redis_url) as client:
                info: Any = client.info("server")
                yield url, redis_url, Processes(server.process.pid, info["process_id"], members.process.pid)


async def sizes(url: str) -> str:
    """Return duration and size of the lists."""
    texts = []
    connection = await Connection.open(url)
    for path in ("/agents", "/jobs", "/ready", "/now", "/metrics"):
        exchange = await connection.send(get(path))
        texts.append(f"{path} {len(exchange.body) / 1e6:.2f} MB in {exchange.seconds * 1e3:.0f} ms")
    connection.close()
    return ", ".join(texts)


def measure(url: str, redis_url: str, processes: Processes, options: argparse.Namespace) -> None:
    """Print the results of the steady part and the storm."""
    before, began = processes.used(), time.monotonic()
    webhooks, commands = uvloop.run(steady(url, options.seconds, options.rate, options.agents))
    after, took = processes.used(), time.monotonic() - began
    load = os.getloadavg()[0]
    print(f"{options.agents} agents, {options.jobs} jobs of {options.ranks} ranks, {took:.0f} s, load {load:.1f}")
    for process, was, now in zip(Processes._fields, before, after, strict=True):
        cores = (now.cpu_seconds - was.cpu_seconds) / took
        print(f"  {process}: {cores:.2f} cores, {now.rss_mb:.0f} MB (peak {now.peak_mb:.0f})")
    with redis.Redis.from_url(redis_url) as client:
        info: Any = client.info()
    print(
        f"  Redis says: {info['connected_clients']} clients, {info['used_memory'] / 1e6:.0f} MB,"
        f" {info['instantaneous_ops_per_sec']} operations/s"
    )
    print(f"  {len(webhooks)} webhooks: {in_ms(webhooks)}; {len(commands)} runs with a command: {in_ms(commands)}")
    print(f"  {uvloop.run(sizes(url))}")
    nodes, jobs = min(options.nodes_down, options.agents), min(options.jobs_down, options.jobs)
    print(f"  {uvloop.run(storm(url, nodes, jobs))}")
    end = processes.used()[0]
    used = end.cpu_seconds - after[0].cpu_seconds
    print(f"  server in the storm: {used:.1f} s of CPU, {end.rss_mb:.0f} MB (peak {end.peak_mb:.0f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=160)
    parser.add_argument("--ranks", type=int, default=50, help="of a job")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rate", type=int, default=100, help="webhooks a second")
    parser.add_argument("--nodes-down", type=int, default=500)
    parser.add_argument("--jobs-down", type=int, default=200)
    parser.add_argument("--breaker", type=int, default=1_000_000, help="nodes before the breaker looks at their share")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, fleet(Path(name), options) as (url, redis_url, processes):
        measure(url, redis_url, processes, options)


if __name__ == "__main__":
    main()
