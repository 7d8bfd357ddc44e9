"""The run store fails under a running server: no 200 for what is not kept, and no known outcome lost."""

from __future__ import annotations

import resource
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import RedisServer
from tests.support.live import Job, Server
from tests.support.messages import delivery
from tests.support.programs import eventually

PLAYBOOK = """
playbook: slow-down
on: {alert: Spike}
target: job
steps:
  - {id: slow, action: job.scale_lr, with: {factor: 0.5}, timeout: 5s}
  - {id: keep, action: job.checkpoint, timeout: 30s}
"""


@contextmanager
def locked(server: Server) -> Iterator[None]:
    """Another program holds the database's file."""
    other = sqlite3.connect(server.state / "trainmedic.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


@contextmanager
def no_room(server: Server) -> Iterator[None]:
    """The disk is full: no file of the server can grow, that of its log lines included."""
    assert server.program is not None
    pid = server.program.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    ("failing", "told"),
    [(locked, "does not answer"), (no_room, "cannot be used: its disk fails; it may be full or read-only")],
)
def test_an_unwritable_store_rejects_deliveries_and_loses_no_outcome(
    tmp_path: Path, redis_server: RedisServer, failing: object, told: str
) -> None:
    """It answers 503 with Retry-After and is not ready until writes work; then the run continues."""
    assert callable(failing)
    with (
        Server(tmp_path, PLAYBOOK, "--redis", redis_server.url) as server,
        Job("llm", redis_server.url) as job,
    ):
        job.hold()
        assert server.ask("/webhook", delivery("Spike", "llm")).status == 200
        eventually(server.runs, 60, "the run is in the history")
        time.sleep(0.3)
        with failing(server):
            job.go_on()  # the outcome is known now, and cannot be written down
            refused = server.ask("/webhook", delivery("Spike", "other"))
            assert refused.status == 503
            assert int((refused.headers or {})["retry-after"]) > 0
            assert refused.body["detail"].startswith(f"The run store {told}.")
            ready = server.ask("/ready")
            assert (ready.status, ready.body["store"]["ok"], ready.body["redis"]["ok"]) == (503, False, True)
            assert ready.body["store"]["detail"] in (f"the run store {told}", "the run store did not answer within 2 s")
            assert server.ask("/history").status == 200
            assert server.ask("/health").status == 200
            time.sleep(0.5)
            assert job.done == ["job.scale_lr 0.5"]
        eventually(lambda: server.ask("/ready").status == 200, 60, "ready again")
        run = server.closed_run()
        assert run["status"] == "succeeded"
        assert [len(step["attempts"]) for step in run["steps"]] == [1, 1]
        assert job.done == ["job.scale_lr 0.5", "job.checkpoint"]
        assert server.ask("/webhook", delivery("Spike", "other")).status == 200
        assert len(server.runs()) == 2
