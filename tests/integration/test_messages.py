"""Messages to people from a whole server: they outlive a kill, and tell no secret."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import sqlite3
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


sink_served = contextlib.contextmanager(serving)


def counted_as_sent(server: Server) -> float:
    """How many messages the server has sent since its start and put on record so."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as reply:
        found = re.findall(r'^trainmedic_messages_total\{.*outcome="sent".*\} (\S+)$', reply.read().decode(), re.M)
    return sum(map(float, found))


BOUNDED = """
playbook: save
on: {alert: PowerEmergency}
target: job
guards: {max_concurrent: 5}
steps:
  - {id: wait, wait_for: resolved, timeout: 1h}
"""


def test_the_sixth_job_of_a_power_emergency_is_reported_despite_a_kill(
    tmp_path: Path, redis_url: str, sink: Sink
) -> None:
    """It is reported once, with the options, and again when a place is free and it runs; a repeat is not."""
    environment = {"TRAINMEDIC_NOTIFY_URLS": f"chat=json://127.0.0.1:{sink.port}"}
    with Server(tmp_path, BOUNDED, "--redis", redis_url, environment=environment) as server:
        emergency = delivery("PowerEmergency", *(f"llm-{number}" for number in range(6)))
        assert server.ask("/webhook", emergency).status == 200
        server.kill()
        assert sink.taken == []
        server.start()
        eventually(lambda: counted_as_sent(server) == 1, 60, "a message")
        server.kill()
        server.start()
        assert server.ask("/webhook", emergency).status == 200
        time.sleep(4)
        assert len(sink.taken) == 1
        one = {**emergency, "status": "resolved"}
        one["alerts"] = [
            {**alert, "status": "resolved", "endsAt": alert["startsAt"]} for alert in emergency["alerts"][:1]
        ]
        assert server.ask("/webhook", one).status == 200
        eventually(lambda: server.runs()[-1]["status"] != "waiting", 60, "a place is free")
        again = server.ask("/webhook", {**emergency, "alerts": emergency["alerts"][5:]}).body["runs"]
        assert [run["decision"] for run in again] == ["started"]
        eventually(lambda: len(sink.taken) == 2, 60, "a follow-up")
    (title, text), (later, _) = sink.taken
    assert title == "[warning] save on job:llm-5 did not start: 5 runs are open, at most 5"
    assert "raise max_concurrent in the guards of the playbook" in text
    assert later.startswith("[info] Re: save on job:llm-5: started later, as run ")


TELLS = """
playbook: tells
on: {alert: Spike}
target: job
steps:
  - {id: tell, action: notify, with: {message: "a spike"}}
"""


def test_a_server_without_channels_reports_it_and_fails_no_run(tmp_path: Path, redis_url: str) -> None:
    """The log and `/ready` with the playbooks report it; the run's message says that nothing was sent."""
    with Server(tmp_path, TELLS, "--redis", redis_url) as server:
        notifications = server.ask("/ready").body["notifications"]
        assert server.ask("/webhook", delivery("Spike", "llm")).status == 200
        run = server.closed_run()
        (step,) = server.run(run["run_id"])["steps"]
    assert notifications["ok"] is False
    assert "1 playbook (tells) would notify people" in notifications["detail"]
    assert "1 playbook (tells) would notify people" in (tmp_path / "server-1.log").read_text()
    sentence = "not sent: no notification channel is configured"
    assert (run["status"], run["message"]) == ("succeeded", f"nothing was applied; step tell: {sentence}")
    assert (step["status"], step["message"]) == ("skipped", sentence)


@pytest.fixture
def receiver() -> Iterator[StandIn]:
    yield from standing_in()


@pytest.fixture
def sink() -> Iterator[Sink]:
    yield from serving()


def is_sent(server: Server, channel: str) -> bool:
    with contextlib.closing(sqlite3.connect(next(server.state.glob("*.db")))) as database:
        rows = database.execute("SELECT 1 FROM messages WHERE channel = ? AND sent_at IS NOT NULL", (channel,))
        return rows.fetchone() is not None


def test_a_question_is_sent_once_although_the_server_is_killed(
    tmp_path: Path, redis_url: str, sink: Sink, receiver: StandIn
) -> None:
    """It is killed before the question is sent, and again afterwards; an event receiver gets each in order. A
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
        eventually(lambda: sink.taken, 60, "a message")
        eventually(lambda: is_sent(server, "chat"), 60, "its record")  # killed before, the server would send it again
        server.kill()
        server.start()
        time.sleep(4)  # what is due when a server starts is sent at once
        last = server.run(started["run_id"])["events"][-1]["seq"]
        eventually(lambda: str(last) in receiver.ids(), 60, "all events posted")
    posted = list(dict.fromkeys(map(int, receiver.ids())))
    assert posted == list(range(posted[0], posted[-1] + 1))
    ((asked, text),) = sink.taken
    assert asked == "[warning] job:llm: Go back?"
    assert text.endswith(f"https://medic.example/runs/{started['run_id']}")
    logs = "".join(path.read_text() for path in tmp_path.glob("server-*.log"))
    assert "background loop delayed" in logs
    assert SECRET not in logs


TEAMS = """
playbook: fails
on: {alert: Broken}
target: job
steps:
  - {id: call, action: http.request, with: {method: POST, url: "http://127.0.0.1:1/"}}
---
playbook: tells
on: {alert: Spike}
target: job
steps:
  - {id: tell, action: notify, with: {message: "a spike of {{ target.job }}"}}
---
playbook: asks
on: {alert: Question}
target: job
steps:
  - {id: ask, approve: "May {{ target.job }} go back?"}
"""
ROUTES = (
    "gpu=component:gpu,network training=component:training "
    "on-call=severity:critical;kind:notify on-call=kind:approval rest=default"
)


def test_each_team_gets_only_its_own_messages(tmp_path: Path, redis_url: str) -> None:
    """Failures, questions and playbook messages go by component, severity and kind; other routes send nothing
    again after a kill."""
    with contextlib.ExitStack() as stack:
        sinks = {name: stack.enter_context(sink_served()) for name in ("gpu", "training", "on-call", "rest")}
        urls = " ".join(f"{name}=json://127.0.0.1:{each.port}" for name, each in sinks.items())
        environment = {"TRAINMEDIC_NOTIFY_URLS": urls, "TRAINMEDIC_MESSAGE_ROUTES": ROUTES}
        server = stack.enter_context(Server(tmp_path, TEAMS, "--redis", redis_url, environment=environment))
        posted = [of_component("Broken", each) for each in ("gpu", "network", "storage", "node", "training")]
        posted += [of_component("Spike", each) for each in ("gpu", "storage")]
        posted += [of_component("Question", each) for each in ("training", "node")]
        for alert in posted:
            assert server.ask("/webhook", alert).status == 200

        def told() -> dict[str, list[str]]:
            """The jobs that each channel was told of, with what it was about."""
            said = {name: "\n".join(f"{title}\n{text}" for title, text in each.taken) for name, each in sinks.items()}
            return {
                name: sorted(set(re.findall(r"[a-z]+-(?:broken|spike|question)", each))) for name, each in said.items()
            }

        expected = {
            "gpu": ["gpu-broken", "gpu-spike", "network-broken"],
            "training": ["training-broken", "training-question"],
            "on-call": ["gpu-spike", "node-question", "storage-spike", "training-question"],
            "rest": ["node-broken", "storage-broken"],
        }
        eventually(lambda: told() == expected, 60, "the messages of all teams")
        assert {each["name"]: each["routes"] for each in server.ask("/channels").body["items"]} == {
            "gpu": ["component:gpu,network"],
            "training": ["component:training"],
            "on-call": ["severity:critical;kind:notify", "kind:approval"],
            "rest": ["default"],
        }
        # A message that is being sent when the server is killed may come twice.
        counts = {name: len(each.taken) for name, each in sinks.items()}
        eventually(lambda: counted_as_sent(server) == sum(counts.values()), 60, "every message on record as sent")
        server.kill()
        server.start(TRAINMEDIC_MESSAGE_ROUTES="training=all gpu=kind:pause on-call=kind:pause rest=kind:pause")
        for alert in posted:
            assert server.ask("/webhook", alert).status == 200
        time.sleep(4)  # what is due when a server starts is sent at once
        assert {name: len(each.taken) for name, each in sinks.items()} == counts, told()


def test_wrong_routes_prevent_the_start(tmp_path: Path, redis_url: str) -> None:
    """The error has the setting, the channel, the field, and the valid values."""
    environment = {
        "TRAINMEDIC_NOTIFY_URLS": "gpu=json://127.0.0.1:1",
        "TRAINMEDIC_MESSAGE_ROUTES": "gpu=component:gpus",
    }
    server = Server(tmp_path, TELLS, "--redis", redis_url, environment=environment)
    server.start(wait=False)
    assert server.program is not None
    assert server.program.process.wait(60) == 2
    said = (tmp_path / "server-1.log").read_text()
    assert "TRAINMEDIC_MESSAGE_ROUTES" in said
    assert "pair 1, channel 'gpu', field component: 'gpus' is none of gpu, network" in said


def of_component(alertname: str, component: str) -> dict[str, Any]:
    """A delivery of one critical alert about a job that is named after both."""
    posted = delivery(alertname, f"{component}-{alertname.lower()}")
    posted["alerts"][0]["labels"] |= {"component": component, "severity": "critical"}
    return posted
