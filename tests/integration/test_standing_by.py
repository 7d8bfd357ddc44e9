"""Two servers on one PostgreSQL: who answers what, who touches Redis, and what a hung one does when it wakes."""

from __future__ import annotations

import http.client
import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import redis

from tests.support.live import Job, Server
from tests.support.messages import delivery, resolved
from tests.support.postgres import PostgresServer
from tests.support.programs import eventually
from tests.support.server_group import QUICK, begun_anew, member, works

PLAYBOOK = """
playbook: slow-down
on: {alert: Spike}
target: job
steps:
  - {id: slow, action: job.scale_lr, with: {factor: 0.5}, timeout: 30s, undo: on_resolve}
"""


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.database()


@pytest.fixture
def nobody() -> Iterator[tuple[str, list[object]]]:
    """The URL of a Redis that nobody should call, and the calls that were made."""
    calls: list[object] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:

        def note() -> None:
            while True:
                try:
                    connection, caller = listening.accept()
                except OSError:
                    return
                connection.close()
                calls.append(caller)

        threading.Thread(target=note, daemon=True).start()
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}/0", calls
        listening.shutdown(socket.SHUT_RDWR)


def metric(server: Server) -> str:
    """Empty where it does not answer."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as reply:
        return next(line for line in reply.read().decode().splitlines() if line.startswith("trainmedic_working "))
    return ""


def test_one_server_leads_and_the_other_is_on_standby(
    tmp_path: Path, url: str, redis_url: str, nobody: tuple[str, list[object]]
) -> None:
    """The standby reports why it waits, rejects what it cannot forward, and uses no Redis until its turn."""
    quiet, calls = nobody
    with member(tmp_path / "one", PLAYBOOK, url, redis_url, advertise=False) as one:
        eventually(lambda: works(one), 60, "one works", 0.05)
        with member(tmp_path / "two", PLAYBOOK, url, quiet) as two:
            standing = eventually(
                lambda: (
                    (found := two.ask("/ready")).body["store"]["detail"].startswith("on standby: another") and found
                ),
                60,
                "stands by",
            )
            assert standing.status == 503
            assert two.ask("/health").status == 200
            assert (metric(one), metric(two)) == ("trainmedic_working 1.0", "trainmedic_working 0.0")
            for path, body in (("/webhook", delivery("Spike", "llm")), ("/history", None), ("/pause", {})):
                refused = two.ask(path, body)
                assert refused.status == 503
                assert refused.body["detail"] == "This server is on standby: another server works. Try again."
                assert (refused.headers or {})["retry-after"] == "1"
                assert (refused.headers or {})["connection"] == "close"
            assert calls == []
            one.stop()
            eventually(lambda: two.ask("/history").status == 200, 60, "the other takes over", 0.05)
            eventually(lambda: calls, 60, "and calls its Redis")


def test_a_standby_forwards_requests(tmp_path: Path, url: str, redis_url: str) -> None:
    """Request and answer are unchanged, including errors and streams; so a delivery to any server is kept."""
    with (
        member(tmp_path / "one", PLAYBOOK, url, redis_url) as one,
        Job("llm", redis_url) as job,
    ):
        eventually(lambda: works(one), 60, "one works", 0.05)
        with member(tmp_path / "two", PLAYBOOK, url, redis_url) as two:
            fired = delivery("Spike", "llm")
            answer = eventually(lambda: (found := two.ask("/webhook", fired)).status == 200 and found, 60, "handed on")
            assert answer.body["runs"][0]["decision"] == "started"
            assert two.closed_run()["status"] == "succeeded"
            assert job.done == ["job.scale_lr 0.5"]
            assert two.ask("/webhook", {"version": "4"}).status == 422
            assert two.ask("/history?limit=0").status == 422
            assert two.ask("/ready?any=true").status == 200
            assert two.ask("/ready").status == 503
            with urllib.request.urlopen(f"http://127.0.0.1:{two.port}/events?after=0", timeout=60) as stream:
                assert any(stream.readline().startswith(b"event:") for _ in range(8))
                one.kill()
                with suppress(http.client.IncompleteRead):  # a client sees that it was cut off
                    stream.read()
            assert two.program is not None
            assert "ended a forwarded response early" in two.program.tail()
            assert "Traceback" not in two.program.tail(1000)
            gone = two.ask("/webhook", resolved(fired))
            assert gone.status in (200, 503)
            eventually(lambda: two.ask("/webhook", resolved(fired)).status == 200, 60, "taken over", 0.05)
            eventually(lambda: job.done == ["job.scale_lr 0.5", "job.scale_lr 2"], 60, "undone", 0.05)


def test_a_server_that_hung_does_nothing_after_it_resumes(tmp_path: Path, url: str, redis_url: str) -> None:
    """Its command's answer arrives after its replacement and goes to the successor; the effect happens once."""
    with (
        member(tmp_path / "one", PLAYBOOK, url, redis_url, *QUICK) as one,
        Job("llm", redis_url) as job,
    ):
        eventually(lambda: works(one), 60, "one works", 0.05)
        with (
            member(tmp_path / "two", PLAYBOOK, url, redis_url, *QUICK) as two,
            redis.Redis.from_url(redis_url) as looking,
        ):
            job.hold()
            assert one.ask("/webhook", delivery("Spike", "llm")).status == 200
            eventually(lambda: looking.xlen("trainmedic:commands:job:llm"), 60, "the command is on its way", 0.02)
            assert one.program is not None
            one.program.process.send_signal(signal.SIGSTOP)
            eventually(lambda: works(two), 60, "the other has taken over", 0.05)
            events = len(two.run(two.runs()[0]["run_id"])["events"])
            one.program.process.send_signal(signal.SIGCONT)
            eventually(lambda: begun_anew(one), 60, "it begins anew", 0.02)
            eventually(lambda: metric(one) == "trainmedic_working 0.0", 60, "it stands by")
            assert one.program.process.poll() is None
            assert len(two.run(two.runs()[0]["run_id"])["events"]) == events
            job.go_on()
            run = two.closed_run()
            assert run["status"] == "succeeded"
            assert job.done == ["job.scale_lr 0.5"]
            assert len({command for command, _ in job.effects}) == 1
            eventually(lambda: looking.xlen("trainmedic:replies") == 0, 60, "every reply is settled", 0.05)


def test_a_wrong_setting_ends_the_start(tmp_path: Path, url: str, redis_url: str) -> None:
    """It ends before it waits for anything."""
    with member(tmp_path / "one", PLAYBOOK, url.replace("trainmedic:", "nobody:"), redis_url, advertise=False) as one:
        assert one.program is not None
        assert one.program.process.wait(30) == 2
        assert "authentication failed" in one.program.tail()
