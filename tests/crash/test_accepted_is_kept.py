"""Accepted means kept: under a flood, on a slow disk, and with SIGKILL in the middle of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.live import Server
from tests.support.messages import delivery

PLAYBOOK = """
playbook: watch
on: {alert: Spike}
mode: observe
target: job
steps:
  - {id: slow, action: job.scale_lr, with: {factor: 0.5}}
"""


@dataclass
class Flood:
    """Many clients that post deliveries of five alerts each, as fast as they are answered."""

    port: int
    names: Iterator[int] = field(default_factory=itertools.count)
    acknowledged: set[str] = field(default_factory=set)
    answers: Counter[int] = field(default_factory=Counter)
    waits: set[str] = field(default_factory=set)

    async def pour(self, clients: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(self._client(until) for _ in range(clients)))

    async def _client(self, until: float) -> None:
        while time.monotonic() < until:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                self.answers[0] += 1
                await asyncio.sleep(0.05)
                continue
            try:
                while time.monotonic() < until and await self._post(reader, writer):
                    pass
            except (OSError, asyncio.IncompleteReadError):
                self.answers[0] += 1
            finally:
                writer.close()

    async def _post(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Post one delivery; whether the connection can be used again."""
        jobs = [f"job-{next(self.names)}" for _ in range(5)]
        body = json.dumps(delivery("Spike", *jobs)).encode()
        head = ("POST /webhook HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}")
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        fields = dict(line.split(": ", 1) for line in headers.split("\r\n")[1:] if line)
        chunked = "content-length" not in fields
        if not chunked:
            await reader.readexactly(int(fields["content-length"]))
        status = int(headers.split()[1])
        self.answers[status] += 1
        if status == 200:
            self.acknowledged.update(jobs)
        else:
            self.waits.add(fields.get("retry-after", ""))
            await asyncio.sleep(0.05)
        return not chunked and fields.get("connection") != "close"


def recorded(server: Server) -> Counter[str]:
    """How many items the history has for each job."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/history", headers={"Accept": "application/x-ndjson"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return Counter(json.loads(line)["job"] for line in reply)


def peak_memory(server: Server) -> int:
    """The most memory that the process has held, in MiB."""
    assert server.program is not None
    status = Path(f"/proc/{server.program.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


async def test_a_flood_is_refused_or_stored_and_passes(tmp_path: Path, redis_url: str) -> None:
    """The disk takes 0.2 s per commit and the queue is short: 503 with Retry-After, and no 200 is lost."""
    program = (Path(__file__).with_name("slow_disk_server.py"), "0.2")
    with Server(tmp_path, PLAYBOOK, "--redis", redis_url, "--queue", "5", program=program) as server:
        flood = Flood(server.port)
        await flood.pour(clients=100, seconds=3)
        print(flood.answers, f"{peak_memory(server)} MiB")
        assert flood.answers.keys() == {200, 503}
        assert all(wait.isdecimal() and int(wait) > 0 for wait in flood.waits)
        assert (await asyncio.to_thread(server.ask, "/webhook", delivery("Spike", "after"))).status == 200
        items = await asyncio.to_thread(recorded, server)
        assert items == Counter([*flood.acknowledged, "after"]), "each acknowledged alert once, and no other"
        assert peak_memory(server) < 256


async def test_more_clients_than_connections_are_refused_and_the_server_recovers(
    tmp_path: Path, redis_url: str
) -> None:
    """All of a thousand clients that are answered 200 are in the history, and the server recovers afterwards."""
    with Server(tmp_path, PLAYBOOK, "--redis", redis_url) as server:
        flood = Flood(server.port)
        await flood.pour(clients=1000, seconds=3)
        print(flood.answers, f"{peak_memory(server)} MiB")
        assert flood.answers.keys() <= {0, 200, 503}
        assert flood.answers[200] > 0
        assert (await asyncio.to_thread(server.ask, "/webhook", delivery("Spike", "after"))).status == 200
        items = await asyncio.to_thread(recorded, server)
        assert flood.acknowledged <= items.keys()
        assert max(items.values()) == 1
        assert peak_memory(server) < 512


@pytest.mark.parametrize("seed", range(2))
async def test_acknowledged_alerts_survive_a_kill(tmp_path: Path, redis_url: str, seed: int) -> None:
    """SIGKILL at random moments of a flood: every alert of every 200 is in the history, once."""
    chance = random.Random(seed)
    with Server(tmp_path, PLAYBOOK, "--redis", redis_url) as server:
        flood = Flood(server.port)
        for _ in range(2 - seed):
            pouring = asyncio.create_task(flood.pour(clients=30, seconds=1.2))
            await asyncio.sleep(chance.uniform(0.3, 1.1))
            await asyncio.to_thread(server.kill)
            await pouring
            await asyncio.to_thread(server.start)
            items = await asyncio.to_thread(recorded, server)
            assert flood.acknowledged <= items.keys()
            assert max(items.values()) == 1
        print(flood.answers)
        assert flood.answers[200] > 10
