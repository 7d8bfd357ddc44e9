"""How a real process of a job ends, and what the server makes of it: real Redis, real signals, signed messages."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from tests.support.messages import KEY
from tests.support.programs import eventually
from trainmedic.wire import envelope, notice
from trainmedic.wire.notice import Notice
from trainmedic.wire.reading import read_object
from trainmedic.wire.signing import Signer, unseal
from trainmedic_server import telemetry
from trainmedic_server.adapters.redis_bus import RedisBus
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.domain.job_life import GONE_AFTER
from trainmedic_server.engine.job_watch import JobWatch

JOB = """
import sys, time
import trainmedic

medic = trainmedic.connect(metrics_port=None)
print("connected", flush=True)
sys.stdin.readline()
{end}
"""
SIGNER = Signer.of(KEY.encode())


class Process:
    """A job that ends in its own way once it is let."""

    def __init__(self, url: str, end: str) -> None:
        variables = {"TRAINMEDIC_JOB": "dying", "TRAINMEDIC_REDIS_URL": url, "TRAINMEDIC_SIGNING_KEY": KEY}
        self._popen = subprocess.Popen(
            [sys.executable, "-c", JOB.format(end=end)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **variables},
        )
        assert self._popen.stdout is not None
        assert self._popen.stdout.readline() == "connected\n"

    def let_end(self) -> int:
        self._popen.communicate("\n", timeout=60)
        return self._popen.returncode

    def kill(self, number: int) -> None:
        self._popen.send_signal(number)
        self._popen.communicate(timeout=60)


class Watching:
    """A watch whose time passes when it is told to."""

    def __init__(self, bus: RedisBus) -> None:
        self.metrics = telemetry.Metrics()
        self.store = InMemoryStore()
        clock = SystemClock()
        self._skipped = 0.0
        self._watch = JobWatch(bus, self.store, clock, self.metrics, lambda span: clock.now() - span, self._elapsed)

    async def look(self, later: float = 0.0) -> None:
        self._skipped += later
        await self._watch.look()

    async def pass_by(self) -> None:
        """As long as it takes until a job counts as gone, in looks of ten seconds."""
        for _ in range(int(GONE_AFTER.total_seconds() / 10) + 2):
            await self.look(10.0)

    async def events(self) -> list[tuple[str, str]]:
        events = await self.store.events_after(0, 1000)
        return [(event.kind, event.data.get("reason", "")) for event in events]

    def _elapsed(self) -> float:
        return self._skipped


@pytest.fixture
def client(redis_server: Any) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_server.url) as connected:
        yield connected


@pytest.fixture
def watching(bus: RedisBus) -> Watching:
    return Watching(bus)


def start(redis_server: Any, client: redis.Redis, end: str = "") -> Process:
    process = Process(redis_server.url, end)
    eventually(lambda: client.exists(envelope.job_presence("dying")), 60, "the presence")
    return process


def vanish(client: redis.Redis) -> None:
    """The presence expires, as it does by itself after 15 seconds."""
    client.delete(envelope.job_presence("dying"))


@pytest.mark.parametrize(
    ("end", "event"),
    [
        ("", ("job_ended", "")),
        ("sys.exit(0)", ("job_ended", "")),
        ("medic.close()", ("job_ended", "")),
        ("raise ValueError('a secret')", ("job_failed", "its process ended by ValueError")),
        ("with medic: raise MemoryError", ("job_failed", "its process ended by MemoryError")),
        ("with medic: sys.exit(3)", ("job_failed", "its process exited with an error")),
    ],
)
async def test_a_job_reports_how_it_ends(
    redis_server: Any, client: redis.Redis, bus: RedisBus, watching: Watching, end: str, event: tuple[str, str]
) -> None:
    """It ends normally or by an error, of which only the kind is reported; then it is gone, or not."""
    process = start(redis_server, client, end)
    await watching.look()
    process.let_end()
    assert not client.exists(envelope.job_presence("dying"))
    await _arrival(bus)
    await watching.pass_by()
    expected = [event] if event[0] == "job_ended" else [event, ("job_gone", event[1])]
    assert await watching.events() == expected


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_a_killed_job_reports_nothing_and_is_gone(
    redis_server: Any, client: redis.Redis, watching: Watching, number: signal.Signals
) -> None:
    """It is killed by the kernel, a user, or its launcher because another rank has died."""
    process = start(redis_server, client)
    await watching.look()
    process.kill(number)
    vanish(client)
    await watching.pass_by()
    assert [kind for kind, _ in await watching.events()] == ["job_gone"]


async def test_a_forged_goodbye_does_not_hide_a_death(
    redis_server: Any, client: redis.Redis, bus: RedisBus, watching: Watching
) -> None:
    """It is unsigned, signed by another job, or the genuine one of the previous process."""
    first = start(redis_server, client)
    await watching.look()
    first.let_end()
    [(_, fields)] = client.xrange(envelope.REPLIES)
    await _arrival(bus)
    await watching.look()
    second = start(redis_server, client)
    await watching.look()
    instance = _instance(client)
    second.kill(signal.SIGKILL)
    vanish(client)
    forged = Notice("dying", notice.ENDED, instance, 1, envelope.utc_now()).encode()
    client.xadd(envelope.REPLIES, fields)
    client.xadd(envelope.REPLIES, {notice.FIELD: forged})
    client.xadd(envelope.REPLIES, {notice.FIELD: forged, **Signer.of(b"another job's key").fields(forged)})
    await _arrival(bus)
    await watching.pass_by()
    assert [kind for kind, _ in await watching.events()] == ["job_ended", "job_gone"]


async def test_a_notice_stays_in_redis_until_it_is_stored(
    redis_server: Any, client: redis.Redis, bus: RedisBus, watching: Watching
) -> None:
    """If the server is killed before that, it finds the notice again."""
    start(redis_server, client).let_end()
    await _arrival(bus)
    assert client.xlen(envelope.REPLIES) == 1
    await watching.look()
    await _until(lambda: client.xlen(envelope.REPLIES) == 0)


def _instance(client: redis.Redis) -> str:
    raw: Any = client.get(envelope.job_presence("dying"))
    return str(read_object(unseal(raw).raw)["instance"])


async def _arrival(bus: RedisBus) -> None:
    """Wait until a notice has come to the server."""
    await _until(lambda: bool(bus.notices()))


async def _until(is_so: Callable[[], bool]) -> None:
    """Wait while the server works."""
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.1)
