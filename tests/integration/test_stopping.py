"""SIGTERM ends the server within seconds, whatever state it is in, and what was open goes on at the next start."""

from __future__ import annotations

import contextlib
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.integration.test_store_outages import PLAYBOOK, locked
from tests.support.live import Job, Server
from tests.support.messages import delivery
from tests.support.programs import eventually


def test_the_server_stops_with_open_streams_and_runs_while_redis_is_down(tmp_path: Path, own_redis: Any) -> None:
    """A deployment does not wait for them; the next server resumes them."""
    redis = own_redis(tmp_path)
    redis.start()
    with Server(tmp_path / "server", PLAYBOOK, "--redis", redis.url) as server:
        with contextlib.ExitStack() as stack, Job("llm", redis.url) as job:
            job.hold()
            for _ in range(20):
                url = f"http://127.0.0.1:{server.port}/events"
                assert stack.enter_context(urllib.request.urlopen(url, timeout=60)).readline()
            assert server.ask("/webhook", delivery("Spike", "llm", *(f"gone-{n}" for n in range(50)))).status == 200
            time.sleep(0.3)
            redis.kill()
            time.sleep(0.3)
            assert server.stop() < 25
            redis.start()
            server.start()
            job.go_on()
            eventually(
                lambda: next(run for run in server.runs() if run["job"] == "llm")["status"] == "succeeded",
                60,
                "the run in flight went on",
            )
            assert job.done == ["job.scale_lr 0.5", "job.checkpoint"]
        assert server.stop() < 25


def test_the_server_stops_while_its_store_is_locked(tmp_path: Path, redis_url: str) -> None:
    """A delivery waits for the store and a run's outcome cannot be written; both are completed later."""
    with Server(tmp_path, PLAYBOOK, "--redis", redis_url) as server, Job("llm", redis_url) as job:
        job.hold()
        assert server.ask("/webhook", delivery("Spike", "llm")).status == 200
        time.sleep(0.3)
        with locked(server):
            job.go_on()
            eventually(lambda: job.done, 60, "applied")
            assert server.stop() < 25  # the database is given five seconds for each try
        server.start()
        run = server.closed_run()
        assert run["status"] == "succeeded"
        assert job.done == ["job.scale_lr 0.5", "job.checkpoint"]


def test_a_second_server_on_the_same_state_is_rejected(tmp_path: Path, redis_url: str) -> None:
    """It names the first, ends with a status of its own, and leaves it undisturbed."""
    with Server(tmp_path, PLAYBOOK, "--redis", redis_url) as server:
        assert server.program is not None
        first = server.program.process.pid
        second = subprocess.run(
            [*server.program.process.args[:5], "0", *server.program.process.args[6:]],  # type: ignore[index]
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert second.returncode not in (0, 1)
        assert f"is in use by the server with process id {first}" in second.stderr
        assert "Traceback" not in second.stderr
        assert server.ask("/ready").status == 200
