"""Two servers on one PostgreSQL: webhooks through the one that stands by over those sent directly, and takeovers.

Rates are measured in turns over the same PostgreSQL, so a busy machine slows both; processor time is that of the
standby alone. A takeover is from the signal, or from the end of PostgreSQL's restart, to the next 200 from `/ready` of
any server.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import uvloop

from benchmarks.alert_storm import redis_server
from benchmarks.webhook_throughput import PLAYBOOK, rate, requests
from tests.support.cpu_time import cpu_time
from tests.support.live import Server
from tests.support.postgres import PostgresServer
from tests.support.programs import eventually
from tests.support.server_group import member, works


def through_standby(leader: Server, standby: Server, options: argparse.Namespace) -> None:
    assert standby.program is not None
    source: Iterator[bytes] = requests(matched=options.matched)
    direct: list[float] = []
    passed: list[float] = []
    used = 0.0
    for round_number in range(options.rounds + 1):
        for server, kept in ((leader, direct), (standby, passed)):
            before = cpu_time(standby.program.process.pid)
            batch = list(islice(source, options.webhooks))
            reached = uvloop.run(rate(f"http://127.0.0.1:{server.port}", batch, options.concurrency))
            if round_number > 0:  # the first round warms both up
                kept.append(reached)
                used += (cpu_time(standby.program.process.pid) - before).total if server is standby else 0.0
    ratio = statistics.median(one / other for one, other in zip(passed, direct, strict=True))
    print(
        f"through a standby: {ratio:.2f} = {statistics.median(passed):.0f} webhooks/s / {statistics.median(direct):.0f}"
        f" sent directly; {used / options.rounds / options.webhooks * 1e6:.0f} µs of processor time each in the standby"
    )


def all_there(servers: list[Server]) -> Server:
    """The one that works, once the others stand by."""
    eventually(lambda: all(server.ask("/health").status == 200 for server in servers), 60, "all are there", 0.05)
    return eventually(lambda: next(filter(works, servers), None), 60, "a server works", 0.05)


def takeover(servers: list[Server], begin: Callable[[Server], None], end: Callable[[Server], None]) -> float:
    """Seconds until another server works than the one that does now."""
    worked = all_there(servers)
    began = time.monotonic()
    begin(worked)
    left = [server for server in servers if server is not worked]
    eventually(lambda: any(map(works, left)), 90, "another works", 0.02)
    seconds = time.monotonic() - began
    end(worked)
    return seconds


def send(number: signal.Signals) -> Callable[[Server], None]:
    def to(server: Server) -> None:
        assert server.program is not None
        server.program.process.send_signal(number)

    return to


def start_again(server: Server) -> None:
    assert server.program is not None
    server.program.process.wait()
    server.start(wait=False)
    eventually(lambda: server.ask("/health").status == 200, 60, "started again", 0.05)


def go_on(server: Server) -> None:
    send(signal.SIGCONT)(server)
    eventually(lambda: server.ask("/ready").status == 503, 60, "stands by", 0.05)


def after_restart(servers: list[Server], postgres: PostgresServer) -> float:
    all_there(servers)
    postgres.stop()
    postgres.start()
    began = time.monotonic()
    eventually(lambda: any(map(works, servers)), 90, "a server works", 0.02)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--webhooks", type=int, default=2000, help="in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--matched", action="store_true", help="let every alert start a run in mode observe")
    parser.add_argument("--takeovers", type=int, default=5, help="of each kind")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, PostgresServer() as postgres:
        directory = Path(name)
        with redis_server(directory) as redis_url:
            database = postgres.database()
            servers = [member(directory / f"server-{n}", PLAYBOOK, database, redis_url) for n in range(2)]
            with servers[0]:
                eventually(lambda: works(servers[0]), 30, "the first works", 0.05)
                with servers[1]:
                    eventually(lambda: servers[1].ask("/history").status == 200, 30, "the second hands on", 0.05)
                    through_standby(*servers, options)
                    kinds: dict[str, Callable[[], float]] = {
                        "killed": lambda: takeover(servers, send(signal.SIGKILL), start_again),
                        "stopped": lambda: takeover(servers, send(signal.SIGSTOP), go_on),
                        "PostgreSQL restarted": lambda: after_restart(servers, postgres),
                    }
                    for kind, measured in kinds.items():
                        times = [measured() for _ in range(options.takeovers)]
                        told = f"median {statistics.median(times):.2f} s, longest {max(times):.2f} s"
                        print(f"takeover, {kind}: {told} ({options.takeovers} times)")


if __name__ == "__main__":
    main()
