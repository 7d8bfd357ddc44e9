"""Seconds from a storm's first webhook to the last command in Redis, and the replies' 99th percentile.

Every alert names another job, and a playbook with one ``job.*`` step matches them all, in mode enforce. A command's
stream entry has its time, so reading them afterwards costs the measurement nothing.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
import uvloop

from benchmarks.sender import Exchange, alert, send_all, webhook
from tests.support.programs import Program, eventually, free_port, start_server
from trainmedic.wire.envelope import job_commands

PLAYBOOK = """\
playbook: storm
on: {alert: Storm}
target: job
steps:
  - action: job.scale_lr
    with: {factor: 0.5}
    timeout: 10m
"""


@contextmanager
def redis_server(directory: Path, *options: str) -> Iterator[str]:
    """Run a Redis with an append-only file, like the embedded one."""
    port = free_port()
    binary = shutil.which("redis-server") or shutil.which("valkey-server") or "redis-server"
    argv = [binary, "--port", str(port), "--bind", "127.0.0.1", "--appendonly", "yes", "--save", ""]
    with Program([*argv, "--dir", str(directory), *options], directory / "redis.log"):
        url = f"redis://127.0.0.1:{port}"
        with redis.Redis.from_url(url) as client:
            eventually(lambda: answers(client), 10, "redis-server", every=0.02)
        yield url


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def deliveries(alerts: int, count: int) -> list[bytes]:
    """Return `count` webhooks with `alerts` alerts, each about another job."""
    each = alerts // count
    numbers = [range(first, first + each) for first in range(0, each * count, each)]
    return [
        webhook([alert({"alertname": "Storm", "severity": "critical", "job_name": f"job-{n}"}) for n in group])
        for group in numbers
    ]


def command_times(client: redis.Redis, jobs: int, within: float) -> list[float]:
    """Return the first command's time of each job, in seconds since the epoch."""
    deadline = time.monotonic() + within
    while (there := client.dbsize()) < jobs:  # one key for each stream; asking costs next to nothing
        if time.monotonic() > deadline:
            raise SystemExit(f"only about {there} of {jobs} commands reached Redis within {within:g} s")
        time.sleep(0.05)
    streams = [job_commands(f"job-{number}") for number in range(jobs)]
    eventually(lambda: client.exists(*streams) == jobs, within, "the last commands", every=0.05)
    pipe = client.pipeline(transaction=False)
    for stream in streams:
        pipe.xrange(stream, count=1)
    return [int(entries[0][0].partition(b"-")[0]) / 1000 for entries in pipe.execute()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--alerts", type=int, default=10_000)
    parser.add_argument("--deliveries", type=int, default=100)
    parser.add_argument("--concurrency", type=int, default=10, help="webhooks on their way at once")
    parser.add_argument("--within", type=float, default=120, help="give up after this many seconds")
    options = parser.parse_args()
    requests = deliveries(options.alerts, options.deliveries)
    jobs = options.alerts // options.deliveries * options.deliveries
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "playbooks").mkdir()
        (directory / "playbooks" / "storm.yaml").write_text(PLAYBOOK)
        with redis_server(directory) as redis_url:
            settings = ("--mode", "enforce", "--redis", redis_url)
            server, url = start_server(directory, *settings, playbooks=directory / "playbooks")
            with server, redis.Redis.from_url(redis_url) as client:
                exchanges: list[Exchange] = uvloop.run(send_all(url, requests, options.concurrency))
                refused = sum(exchange.status != 200 for exchange in exchanges)
                if refused:
                    raise SystemExit(f"{refused} of {len(requests)} webhooks were not accepted")
                last = max(command_times(client, jobs, options.within))
    seconds = last - min(exchange.sent_at for exchange in exchanges)
    slowest = statistics.quantiles((exchange.seconds for exchange in exchanges), n=100, method="inclusive")[98]
    print(
        f"alert storm: {seconds:.2f} s from the first webhook to the last command in Redis,"
        f" p99 of the replies {slowest * 1000:.0f} ms"
        f" ({jobs} alerts in {len(requests)} webhooks over {options.concurrency} connections,"
        f" {jobs / seconds:.0f} commands/s)"
    )


if __name__ == "__main__":
    main()
