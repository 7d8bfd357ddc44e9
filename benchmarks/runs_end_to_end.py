"""Runs per second from webhook to closed, with a command each to 500 training jobs, and the cost of each.

Server and Redis are real processes; ``--database`` selects PostgreSQL instead of SQLite. The jobs are simulated in this
process: one connection follows all streams and answers ``applied``. A job that has answered gets its next alert, so at
most 500 runs are open. The processor time of a process hardly depends on other load; the rate does.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import redis
import redis.asyncio
import uvloop

from benchmarks.alert_storm import redis_server
from benchmarks.sender import Connection, alert, webhook
from benchmarks.webhook_throughput import rate, start_endpoint
from tests.support.cpu_time import CpuTime, cpu_time
from tests.support.programs import start_server
from trainmedic.wire import envelope
from trainmedic.wire.envelope import CONSUMER_GROUP

PLAYBOOK = """\
playbook: end-to-end
on: {alert: EndToEnd}
target: job
steps:
  - action: job.scale_lr
    with: {factor: 0.5}
    timeout: 1m
"""


@dataclass
class Load:
    """The jobs, and the alerts about them."""

    jobs: int
    idle: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    started: int = 0
    answered: int = 0
    serial: Iterator[int] = field(default_factory=itertools.count)
    is_over: bool = False
    """Checked in addition to cancellation, which a call to Redis can lose."""

    def request(self, job: int) -> bytes:
        labels = {"alertname": "EndToEnd", "severity": "critical", "job_name": f"job-{job}"}
        return webhook([alert({**labels, "serial": str(next(self.serial))})])

    async def send(self, connection: Connection) -> None:
        """Send alerts for idle jobs until it is over."""
        while not self.is_over:
            job = await self.idle.get()
            exchange = await connection.send(self.request(job))
            if exchange.status != 200:
                raise SystemExit(f"a webhook was answered with {exchange.status}")
            if exchange.json()["runs"][0]["decision"] == "started":
                self.started += 1
            else:
                self.idle.put_nowait(job)  # its run before was not closed yet

    async def answer(self, client: Any) -> None:
        names = {envelope.job_commands(f"job-{job}"): job for job in range(self.jobs)}
        while not self.is_over:
            found = await client.xreadgroup(CONSUMER_GROUP, "job", dict.fromkeys(names, ">"), count=100, block=1000)
            pipe = client.pipeline(transaction=False)
            for stream, entries in found or ():
                for entry, fields in entries:
                    command = envelope.Command.decode(envelope.body_of(fields, b"command"))
                    of = command.target["job"]
                    reply = envelope.Reply(command.id, of, envelope.APPLIED, 0, at=datetime.now(UTC), ranks=1)
                    pipe.xadd(envelope.REPLIES, {"reply": reply.encode()}, maxlen=100_000, approximate=True)
                    pipe.xack(stream, CONSUMER_GROUP, entry)
                    pipe.xdel(stream, entry)
                    self.idle.put_nowait(names[stream.decode()])
                    self.answered += 1
            await pipe.execute()


@contextmanager
def prepared(url: str, jobs: int) -> Iterator[redis.Redis]:
    """Prepare a Redis in which each job is present."""
    with redis.Redis.from_url(url) as client:
        for job in range(jobs):
            client.xgroup_create(envelope.job_commands(f"job-{job}"), CONSUMER_GROUP, id="0", mkstream=True)
            presence = {
                "job": f"job-{job}",
                "world_size": 1,
                "ranks": [0],
                "at": envelope.write_time(datetime.now(UTC)),
            }
            client.set(envelope.job_presence(f"job-{job}"), json.dumps(presence))
        yield client


async def measure(
    url: str, redis_url: str, load: Load, processes: dict[str, int], options: argparse.Namespace
) -> tuple[float, int, dict[str, CpuTime]]:
    """Return seconds, runs and processor time of each process, after a tenth of the time for warming up."""
    for job in range(load.jobs):
        load.idle.put_nowait(job)
    client = redis.asyncio.Redis.from_url(redis_url, protocol=2)
    connections = [await Connection.open(url) for _ in range(options.concurrency)]
    tasks = [asyncio.create_task(load.send(connection)) for connection in connections]
    tasks.append(asyncio.create_task(load.answer(client)))

    async def for_seconds(seconds: float) -> None:
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    await for_seconds(options.seconds / 10)
    used = {name: cpu_time(pid) for name, pid in processes.items()}
    began, answered = time.monotonic(), load.answered
    await for_seconds(options.seconds)
    seconds, answered = time.monotonic() - began, load.answered - answered
    used = {name: cpu_time(pid) - used[name] for name, pid in processes.items()}
    load.is_over = True
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for connection in connections:
        connection.close()
    await client.aclose()
    return seconds, answered, used


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--concurrency", type=int, default=64, help="webhooks on their way at once")
    parser.add_argument("--database", help="a PostgreSQL; by default SQLite")
    parser.add_argument("--beside", action="store_true", help="measure an empty and a forking endpoint in the same run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "playbooks").mkdir()
        (directory / "playbooks" / "end-to-end.yaml").write_text(PLAYBOOK)
        with redis_server(directory) as redis_url, prepared(redis_url, options.jobs) as client:
            settings = ["--mode", "enforce", "--redis", redis_url]
            if options.database:
                settings += ["--database", options.database]
            server, url = start_server(directory, *settings, playbooks=directory / "playbooks")
            with server:
                processes = {"server": server.process.pid, "Redis": client.info("server")["process_id"]}
                load = Load(options.jobs)
                seconds, runs, used = uvloop.run(measure(url, redis_url, load, processes, options))
        others = [f"{kind} endpoint {beside(directory, kind):.0f}/s" for kind in ("empty", "forking") if options.beside]
    each = {name: f"{time.total / runs * 1e6:.0f} µs" for name, time in used.items()}
    main_thread, threads = (part / runs * 1e6 for part in (used["server"].main, used["server"].others))
    print(
        f"runs end to end: {runs / seconds:.0f}/s ({runs} in {seconds:.0f} s, {options.jobs} jobs simulated, server and"
        f" Redis real); processor time for each: server {each['server']} (main thread {main_thread:.0f}, others"
        f" {threads:.0f}), Redis {each['Redis']}{''.join('; ' + other for other in others)}"
    )


def beside(directory: Path, kind: str) -> float:
    """Return an endpoint's requests per second."""
    program, url = start_endpoint(directory, kind)
    with program:
        count = 3000 if kind == "empty" else 500
        requests = [webhook([alert({"alertname": "EndToEnd", "serial": str(number)})]) for number in range(count)]
        uvloop.run(rate(url, requests, 64))
        return uvloop.run(rate(url, requests, 64))


if __name__ == "__main__":
    main()
