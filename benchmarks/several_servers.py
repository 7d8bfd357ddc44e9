"""Several servers on one PostgreSQL: webhooks to any of them over those to the leader, and takeovers.

Rates are measured in turns with the same servers, so a busy machine slows all of them; a webhook's processor time says
more then. One rate is of webhooks to the leader alone; each other is of as many connections, shared evenly by so many
servers, of which all but one forward. A takeover is from the loss of the leader, or from the end of PostgreSQL's
restart, to the next 200 from `/ready` of another server.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import uvloop

from benchmarks.alert_storm import redis_server
from benchmarks.sender import send_all
from benchmarks.webhook_throughput import PLAYBOOK, requests
from tests.support.cpu_time import cpu_time
from tests.support.live import Server
from tests.support.postgres import PostgresServer
from tests.support.programs import eventually
from tests.support.server_group import Servers, member, trouble, works

TAKEOVERS = {
    "killed": "kill",
    "stopped": "hang",
    "its connections end": "cut",
    "cut off in silence": "silence",
    "PostgreSQL restarted": "restart",
}


class ProcessorTime(NamedTuple):
    """Microseconds for each webhook."""

    main: float
    """Main thread of the leader."""
    others: float
    """Its other threads, mainly the one that writes to PostgreSQL."""
    standbys: float
    session: float
    """PostgreSQL's process of the writing session."""


class Rates:
    """Results of webhooks to the first so many of `servers`, of which the first leads."""

    def __init__(self, servers: Sequence[Server], session: int) -> None:
        self._servers, self._session = servers, session
        self._reached: dict[int, list[float]] = {}
        self._used: dict[int, list[ProcessorTime]] = {}

    async def send(self, count: int, batch: Sequence[bytes], concurrency: int) -> None:
        """Send each of `count` servers its share of the batch over its share of the connections."""
        before = self._processor_time()
        parts = [
            send_all(f"http://127.0.0.1:{server.port}", batch[n::count], max(1, concurrency // count))
            for n, server in enumerate(self._servers[:count])
        ]
        exchanges = [exchange for part in await asyncio.gather(*parts) for exchange in part]
        if refused := [exchange for exchange in exchanges if exchange.status != 200]:
            raise SystemExit(f"{len(refused)} of {len(batch)} webhooks were not accepted: {refused[0].status}")
        seconds = max(exchange.replied_at for exchange in exchanges) - min(exchange.sent_at for exchange in exchanges)
        self._reached.setdefault(count, []).append(len(batch) / seconds)
        used = [after - then for after, then in zip(self._processor_time(), before, strict=True)]
        self._used.setdefault(count, []).append(ProcessorTime(*(each / len(batch) * 1e6 for each in used)))

    def told(self) -> Iterator[str]:
        """Yield a line for each count, without the first round, a warm-up."""
        direct = self._reached[1][1:]
        for count, reached in self._reached.items():
            ratio = statistics.median(one / other for one, other in zip(reached[1:], direct, strict=True))
            used = ProcessorTime(*(statistics.median(each) for each in zip(*self._used[count][1:], strict=True)))
            yield (
                f"webhooks to any of {count}: {ratio:.2f} = {statistics.median(reached[1:]):.0f} a second"
                f" / {statistics.median(direct):.0f} to the one that works; processor time of each: {used.main:.0f} µs"
                f" in its main thread and {used.others:.0f} in its others, {used.session:.0f} in the session of"
                f" PostgreSQL that writes, {used.standbys:.0f} in those that hand on"
            )

    def _processor_time(self) -> ProcessorTime:
        pids = [server.program.process.pid for server in self._servers if server.program is not None]
        works, standbys = cpu_time(pids[0]), sum(cpu_time(pid).total for pid in pids[1:])
        return ProcessorTime(works.main, works.others, standbys, cpu_time(self._session).total)


def through_any(directory: Path, postgres: PostgresServer, redis: str, options: argparse.Namespace) -> None:
    database = postgres.database()
    servers = [member(directory / f"server-{n}", PLAYBOOK, database, redis) for n in range(max(options.servers))]
    with ExitStack() as stack:
        stack.enter_context(servers[0])
        eventually(lambda: works(servers[0]), 60, "the first works", 0.05)
        for server in servers[1:]:
            stack.enter_context(server)
            eventually(lambda server=server: server.ask("/history").status == 200, 60, "another hands on", 0.05)
        [[session]] = postgres.ask("SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted")
        rates, source = Rates(servers, session), requests(matched=options.matched)
        for _ in range(options.rounds + 1):
            for count in sorted({1, *options.servers}):
                uvloop.run(rates.send(count, list(islice(source, options.webhooks)), options.concurrency))
        for line in rates.told():
            print(line, flush=True)


def takeovers(directory: Path, postgres: PostgresServer, redis: str, options: argparse.Namespace) -> None:
    with Servers(directory, PLAYBOOK, postgres.database(), redis, "--takeover-after", "8s") as servers:
        for name, kind in TAKEOVERS.items():
            times: list[float] = []
            for _ in range(options.takeovers):
                servers.wait_for_all()
                times.append(trouble(kind, servers, postgres))
            told = f"median {statistics.median(times):.2f} s, longest {max(times):.2f} s"
            print(f"takeover, {name}: {told} ({options.takeovers} times)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--servers", type=int, nargs="+", default=[2], help="to how many servers webhooks are sent")
    parser.add_argument("--webhooks", type=int, default=2000, help="in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--matched", action="store_true", help="let every alert start a run in mode observe")
    parser.add_argument("--takeovers", type=int, default=3, help="of each kind")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, PostgresServer() as postgres:
        directory = Path(name)
        with redis_server(directory) as redis:
            through_any(directory / "rates", postgres, redis, options)
            if options.takeovers:
                takeovers(directory / "takeovers", postgres, redis, options)


if __name__ == "__main__":
    main()
