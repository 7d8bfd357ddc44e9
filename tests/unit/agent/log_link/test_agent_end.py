"""The agent's end of the link: it answers, and it ends a reader that breaks the rules."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.programs import eventually
from tests.unit.agent.log_link.linking import LONG, LinkedAgent, PlayedReader
from trainmedic_agent.errors import CommandFailed, CommandInterrupted, CommandRejected
from trainmedic_agent.log_link import agent_end, link_socket, metric_families
from trainmedic_agent.log_link.agent_end import AgentEnd
from trainmedic_agent.log_link.link_socket import Peer
from trainmedic_agent.log_link.messages import (
    LARGEST_OF_READER,
    AgentMessage,
    FailureKind,
    FindingBatch,
    GpusNow,
    LogMetric,
    LogSample,
    MetricKind,
    Ping,
    Pong,
    QueuedFinding,
    ReaderStatus,
    SearchAnswer,
    SearchFailure,
    SearchRequest,
    SearchWithdrawn,
    encoded,
)

METRIC = LogMetric("trainmedic_agent_log_lines", MetricKind.COUNTER, "Lines.", [LogSample(3.0, {"source": "training"})])


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LinkedAgent]:
    # The reader that breaks the rules is this process.
    monkeypatch.setattr(Peer, "kill", lambda _: True)
    with LinkedAgent(tmp_path) as made:
        yield made


def pong(number: int, metrics: list[LogMetric] | None = None) -> Pong:
    return Pong(number, ReaderStatus(rules="r1", files=2), {"log-files": 1}, metrics)


def searching(agent: LinkedAgent, is_stopping: Callable[[], bool] = lambda: False) -> list[Any]:
    """Search in a thread; the list gets the answer, or the error."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(agent.link.search({"job": "a"}, is_stopping))
        except Exception as error:  # it is what the test looks at
            outcome.append(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def outcome_of(outcome: list[Any]) -> Any:
    return eventually(lambda: outcome, LONG, "the outcome of the search", every=0.01)[0]


def test_a_heartbeat_carries_the_status_and_survived_errors(agent: LinkedAgent) -> None:
    """Each error of a loop is counted once."""
    reader = agent.reader()
    for _ in range(2):
        assert agent.link.beat()
        reader.send(pong(reader.gets(Ping).number))
    eventually(lambda: agent.link.is_up and agent.link.status.files == 2, LONG, "the status", every=0.01)
    assert agent.counters.loop_errors.all() == {"log-files": 1}


def test_a_scrape_shows_the_readers_metrics(agent: LinkedAgent) -> None:
    """The values are current, under the names used before."""
    reader = agent.reader()
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.extend(agent.link.metrics()))
    thread.start()
    ping = reader.gets(Ping)
    assert ping.wants_metrics
    reader.send(pong(ping.number, [METRIC]))
    thread.join(LONG)
    (family,) = metric_families.from_messages(got)
    assert [(each.name, each.labels, each.value) for each in family.samples] == [
        ("trainmedic_agent_log_lines_total", {"source": "training"}, 3.0)
    ]


def test_a_search_is_answered(agent: LinkedAgent) -> None:
    reader = agent.reader()
    outcome = searching(agent)
    request = reader.gets(SearchRequest)
    assert request.params == {"job": "a"}
    reader.send(SearchAnswer(request.id, ["page"]))
    assert outcome_of(outcome) == ["page"]


@pytest.mark.parametrize(
    ("kind", "error"), [(FailureKind.REJECTED, CommandRejected), (FailureKind.FAILED, CommandFailed)]
)
def test_a_failed_search_has_the_readers_reason(agent: LinkedAgent, kind: FailureKind, error: type[Exception]) -> None:
    reader = agent.reader()
    outcome = searching(agent)
    reader.send(SearchFailure(reader.gets(SearchRequest).id, kind, "no such job"))
    answer = outcome_of(outcome)
    assert isinstance(answer, error)
    assert str(answer) == "no such job"


def test_a_search_ends_with_the_reader(agent: LinkedAgent) -> None:
    """It fails at once, and so does the next one while there is no reader."""
    reader = agent.reader()
    outcome = searching(agent)
    reader.gets(SearchRequest)
    reader.socket.close()
    assert isinstance(outcome_of(outcome), CommandFailed)


def test_a_search_is_withdrawn_when_the_agent_stops(agent: LinkedAgent) -> None:
    """A late answer to it is no fault."""
    reader = agent.reader()
    stopping = threading.Event()
    outcome = searching(agent, stopping.is_set)
    request = reader.gets(SearchRequest)
    stopping.set()
    assert isinstance(outcome_of(outcome), CommandInterrupted)
    assert reader.gets(SearchWithdrawn).id == request.id
    reader.send(SearchAnswer(request.id, ["late"]))
    assert agent.link.beat()
    reader.send(pong(reader.gets(Ping).number))
    eventually(lambda: agent.link.is_up, LONG, "the answer to the heartbeat", every=0.01)


def test_a_search_without_a_reader_fails(agent: LinkedAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_end, "CONNECT_SECONDS", 0.01)
    with pytest.raises(CommandFailed, match="does not answer"):
        agent.link.search({"job": "a"}, lambda: False)


def test_a_search_before_the_greeting_fails(agent: LinkedAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that has no policy yet would leave it unanswered."""
    monkeypatch.setattr(agent_end, "CONNECT_SECONDS", 0.01)
    agent.connect()
    with pytest.raises(CommandFailed, match="does not answer"):
        agent.link.search({"job": "a"}, lambda: False)


def test_an_unresponsive_reader_is_ended(agent: LinkedAgent) -> None:
    """Another reader replaces it."""
    reader = agent.reader()
    assert agent.link.beat()
    agent.now += agent_end.HEARTBEAT_SECONDS + 1
    assert not agent.link.beat()
    agent.lost_it()
    reader.socket.close()
    second = agent.reader()
    assert agent.link.beat()
    second.send(pong(second.gets(Ping).number))
    eventually(lambda: agent.link.is_up, LONG, "the second reader", every=0.01)


def test_a_reader_that_ends_during_the_greeting_does_not_count_as_the_next(
    agent: LinkedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader ignores heartbeats before its greeting, and would be ended for it."""
    first = agent.reader()

    def send_last(message: AgentMessage, generation: int | None = None) -> bool:
        is_sent = AgentEnd.send(agent.link, message, generation)
        first.socket.close()
        agent.lost_it()
        return is_sent

    with monkeypatch.context() as patched:
        patched.setattr(agent.link, "send", send_last)
        agent.link.greet([GpusNow({})], agent.link.generation)
    second = PlayedReader(link_socket.connect(agent.directory))
    eventually(lambda: agent.link.is_connected, LONG, "the second reader", every=0.01)
    assert agent.link.beat()
    agent.link.greet([GpusNow({})], agent.link.generation)
    second.gets(GpusNow)
    second.socket.close()


def test_finding_batches_wait_for_each_other(agent: LinkedAgent) -> None:
    """A second batch before the first is acknowledged ends the reader."""
    reader = agent.reader()
    batch = FindingBatch([QueuedFinding(1, b"x")])
    reader.send(batch)
    eventually(lambda: agent.findings.batch == batch, LONG, "the batch", every=0.01)
    reader.send(batch)
    agent.lost_it()


def _framed(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


HOSTILE = {
    "longer than a frame may be": struct.pack(">I", LARGEST_OF_READER + 1),
    "the longest length": b"\xff" * 64,
    "no MessagePack": _framed(b"\xc1" * 100),
    "empty": _framed(b""),
    "deeply nested": _framed(b"\x91" * 100_000),
    "a list that claims more than it has": _framed(b"\xdd\xff\xff\xff\xff"),
    "an unknown kind": _framed(msgspec.msgpack.encode({"type": "welcome"})),
    "a field of a wrong type": _framed(msgspec.msgpack.encode({"type": "pong", "number": "one"})),
    "a heartbeat that was not sent": _framed(encoded(pong(4711))),
    "an answer that nobody asked for": _framed(encoded(SearchAnswer(4711, []))),
    "too many findings": _framed(encoded(FindingBatch([QueuedFinding(n, b"") for n in range(51)]))),
    "a negative number": _framed(
        msgspec.msgpack.encode({"type": "findings", "updates": [{"number": -1, "body": b""}]})
    ),
    "a metric of the agent's own": _framed(
        msgspec.msgpack.encode(
            {
                "type": "pong",
                "number": 1,
                "status": {},
                "loop_errors": {},
                "metrics": [{"name": "trainmedic_agent_redis_connected", "kind": "gauge", "text": "", "samples": []}],
            }
        )
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_reader_that_violates_the_protocol_loses_its_link(agent: LinkedAgent, what: str) -> None:
    """The agent accepts nothing from it, and serves the next reader."""
    reader = agent.reader()
    assert agent.link.beat()
    reader.socket.sendall(HOSTILE[what])
    agent.lost_it()
    assert agent.link.status == ReaderStatus()
    assert agent.findings.batch is None
    assert isinstance(agent.reader(), PlayedReader)


def test_an_endless_frame_ends_when_heartbeats_stop(agent: LinkedAgent) -> None:
    """No answer can arrive while a frame does not end."""
    reader = agent.reader()
    reader.socket.sendall(struct.pack(">I", LARGEST_OF_READER) + b"x" * 1000)
    assert agent.link.beat()
    agent.now += agent_end.HEARTBEAT_SECONDS + 1
    assert not agent.link.beat()
    agent.lost_it()


def test_loop_names_are_bounded(agent: LinkedAgent) -> None:
    """However many names a reader invents, only a few become series of the agent."""
    reader = agent.reader()
    for turn in range(5):
        assert agent.link.beat()
        errors = {f"loop-{turn}-{number}": 1 for number in range(16)}
        reader.send(Pong(reader.gets(Ping).number, ReaderStatus(files=turn), errors))
    eventually(lambda: agent.link.status.files == 4, LONG, "the last status", every=0.01)
    assert len(agent.counters.loop_errors.all()) == 16
