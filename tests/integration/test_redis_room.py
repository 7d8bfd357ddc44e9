"""How many clients of Redis a fleet takes: one for each agent and job, and room is left for the servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import uvloop

import trainmedic
from tests.support.agent_node import Node
from tests.support.messages import make_command
from tests.support.programs import eventually, start_server
from trainmedic.wire import envelope
from trainmedic.wire.connection import NoRoom, OutageLog, RedisConnection
from trainmedic_server.adapters import redis_connection
from trainmedic_server.errors import BusFull


def clients(url: str) -> int:
    """How many there are, without the one that asks."""
    with redis.Redis.from_url(url) as client:
        info: Any = client.info("clients")
    return int(info["connected_clients"]) - 1


@contextlib.contextmanager
def held(url: str, count: int) -> Iterator[None]:
    """So many clients that do nothing."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(redis.Redis.from_url(url)).ping()
        yield


def test_an_agent_has_one_connection(tmp_path: Path, redis_url: str) -> None:
    """This holds even after another thread than the one that waits has received and answered a command."""
    before = clients(redis_url)
    with Node(tmp_path / "node", redis_url) as node:
        assert node.do("gpu.power_limit")[0] == envelope.APPLIED
        assert clients(redis_url) == before + 1


def test_a_job_has_one_connection(redis_url: str) -> None:
    before = clients(redis_url)
    command = make_command()
    with trainmedic.connect(job="llm-1", redis_url=redis_url) as medic, redis.Redis.from_url(redis_url) as client:
        eventually(lambda: client.exists(envelope.job_presence("llm-1")), 60, "the presence")
        client.xadd(envelope.job_commands("llm-1"), {"command": command.encode()})

        def is_carried_out() -> bool:
            for each in medic.commands(1):
                each.applied()
            return any(
                envelope.Reply.of_entry(fields).status == envelope.APPLIED
                for _, fields in client.xrange(envelope.REPLIES)  # type: ignore[union-attr]
            )

        eventually(is_carried_out, 60, "the reply")
        assert clients(redis_url) == before + 2  # the job's, and the test's


def test_a_waiting_thread_gets_its_turn(redis_url: str) -> None:
    """Another thread takes one turn after the other, without a pause."""
    mine = RedisConnection(lambda: redis_url, OutageLog("a test"))
    others = mine.shared()
    stopping = threading.Event()

    def take_turns() -> None:
        while not stopping.is_set():
            with others.turn() as client:
                client.ping()
        others.close()

    thread = threading.Thread(target=take_turns, daemon=True)
    thread.start()
    answers: list[Any] = []

    def ask() -> None:
        for _ in range(20):
            with mine.turn() as client:
                answers.append(client.ping())
        mine.close()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(30)
    stopping.set()
    thread.join(30)
    assert answers == [True] * 20


def test_a_connection_that_broke_for_one_thread_is_reopened_for_all(redis_url: str) -> None:
    """A refusal by Redis of one thread's command breaks it for none."""
    one = RedisConnection(lambda: redis_url, OutageLog("a test"))
    other = one.shared()
    with one.turn() as client:
        client.set("text", "1")
    with other.turn() as same:
        assert same is client
    with pytest.raises(redis.ResponseError), one.turn() as same:
        same.xlen("text")
    with other.turn() as same:
        assert same is client
    with pytest.raises(redis.ConnectionError), one.turn():
        raise redis.ConnectionError("reset by peer")
    with other.turn() as another:
        assert another is not client
        assert another.get("text") == b"1"
    one.close()
    other.close()


def test_agents_and_jobs_leave_capacity_for_servers(tmp_path: Path, own_redis: Callable[..., Any]) -> None:
    """Near the limit a new one disconnects and waits for long; a server still gets in."""
    server = own_redis(tmp_path, "--maxclients", "40")
    server.start()
    connection = RedisConnection(lambda: server.url, OutageLog("a test"))
    with held(server.url, 37):
        with pytest.raises(NoRoom) as refused, connection.turn() as client:
            client.ping()
        assert connection.failed(refused.value) >= 10
        eventually(lambda: clients(server.url) == 37, 60, "that it has gone")  # and the one that asks is the 38th
    with connection.turn() as client:
        assert client.ping()
    connection.close()


def test_a_job_that_ends_reports_it_although_redis_is_full(tmp_path: Path, own_redis: Callable[..., Any]) -> None:
    """Its waiting connection is cut, so that nothing waits for commands; its notice uses another."""
    server = own_redis(tmp_path, "--maxclients", "40")
    server.start()
    medic = trainmedic.connect(job="llm-1", redis_url=server.url)
    with redis.Redis.from_url(server.url) as client:
        eventually(lambda: client.exists(envelope.job_presence("llm-1")), 60, "the presence")
        with held(server.url, 37):
            medic.close()
            assert not client.exists(envelope.job_presence("llm-1"))


def test_the_server_reports_that_redis_is_too_small(tmp_path: Path, own_redis: Callable[..., Any]) -> None:
    """It does so at /ready, by a metric and in its log, from its start on."""
    small = own_redis(tmp_path, "--maxclients", "200", "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    small.start()
    with held(small.url, 181):
        server, url = start_server(tmp_path / "server", "--redis", small.url, within=90)
        with server:
            detail = eventually(lambda: said(url) or None, 60, "what is wrong with Redis")
            with urllib.request.urlopen(f"{url}/metrics") as reply:
                metrics = reply.read().decode()
            log = server.log.read_text()
    assert "of at most 200" in detail
    assert "maxmemory-policy is allkeys-lru" in detail
    assert 'trainmedic_redis_used_share{of="clients"} 0.9' in metrics
    assert "Redis may not be large enough" in log


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_redis_that_accepts_no_more_clients_is_recognized(
    tmp_path: Path, own_redis: Callable[..., Any], run: Callable[..., Any]
) -> None:
    """Redis says so and closes the connection, mostly before the first command is sent. If the command comes first, the
    kernel may reset the connection and discard the answer, so a few of many refusals are only broken connections.
    """
    full = own_redis(tmp_path, "--maxclients", "40")
    full.start()

    async def refusals() -> list[bool]:
        client = redis_connection.open_client(full.url)
        heard = []
        for _ in range(50):
            try:
                await client.ping()
            except redis_connection.FAULTS as error:
                heard.append(isinstance(redis_connection.unavailable(error), BusFull))
        await client.aclose()
        return heard

    with held(full.url, 40):
        heard = run(refusals())
    assert len(heard) == 50
    assert heard.count(True) >= 40, heard


def test_a_server_started_with_a_full_redis_reports_it(tmp_path: Path, own_redis: Callable[..., Any]) -> None:
    """/ready and its log say what to do, and it continues when there is capacity."""
    full = own_redis(tmp_path, "--maxclients", "40")
    full.start()
    with contextlib.ExitStack() as stack:
        with held(full.url, 40):
            server, url = start_server(tmp_path / "server", "--redis", full.url, within=90, answers="/health")
            stack.enter_context(server)
            refused = redis_state(url)
        eventually(lambda: redis_state(url)["ok"], 60, "that there is room")
        log = server.log.read_text()
    words = "takes no more clients: raise its maxclients, and its limit of open files"
    assert refused == {"ok": False, "detail": f"Redis {words}", "caution": False}
    assert f"it {words}" in log
    assert "Traceback" not in log


def test_a_client_without_capacity_reports_it(tmp_path: Path, own_redis: Callable[..., Any], caplog: Any) -> None:
    """An agent or job does so even if its connection had broken in another way before."""
    full = own_redis(tmp_path, "--maxclients", "40")
    full.start()
    connection = RedisConnection(lambda: full.url, OutageLog("a test"))
    connection.failed(redis.ConnectionError("reset by peer"))
    with held(full.url, 40):
        with pytest.raises(redis.ConnectionError) as refused, connection.turn() as client:
            client.ping()
        assert connection.failed(refused.value) >= 10
    connection.close()
    assert "no connection to Redis (it takes no more clients: raise its maxclients" in caplog.messages[-1]


def redis_state(url: str) -> Any:
    """What /ready says of Redis."""
    try:
        with urllib.request.urlopen(f"{url}/ready") as reply:
            return json.load(reply)["redis"]
    except urllib.error.HTTPError as error:
        return json.load(error)["redis"]


def said(url: str) -> str:
    """What /ready says of Redis besides that it answers, once it says of clients."""
    detail = str(redis_state(url)["detail"])
    return detail if "clients" in detail else ""
