"""Servers are killed while they tell programs and people what happens: nothing is lost, and little is told twice.

With one server on SQLite, and with two on PostgreSQL, of which another one takes over each time. The receivers outlive
the servers. Briefly within the whole of the tests (`tests/integration/test_messages.py`), at length here.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import sqlalchemy as sa

from tests.crash.test_random_kills import Flaky, Killer, insist
from tests.integration.test_doors import StandIn, standing_in
from tests.integration.test_messages import Sink, serving
from tests.support.live import Server
from tests.support.messages import delivery, resolved
from tests.support.postgres import PostgresServer
from tests.support.programs import eventually
from tests.support.server_group import Servers, trouble
from trainmedic_server.adapters.sql_store import mapping, schema
from trainmedic_server.domain.run import Event

pytestmark = pytest.mark.long
KILLS = int(os.environ.get("KILLS", "12"))
TOKEN = "who may do everything"
SENT_AGAIN = 20
"""Events that may be posted again after a kill."""
PLAYBOOKS = """
playbook: slows
on: {alert: Spike}
target: job
steps:
  - {id: slow, action: job.scale_lr, with: {factor: 0.5}, retry: {attempts: 9, delay: 1s}, undo: on_resolve}
---
playbook: fails
on: {alert: Broken}
target: job
steps:
  - {id: call, action: http.request, with: {url: "http://127.0.0.1:1/", method: GET}, timeout: 5s}
"""


@pytest.fixture
def receiver() -> Iterator[StandIn]:
    """Of events, and a Grafana."""
    yield from standing_in()


@pytest.fixture
def sink() -> Iterator[Sink]:
    yield from serving()


def options(directory: Path, receiver: StandIn, sink: Sink) -> tuple[tuple[str, ...], dict[str, str]]:
    """Flags and variables of a server that tells, and that has a token."""
    tokens = directory / "tokens.yaml"
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    tokens.write_text(json.dumps([{"name": "all", "sha256": digest, "roles": ["operator", "webhook", "viewer"]}]))
    environment = {
        "TRAINMEDIC_NOTIFY_URLS": f"chat=json://127.0.0.1:{sink.port}/",
        "TRAINMEDIC_EVENTS_TO": f"{receiver.url}/in",
        "TRAINMEDIC_GRAFANA_URL": receiver.url,
    }
    return ("--tokens", str(tokens), "--prometheus-url", "http://127.0.0.1:1"), environment


def sign_in(server: Server) -> None:
    """As a browser does."""
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/login", urlencode({"token": TOKEN}).encode())
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with browser.open(request, timeout=60) as reply:
        assert reply.status == 200


class Night:
    """What goes on meanwhile: alerts, each sent until it is taken."""

    def __init__(self, server: Server, chance: random.Random) -> None:
        self._server, self._chance = server, chance
        self.fired: list[tuple[str, str]] = []

    def goes_on(self) -> None:
        """One alert more: of a run that fails, or of one that acts and gives back."""
        name = self._chance.choice(["Spike", "Broken"])
        job = "llm" if name == "Spike" else f"job-{len(self.fired)}"
        fired = delivery(name, job)
        insist(self._server, "/webhook", fired)
        self.fired.append((name, fired["alerts"][0]["startsAt"]))
        time.sleep(self._chance.uniform(0, 0.8))
        if name == "Spike":
            insist(self._server, "/webhook", resolved(fired))

    def is_over(self) -> bool:
        runs = self._server.runs()
        return bool(runs) and all(run["status"] in ("succeeded", "failed", "cancelled", "not_started") for run in runs)


def check_told(url: str, receiver: StandIn, sink: Sink, kills: int) -> None:
    """By what the run store has: each event, in order; each failed run; each run that acted once in the graphs."""
    events = stored_events(url)
    posted = [int(document["id"]) for _, path, _, document in receiver.requests if path == "/in"]
    first_times = list(dict.fromkeys(posted))
    assert first_times == [event.seq for event in events if event.seq is not None and event.seq >= first_times[0]]
    assert first_times[0] <= min(event.seq or 0 for event in events if event.run_id is not None)
    assert len(posted) - len(first_times) <= SENT_AGAIN * (kills + 1)

    failed = {event.run_id for event in events if event.kind == "closed" and event.data["status"] == "failed"}
    told = "\n".join(f"{title}\n{text}" for title, text in sink.taken)
    assert failed, "some run has failed"
    assert [run_id for run_id in failed if f"run {(run_id or '')[-8:]}" not in told] == []
    again = sum(count - 1 for count in Counter(sink.taken).values())
    assert again <= kills, "only what was just being sent is told again"

    acted = {event.run_id for event in events if event.kind == "step_succeeded"}
    drawn = Counter(tag for each in receiver.annotations for tag in each["tags"] if tag.startswith("run:"))
    assert {tag.removeprefix("run:") for tag in drawn} >= acted
    assert set(drawn.values()) <= {1}, "each run is one region"
    assert all("timeEnd" in each for each in receiver.annotations)


def stored_events(url: str) -> list[Event]:
    """All events, in order; read beside the server, which has the store to itself."""
    engine = sa.create_engine(url)
    try:
        with engine.connect() as connection:
            rows = connection.execute(sa.select(*schema.events.columns).order_by(schema.events.c.seq))
            return [mapping.event_of(row) for row in rows]
    finally:
        engine.dispose()


def everything_is_told(url: str, receiver: StandIn, sink: Sink, kills: int) -> bool:
    try:
        check_told(url, receiver, sink, kills)
    except AssertionError:
        return False
    return True


def settle(url: str, receiver: StandIn, sink: Sink, kills: int) -> None:
    """Wait until all is told, for as long as messages of one kind wait for each other; then say what is not."""
    try:
        eventually(lambda: everything_is_told(url, receiver, sink, kills), 150, "all is told", 1)
    except AssertionError:
        check_told(url, receiver, sink, kills)
        raise


def test_kills_lose_no_pending_notification(tmp_path: Path, redis_url: str, receiver: StandIn, sink: Sink) -> None:
    """Events, annotations and messages survive random kills of one server, also during its start."""
    seed = random.randrange(10_000)
    print(f"seed {seed}, {KILLS} kills")
    chance = random.Random(seed)
    flags, environment = options(tmp_path, receiver, sink)
    server = Server(tmp_path / "server", PLAYBOOKS, "--redis", redis_url, *flags, environment=environment, token=TOKEN)
    with server, Flaky("llm", redis_url):
        night, killer = Night(server, chance), Killer(server, KILLS, chance)
        killer.start()
        while killer.is_alive() or len(night.fired) < 10:
            night.goes_on()
        killer.join()
        eventually(night.is_over, 60, "all runs are over")
        url = f"sqlite:///{server.state}/trainmedic.db"
        settle(url, receiver, sink, KILLS)
    print(f"{len(night.fired)} alerts, {len(receiver.requests)} requests, {len(sink.taken)} messages")


def test_takeovers_lose_no_stored_data(
    tmp_path: Path, redis_url: str, postgres: PostgresServer, receiver: StandIn, sink: Sink
) -> None:
    """Killed, cut off, hung and PostgreSQL restarted: what was received and paused, who is signed in, what is to
    be measured, and all that is told."""
    seed = random.randrange(10_000)
    chance = random.Random(seed)
    troubles = chance.sample(["kill", "cut", "hang", "restart"], 4)
    print(f"seed {seed}: {troubles}")
    url = postgres.database()
    flags, environment = options(tmp_path, receiver, sink)
    with (
        Servers(tmp_path, PLAYBOOKS, url, redis_url, *flags, environment=environment, token=TOKEN) as servers,
        Flaky("llm", redis_url),
    ):
        sign_in(servers.wait())
        paused = insist(servers, "/pause", {"job": "other-*", "for": "2h", "note": "new fans"})["pause"]
        night = Night(servers, chance)
        for kind in troubles:
            for _ in range(3):
                night.goes_on()
            trouble(kind, servers, postgres)
        works = servers.wait()
        eventually(night.is_over, 60, "all runs are over")
        settle(url, receiver, sink, len(troubles))
        check_kept(works if works.ask("/ready").status == 200 else servers.wait(), night, paused)


def check_kept(server: Server, night: Night, paused: dict[str, Any]) -> None:
    heard = server.ask("/alerts?limit=1000").body["items"]
    # A `startsAt` comes back with as many digits as there are.
    assert sorted(item["alert_name"] for item in heard) == sorted(name for name, _ in night.fired)
    assert all(item["reactions"] for item in heard)
    [pause] = server.ask("/pauses").body["items"]
    assert (pause["id"], pause["note"], pause["in_force"]) == (paused["id"], "new fans", True)
    assert len(server.ask("/sessions").body["items"]) == 1
    acted = [run["run_id"] for run in server.runs() if run["action_taken"]]
    assert acted
    assert {server.run(run_id)["effect"]["verdict"] for run_id in acted} <= {"pending", "not_measured"}
