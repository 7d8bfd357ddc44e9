"""Programs that are told what was done, over real HTTP, with kills in between: CloudEvents, Grafana's annotations."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from msgspec.structs import replace

from tests.contract.run_store_values import at, attempt, closed, event, gpu, heard, run, step, undo
from trainmedic_server import errors, telemetry
from trainmedic_server.adapters.cloud_events import CloudEvents
from trainmedic_server.adapters.grafana_annotations import GrafanaAnnotations
from trainmedic_server.adapters.json_endpoint import JsonEndpoint
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.domain.run import Run, UndoStatus
from trainmedic_server.engine.event_dispatch import EventDispatcher, EventListener


class StandIn:
    """An HTTP server that keeps what it is sent, and has annotations as Grafana has."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []
        self.statuses: list[int] = []
        """What the next requests are answered with; 0 takes the request and answers nothing."""
        self.annotations: list[dict[str, Any]] = []
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                body = self.rfile.read(size)
                if len(body) < size:  # the sender was killed meanwhile
                    self.close_connection = True
                    return
                document = json.loads(body) if body else None
                status = stand_in.statuses.pop(0) if stand_in.statuses else 200
                if status in (0, 200):
                    stand_in.requests.append((self.command, self.path, dict(self.headers), document))
                answer = stand_in.act(self.command, self.path, document) if status in (0, 200) else {}
                if status:
                    written = json.dumps(answer).encode()
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(written)))
                    self.end_headers()
                    self.wfile.write(written)

            do_GET = do_POST = do_PATCH = _answer

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(daemon=True, target=self.server.serve_forever)
        self.thread.start()

    def act(self, method: str, path: str, document: Any) -> Any:
        if method == "GET":
            tags = set(parse_qs(urlsplit(path).query)["tags"])
            return [each for each in self.annotations if tags <= set(each["tags"])]
        if method == "PATCH":
            self.annotations[int(path.rsplit("/", 1)[1]) - 1] |= document
        elif path.endswith("/api/annotations"):
            self.annotations.append({"id": len(self.annotations) + 1, **document})
        return {}

    def ids(self) -> list[str]:
        return [document["id"] for _, _, _, document in self.requests]


def standing_in() -> Iterator[StandIn]:
    """One while it is served."""
    made = StandIn()
    yield made
    made.server.shutdown()
    made.server.server_close()
    made.thread.join()


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    yield from standing_in()


async def told(store: InMemoryStore, listener: EventListener) -> None:
    """Let a new server hand on everything, as one that was killed meanwhile would go on."""
    teller = EventDispatcher(store, store, listener, telemetry.Metrics())
    while await teller.tell():
        pass


def posting(stand_in: StandIn, *kinds: str, token: Path | None = None) -> tuple[CloudEvents, list[None]]:
    left_out: list[None] = []
    door = JsonEndpoint(f"{stand_in.url}/in?a=b", token, "the receiver of events")
    return CloudEvents(door, "urn:trainmedic:x", kinds, lambda: left_out.append(None)), left_out


async def test_an_unreadable_token_file_is_reported_with_its_setting(stand_in: StandIn, tmp_path: Path) -> None:
    """No request is sent."""
    endpoint = JsonEndpoint(stand_in.url, tmp_path / "none", "Grafana", "--grafana-token")
    with pytest.raises(errors.TemporaryFailure, match=r"^--grafana-token: cannot read .*none: No such file"):
        await endpoint.send("GET", "/api/annotations", None)
    await endpoint.close()
    assert stand_in.requests == []


async def test_events_before_a_delayed_one_are_posted_once(stand_in: StandIn) -> None:
    """All of them are delivered again together."""
    store = InMemoryStore()
    listener, _ = posting(stand_in)
    await told(store, listener)
    await store.transact(lambda tx: tx.append([event("started", "run-1", minute) for minute in range(3)]))
    stand_in.statuses = [200, 500, 500, 500]
    for _ in range(3):
        with pytest.raises(errors.TemporaryFailure):
            await told(store, listener)
    await told(store, listener)
    assert stand_in.ids() == ["1", "2", "3"]


async def test_each_event_is_posted_as_a_cloud_event_in_order(stand_in: StandIn, tmp_path: Path) -> None:
    """They are structured JSON with the token of the file; events of other kinds are not sent."""
    token = tmp_path / "token"
    token.write_text("secret\n")
    store = InMemoryStore()
    listener, _ = posting(stand_in, "closed", "pause_ordered", token=token)
    await told(store, listener)
    told_of = [
        event("closed", "run-1", 1, status="failed"),
        event("started", "run-2", 2),
        event("pause_ordered", minute=3),
    ]
    await store.transact(lambda tx: tx.append(told_of))
    await told(store, listener)
    (_, path, headers, first), (_, _, _, second) = stand_in.requests
    assert path == "/in?a=b"
    assert headers["Content-Type"] == "application/cloudevents+json; charset=utf-8"
    assert headers["Authorization"] == "Bearer secret"
    assert {name: first[name] for name in ("specversion", "id", "source", "type", "subject")} == {
        "specversion": "1.0",
        "id": "1",
        "source": "urn:trainmedic:x",
        "type": "trainmedic.closed",
        "subject": "run-1",
    }
    assert (first["data"]["kind"], first["data"]["data"]) == ("closed", {"status": "failed"})
    assert (second["id"], second["type"], "subject" in second) == ("3", "trainmedic.pause_ordered", False)


async def test_no_event_is_lost_over_outages_and_kills(stand_in: StandIn) -> None:
    """One receiver is busy, one never answers, and the server is replaced each time: at least once,
    in order; again only what was in hand."""
    store = InMemoryStore()
    listener, left_out = posting(stand_in)
    await told(store, listener)
    await store.transact(lambda tx: tx.append([event("closed", f"run-{number}") for number in range(60)]))
    stand_in.statuses = [200] * 5 + [503] + [200] * 30 + [0] + [429, 401, 404]
    for _ in range(12):
        with suppress(errors.TrainmedicError):
            await told(store, listener)
    first_times = list(dict.fromkeys(stand_in.ids()))
    assert first_times == [str(number) for number in range(1, 61)]
    assert len(stand_in.ids()) <= 60 + 5 * listener.at_once
    assert left_out == []
    before = len(stand_in.ids())
    await told(store, listener)
    assert len(stand_in.ids()) == before


async def test_an_event_rejected_as_invalid_delays_no_other(stand_in: StandIn) -> None:
    """It is counted."""
    store = InMemoryStore()
    listener, left_out = posting(stand_in)
    await told(store, listener)
    await store.transact(lambda tx: tx.append([event("closed", f"run-{number}") for number in range(3)]))
    stand_in.statuses = [200, 400]
    await told(store, listener)
    assert stand_in.ids() == ["1", "3"]
    assert len(left_out) == 1


async def act(store: InMemoryStore, changed: Run, before: Run | None, kind: str) -> None:
    """Change a run in the store, with the event that tells of it."""

    await store.transact(lambda tx: tx.save_runs([(changed, before)]) if before else tx.add_runs([changed]))
    await store.transact(lambda tx: tx.append([event(kind, changed.id)]))


async def test_a_run_is_a_region_from_its_first_action_to_its_last_revert(stand_in: StandIn) -> None:
    """The region starts and ends once, however often the events are delivered."""
    store = InMemoryStore()
    listener = GrafanaAnnotations(
        JsonEndpoint(f"{stand_in.url}/grafana/", None, "Grafana"), store, "https://t.example.org"
    )
    await store.transact(lambda tx: tx.save_alerts([heard()]))
    await told(store, listener)
    owing = step(undo=undo(UndoStatus.ARMED))
    open_run = run(0, gpu(0, "<b>node"), acted_at=at(2), steps=(owing,))
    await act(store, open_run, None, "step_started")
    stand_in.statuses = [200, 0]
    with suppress(errors.TrainmedicError):
        await told(store, listener)
    await told(store, listener)
    (annotation,) = stand_in.annotations
    assert (annotation["time"], "timeEnd" in annotation) == (round(at(2).timestamp() * 1000), False)
    assert annotation["tags"] == ["trainmedic", "playbook:cool", "node:<b>node", "gpu:0", f"run:{open_run.id}"]
    assert "&lt;b&gt;node" in annotation["text"]
    assert "<b>" not in annotation["text"]
    ended = closed(0, gpu(0, "<b>node"), id=open_run.id, acted_at=at(2), steps=(owing,), ended_at=at(5))
    await act(store, ended, open_run, "closed")
    await told(store, listener)
    assert "timeEnd" not in stand_in.annotations[0], "its undo is owed"
    done = undo(UndoStatus.DONE, attempts=(attempt("c1", status="applied", ended_at=at(9)),))
    given_back = replace(ended, steps=(replace(owing, undo=done),))
    await act(store, given_back, ended, "undo_done")
    await told(store, listener)
    await store.transact(lambda tx: tx.event_positions.save_position("grafana", 0))
    await told(store, listener)
    (annotation,) = stand_in.annotations
    assert annotation["timeEnd"] == round(at(9).timestamp() * 1000)


async def test_a_run_that_changes_nothing_makes_no_annotation(stand_in: StandIn) -> None:
    """A decision not to start a run makes none, either."""
    store = InMemoryStore()
    listener = GrafanaAnnotations(JsonEndpoint(stand_in.url, None, "Grafana"), store, "")
    await store.transact(lambda tx: tx.save_alerts([heard()]))
    await told(store, listener)
    await act(store, closed(0), None, "closed")
    await told(store, listener)
    assert stand_in.requests == []
