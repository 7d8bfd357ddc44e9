"""Redis goes away under a running server: alerts are taken, commands wait, all resumes, nothing is done twice."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from structlog.testing import capture_logs

from tests.support.live import Job, Server
from tests.support.messages import delivery, resolved
from tests.support.programs import eventually
from trainmedic_server.adapters import embedded_redis

PLAYBOOK = """
playbook: slow-down
on: {alert: Spike}
target: job
steps:
  - {id: slow, action: job.scale_lr, with: {factor: 0.5}, timeout: 30s, undo: on_resolve}
  - {id: keep, action: job.checkpoint, timeout: 30s}
"""
HASTY = PLAYBOOK.replace("30s", "1s")
ALL = ["job.scale_lr 0.5", "job.checkpoint", "job.scale_lr 2"]


def test_commands_wait_for_a_redis_that_recovers_with_its_data(tmp_path: Path, own_redis: Any) -> None:
    """It is down when the alert fires and when it resolves: both get 200, and both are executed once."""
    redis = own_redis(tmp_path)
    redis.start()
    with Server(tmp_path / "server", PLAYBOOK, "--redis", redis.url) as server, Job("llm", redis.url) as job:
        eventually(lambda: server.ask("/ready").status == 200, 60, "ready")
        redis.kill()
        fired = delivery("Spike", "llm")
        assert server.ask("/webhook", fired).status == 200
        ready = eventually(lambda: (found := server.ask("/ready")).status == 503 and found, 60, "not ready")
        assert (ready.body["redis"]["ok"], ready.body["store"]["ok"]) == (False, True)
        assert server.ask("/health").status == 200
        time.sleep(2)
        assert [run["status"] for run in server.runs()] == ["running"]
        redis.start()
        assert server.closed_run()["status"] == "succeeded"
        eventually(lambda: server.ask("/ready").status == 200, 60, "ready again")
        redis.kill()
        assert server.ask("/webhook", resolved(fired)).status == 200
        time.sleep(0.5)
        redis.start()
        assert server.undone_run()["steps"][0]["undo"]["status"] == "done"
        assert job.done == ALL


def test_a_command_in_flight_survives_a_redis_that_lost_everything(tmp_path: Path, own_redis: Any) -> None:
    """It is sent but not applied when Redis returns empty: it is sent again, and applied once."""
    redis = own_redis(tmp_path)
    redis.start()
    with Server(tmp_path / "server", PLAYBOOK, "--redis", redis.url) as server, Job("llm", redis.url) as job:
        job.hold()
        fired = delivery("Spike", "llm")
        assert server.ask("/webhook", fired).status == 200
        time.sleep(0.5)
        for _ in range(2):  # once with the command in the job's hands, and once with the job gone on meanwhile
            redis.kill()
            for left in tmp_path.glob("appendonly*"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            job.go_on()
            time.sleep(1)
            redis.start()
        assert server.closed_run()["status"] == "succeeded"
        assert server.ask("/webhook", resolved(fired)).status == 200
        assert server.undone_run()["steps"][0]["undo"]["status"] == "done"
        assert job.done == ALL


def test_a_command_that_expires_in_an_outage_fails_its_run_and_is_undone(tmp_path: Path, own_redis: Any) -> None:
    """The reason names Redis; the undo waits until it can be sent, however many attempts that takes."""
    redis = own_redis(tmp_path)
    redis.start()
    with Server(tmp_path / "server", HASTY, "--redis", redis.url) as server, Job("llm", redis.url) as job:
        redis.kill()
        fired = delivery("Spike", "llm")
        assert server.ask("/webhook", fired).status == 200
        run = server.closed_run()
        assert run["status"] == "failed"
        assert "Redis is unavailable" in run["message"]
        assert run["steps"][0]["status"] == "unknown"
        assert server.ask("/webhook", resolved(fired)).status == 200
        time.sleep(1)
        redis.start()
        undo = server.undone_run()["steps"][0]["undo"]
        assert undo["status"] == "done"
        assert undo["output"].get("nothing_to_undo") is True
        assert job.done == []


def new_redis(server: Server, killed: Collection[int]) -> int | None:
    """The process id of the embedded Redis, once one is there that was not killed."""
    with suppress(OSError, ValueError):
        pid = int((server.state / "redis" / "redis.pid").read_text())
        return pid if pid not in killed else None
    return None


def test_an_embedded_redis_that_dies_is_restarted_with_its_data(tmp_path: Path) -> None:
    """A job that found it by the state directory finds it again; pending messages arrive."""
    with Server(tmp_path, PLAYBOOK) as server:
        url = (server.state / "redis.url").read_text().strip()
        with Job("llm", url) as job:
            fired = delivery("Spike", "llm")
            job.hold()
            assert server.ask("/webhook", fired).status == 200
            time.sleep(0.3)
            killed = set[int]()
            for _ in range(3):
                pid = eventually(lambda: new_redis(server, killed), 60, "a Redis that is not dead yet", 0.02)
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
                assert server.ask("/webhook", delivery("Other", "llm")).status == 200
                time.sleep(0.7)
            job.go_on()
            assert server.closed_run()["status"] == "succeeded"
            eventually(lambda: server.ask("/ready").status == 200, 60, "ready again")
            assert server.ask("/webhook", resolved(fired)).status == 200
            assert server.undone_run()["steps"][0]["undo"]["status"] == "done"
            assert job.done == ALL


async def test_the_wait_for_an_embedded_redis_is_short_again_after_it_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_redis, "_STABLE_SECONDS", 0.0)
    own = embedded_redis.EmbeddedRedis(tmp_path)
    url = await own.start()
    try:
        with capture_logs() as logged:
            for _ in range(3):
                pid = own.pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                async with asyncio.timeout(60):
                    while own.pid == pid or not await _answers(url):
                        await asyncio.sleep(0.02)
    finally:
        await own.stop()
    assert [entry["retry_in"] for entry in logged] == [0.1, 0.1, 0.1]


async def _answers(url: str) -> bool:
    async with redis.asyncio.Redis.from_url(url) as client:
        with suppress(redis.RedisError):
            return bool(await client.ping())
    return False
