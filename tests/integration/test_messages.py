"""Messages to people from a whole server: they outlive a kill, and tell no secret."""

from __future__ import annotations

import http.server
import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_doors import StandIn, standing_in
from tests.support.live import Server
from tests.support.messages import delivery
from tests.support.programs import eventually, free_port

PLAYBOOK = """
playbook: ask
on: {alert: Spike}
target: job
steps:
  - {id: ask, approve: "Go back?"}
"""
SECRET = "T0pS3cret"
"""A part of the notification URLs."""


class Sink:
    """A service that takes Apprise's JSON notifications, and keeps their titles and texts."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, str]] = []
        taken = self.taken

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                taken.append((body["title"], body["message"]))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]


def serving() -> Iterator[Sink]:
    """A sink while it is served."""
    made = Sink()
    serving = threading.Thread(daemon=True, target=made.server.serve_forever)
    serving.start()
    yield made
    made.server.shutdown()
    serving.join()
    made.server.server_close()


def counted_as_sent(server: Server) -> float:
    """How many messages the server has sent since its start and put on record so."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=20) as reply:
        found = re.findall(r'^trainmedic_messages_total\{.*outcome="sent".*\} (\S+)$', reply.read().decode(), re.M)
    return sum(map(float, found))


@pytest.fixture
def receiver() -> Iterator[StandIn]:
    yield from standing_in()


@pytest.fixture
def sink() -> Iterator[Sink]:
    yield from serving()


def test_a_question_reaches_people_once_though_the_server_is_killed(
    tmp_path: Path, redis_url: str, sink: Sink, receiver: StandIn
) -> None:
    """Killed before it was sent, and again after that; a program that is told of events hears of each, in order. A
    service that is down keeps it from nobody else; its URL is in no log line. At length in
    `tests/crash/test_kills_while_telling.py`."""
    urls = f"chat=json://127.0.0.1:{sink.port}/{SECRET} dead=json://127.0.0.1:{free_port()}/{SECRET}"
    options = ("--redis", redis_url, "--external-url", "https://medic.example")
    environment = {"TRAINMEDIC_NOTIFY_URLS": urls, "TRAINMEDIC_EVENTS_TO": f"{receiver.url}/in"}
    with Server(tmp_path, PLAYBOOK, *options, environment=environment) as server:
        (started,) = server.ask("/webhook", delivery("Spike", "llm")).body["runs"]
        server.kill()
        assert sink.taken == []
        server.start()
        eventually(lambda: sink.taken, 25, "a message")
        server.kill()
        server.start()
        time.sleep(4)  # what is due when a server starts is sent at once
        last = server.run(started["run_id"])["events"][-1]["seq"]
        eventually(lambda: str(last) in receiver.ids(), 25, "all events posted")
    posted = list(dict.fromkeys(map(int, receiver.ids())))
    assert posted == list(range(posted[0], posted[-1] + 1))
    ((asked, text),) = sink.taken
    assert asked == "[warning] job:llm: Go back?"
    assert text.endswith(f"https://medic.example/runs/{started['run_id']}")
    logs = "".join(path.read_text() for path in tmp_path.glob("server-*.log"))
    assert "a background loop is held up" in logs
    assert SECRET not in logs
