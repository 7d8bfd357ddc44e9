"""The tables of the command line: what they fit, what they fold, and in which words they tell what became of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from trainmedic_core.cli import table
from trainmedic_core.cli.exits import Unreachable
from trainmedic_server.cli import history, listing
from trainmedic_server.cli.client import Client, ServerSentEvent, _parse
from trainmedic_server.presentation import rows as table_rows
from trainmedic_server.presentation import runs, times

AT = "2026-01-31T12:00:00Z"


def item(number: int = 0, **changes: Any) -> dict[str, Any]:
    """An item of the history, as the API gives it."""
    made: dict[str, Any] = {
        "run_id": f"019c1415-6c05-7c11-9a0d-{number:012x}",
        "timestamp": "2026-01-31T11:53:00Z",
        "alert_name": "GPUTemperatureHigh",
        "alert_labels": {},
        "playbook": "gpu-temperature-high",
        "target": f"gpu:node-{number}/GPU-5f3a2c1e-0d6b-4a52-9d6e-0f2b8d1c7a90",
        "status": "succeeded",
        "decision": "started",
        "action_taken": "gpu.power_limit",
        "message": "applied gpu.power_limit",
        "duration_ms": 184_210,
        "waiting_on": None,
        "owes_undo": False,
        "undone_at": None,
    }
    return {**made, **changes}


def held_back(number: int, **changes: Any) -> dict[str, Any]:
    reason = f"16 runs are open, at most 16; {number}"
    closed = {"status": "not_started", "decision": "concurrency_limited", "action_taken": None, "duration_ms": 0}
    return item(number, **{**closed, "message": reason, **changes})


def folded(items: list[dict[str, Any]]) -> list[table_rows.Row]:
    return table_rows.folded(items, table_rows.refusal_key, "timestamp")


def test_two_hundred_rows_fit_120_columns() -> None:
    """The rows have the longest usual names; every column keeps something, and the last at least its beginning."""
    items = [item(number, action_taken=None, message="the alert had not resolved in time") for number in range(200)]
    lines = table.rows(history._HEADER, [history._cells(row, AT) for row in folded(items)], 120)
    assert len(lines) == 201
    assert max(map(len, lines)) <= 120
    assert lines[1].startswith("7 min  00000000  GPUTemperature")
    assert "the alert had not reso" in lines[1]


def test_identical_decisions_are_merged_into_one_row() -> None:
    """Open items stay on the first page; other decisions, and those of another hour, have rows of their own."""
    waiting = item(99, status="waiting", waiting_on="resolved", duration_ms=None)
    other = held_back(50, decision="cooldown")
    late = held_back(60, timestamp="2026-01-31T10:40:00Z")
    rows = folded([*(held_back(number) for number in range(48)), waiting, other, late])
    assert [row.count for row in rows] == [48, 1, 1, 1]
    cells = [history._cells(row, AT) for row in rows]
    assert cells[0][1:7] == ("×48", "GPUTemperatureHigh", "gpu-temperature-high", "48 targets", "held back", "-")
    assert cells[0][7] == "concurrency_limited, newest of 48 reasons: 16 runs are open, at most 16; 0"
    assert [row.whose_reason for row in folded([held_back(1), held_back(1)])] == [""]
    assert cells[1][5] == "waits: alert"
    assert cells[2][4] == other["target"]


def test_a_count_that_was_not_read_to_its_end_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short list reads one page of a storm: its 99 are not all."""
    storm = [held_back(number) for number in range(300)]
    monkeypatch.setattr(listing, "items", lambda *_: iter([*storm[:99], item(999), *storm[99:]]))
    cut, whole = (history._folded_rows(Client("http://127.0.0.1:1", None), {}, limit)[0] for limit in (1, 50))
    assert history._cells(cut, AT)[1:5:3] == ("×99+", "99+ targets")
    assert history._cells(whole, AT)[1:5:3] == ("×300", "300 targets")


@pytest.mark.parametrize(
    ("changes", "result"),
    [
        ({"status": "waiting", "waiting_on": "target"}, "waits: target"),
        ({"status": "waiting", "waiting_on": "resolved"}, "waits: alert"),
        ({"status": "waiting", "waiting_on": "retry"}, "waits: retry"),
        ({"status": "waiting", "waiting_on": "resume"}, "waits: resume"),
        ({"status": "awaiting_approval", "waiting_on": "approval"}, "asks"),
        ({"status": "failed", "owes_undo": True}, "failed, owes"),
        ({"status": "cancelled", "undone_at": AT}, "cancelled, undone"),
        ({"status": "not_started"}, "held back"),
        ({}, "succeeded"),
    ],
)
def test_the_outcome_of_a_run_is_shown_in_one_word(changes: dict[str, Any], result: str) -> None:
    """Open runs are distinguished by what they wait for, and reverted changes do not read as applied."""
    assert runs.status_text(item(**changes)) == result


def test_nothing_is_reported_twice() -> None:
    """A failed run does not begin with the message that reported it, as if that had been the repair."""
    assert runs.outcome_text(item()) == "applied gpu.power_limit"
    failed = item(status="failed", action_taken="notify", message="step cap: no agent on node 'node-3' is connected")
    assert runs.outcome_text(failed) == "step cap: no agent on node 'node-3' is connected; did notify"
    assert runs.outcome_text(item(message="")) == "gpu.power_limit"


@pytest.mark.parametrize(
    ("text", "ago", "moment"),
    [
        ("2026-01-31T11:53:00Z", "7 min ago", "11:53Z (7 min ago)"),
        ("2026-01-31T11:59:18Z", "42 s ago", "11:59Z (42 s ago)"),
        ("2026-01-29T11:00:00Z", "2 d ago", "2026-01-29 11:00Z (2 d ago)"),
        ("2026-01-30T23:00:00Z", "13 h ago", "23:00Z (13 h ago)"),
        ("2026-01-31T12:30:00Z", "in 30 min", "12:30Z (in 30 min)"),
        (AT, "now", "12:00Z (now)"),
        (None, "-", "-"),
    ],
)
def test_times_are_shown_relative_to_now(text: str | None, ago: str, moment: str) -> None:
    """Each is in the unit that suits it."""
    assert times.ago(text, AT) == ago
    assert times.near(text, AT) == moment


class CutOff(Client):
    """A server that is restarted before anything has happened, and then tells what did meanwhile."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []

    def events(self, last_id: str | None, path: str = "events", params: Any = None) -> Iterator[ServerSentEvent]:
        self.asked.append(last_id)
        if len(self.asked) == 1:
            yield from _parse(iter(["retry: 2000", "id: 7", "", ": still here", ""]))
            raise Unreachable("the connection broke")
        yield from _parse(iter(["id: 8", "event: observe_only", f"data: {json.dumps({'seq': 8})}", ""]))


def test_following_a_group_shows_only_its_members() -> None:
    member, other = item(1, parent=item(9)["run_id"]), item(2, parent=None)
    for group in (item(9)["run_id"], item(9)["run_id"][:8], item(9)["run_id"][-4:]):
        assert history._matches(member, {"parent": group})
        assert not history._matches(other, {"parent": group})
    assert history._matches(other, {"playbook": [other["playbook"]]})


def test_following_resumes_from_where_it_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """No event is missed when a server restarts before its first event."""
    monkeypatch.setattr(history.time, "sleep", lambda seconds: None)
    client = CutOff()
    assert next(history._endless_events(client)) == {"seq": 8}
    assert client.asked == [None, "7"]


def test_reconnect_delays_are_reset_after_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The delay does not grow for a server that is restarted now and then."""
    slept: list[float] = []
    monkeypatch.setattr(history.time, "sleep", slept.append)

    class Restarted(Client):
        connections = 0

        def __init__(self) -> None: ...

        def events(self, last_id: str | None, path: str = "events", params: Any = None) -> Iterator[ServerSentEvent]:
            self.connections += 1
            if self.connections in (4, 5, 6):
                raise Unreachable("nothing answers")
            yield ServerSentEvent("7", "started", json.dumps({"seq": self.connections}))

    events = history._endless_events(Restarted())
    assert [next(events)["seq"] for _ in range(5)] == [1, 2, 3, 7, 8]
    assert slept == [1, 1, 1, 2, 4, 8, 1]


def test_a_quiet_connection_resets_the_reconnect_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy may end connections on which nothing happens."""
    slept: list[float] = []
    monkeypatch.setattr(history.time, "sleep", slept.append)

    class Quiet(CutOff):
        def events(self, last_id: str | None, path: str = "events", params: Any = None) -> Iterator[ServerSentEvent]:
            self.asked.append(last_id)
            if len(self.asked) == 5:
                yield ServerSentEvent("8", "observe_only", json.dumps({"seq": 8}))
            first_id = ["id: 7"] if last_id is None else []
            yield from _parse(iter(["retry: 2000", *first_id, "", ": still here", ""]))
            raise Unreachable("the connection broke")

    assert next(history._endless_events(Quiet())) == {"seq": 8}
    assert slept == [1, 1, 1, 1]


def test_following_a_node_shows_a_run_once_it_touches_the_node(capsys: pytest.CaptureFixture[str]) -> None:
    """Which nodes a run on a job touches is known only then."""

    class Touching(Client):
        touched: tuple[str, ...] = ()
        reads = 0

        def __init__(self) -> None: ...

        def get(self, path: str, params: Any = None, accept: Any = ()) -> Any:
            run = {**item(1, touched=list(self.touched)), "run_id": "r-1"}
            self.reads += path != "history"
            return {"items": [], "next": None} if path == "history" else run

        def events(self, last_id: str | None, path: str = "events", params: Any = None) -> Iterator[ServerSentEvent]:
            for kind in ("started", "step_started", "step_ended"):
                data = {"seq": 1, "at": AT, "kind": kind, "run_id": "r-1", "data": {}}
                yield ServerSentEvent("", kind, json.dumps(data))
                self.touched = ("node-9",)
            raise KeyboardInterrupt

    client = Touching()
    with pytest.raises(KeyboardInterrupt):
        history._follow(client, {"node": ["node-9"]}, 10, as_json=True)
    shown = [json.loads(line)["kind"] for line in capsys.readouterr().out.splitlines()]
    assert (shown, client.reads) == (["step_started", "step_ended"], 2)
