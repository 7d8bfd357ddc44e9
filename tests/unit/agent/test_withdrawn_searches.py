"""Searches that the server withdraws, because their callers have left: they end early, and nothing else does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import Struct

from tests.support.messages import make_command
from tests.support.search_in_process import search_executor, searcher_of
from trainmedic.wire import envelope
from trainmedic.wire.command_book import CommandRecord
from trainmedic.wire.receiver import ReceivedCommand
from trainmedic_agent.command_runner import CommandRunner
from trainmedic_agent.context import AgentContext
from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.errors import CommandInterrupted, CommandWithdrawn
from trainmedic_agent.executors import AcceptedCommand, Executor
from trainmedic_agent.journal import Journal
from trainmedic_agent.log_link.linked_reading import LinkedSearch
from trainmedic_agent.log_reading.log_policy import LogsPolicy
from trainmedic_agent.policy import Policy
from trainmedic_agent.replies import AgentReplies
from trainmedic_agent.worker_queues import WorkerQueue
from trainmedic_logs.domain import log_pages
from trainmedic_logs.domain.log_search import READ, WITHDRAW, LogLevel, LogQuery

QUERY = LogQuery("llm-1", datetime.now(UTC) - timedelta(days=1), level=LogLevel.ERROR)
LINES = 20_000


class After:
    """False for a number of calls, then true."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.fixture
def executor(tmp_path: Path) -> LinkedSearch:
    log = tmp_path / "logs" / "llm-1" / "attempt-1" / "launcher-n1.log"
    log.parent.mkdir(parents=True)
    log.write_text("a line of a job that goes on as it should\n" * LINES + "ERROR the last line\n")
    return search_executor(searcher_of(LogsPolicy(roots=(str(tmp_path / "logs"),)), "n1"))


def search(calls: Callable[[], bool], **flags: Any) -> AcceptedCommand:
    return AcceptedCommand(make_command(READ, params=QUERY.to_wire()), **{**flags, "is_withdrawn": calls})


def found(executor: LinkedSearch) -> list[str]:
    page = log_pages.unpacked(executor.perform(search(lambda: False))["page"])
    return [line["line"] for line in page["lines"]]


@pytest.mark.parametrize("calls", [0, 1, 2, 5, 100, 5000])
def test_a_withdrawn_search_ends_where_it_is(executor: LinkedSearch, calls: int) -> None:
    """It ends before the directories are scanned, during the scan, and between any two lines."""
    withdrawn = After(calls)
    with pytest.raises(CommandWithdrawn):
        executor.perform(search(withdrawn))
    assert withdrawn.left > -200, "it went on after it was withdrawn"


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_the_search_after_a_withdrawn_one_is_complete(executor: LinkedSearch, calls: int) -> None:
    """A directory scan that was cut short is not kept."""
    with contextlib.suppress(CommandWithdrawn):
        executor.perform(search(After(calls)))
    assert found(executor) == ["ERROR the last line"]


def test_a_search_is_interrupted_when_the_agent_stops(executor: LinkedSearch) -> None:
    """The next start of the agent answers it, if that comes in time."""
    with pytest.raises(CommandInterrupted):
        executor.perform(search(lambda: False, is_stopping=After(100)))


# --- from the stream to the executor ----------------------------------------------------------------------


class Recorded(Struct):
    """An executor that records what it was given."""

    action: str
    queue: str = "logs"
    performed: list[str] = []

    def perform(self, accepted: AcceptedCommand) -> Mapping[str, Any]:
        self.performed.append(accepted.command.id)
        return {}


class Reading(Recorded):
    """One whose commands can be withdrawn."""

    withdrawal: str = WITHDRAW


@dataclass
class Replies:
    """Takes replies instead of Redis."""

    answers: list[tuple[str, str]] = field(default_factory=list)

    def answer(self, command_id: str, record: CommandRecord, entry: bytes) -> None:
        self.answers.append((command_id, record.status))

    def send_outcome(self, command_id: str, outcome: CommandRecord) -> None:
        self.answers.append((command_id, outcome.status))

    def name_conflict(self) -> None:
        return None


@dataclass
class Received:
    """A command on its stream."""

    command: envelope.Command
    entry: bytes = b"1-0"
    is_dropped: bool = False

    def drop(self) -> None:
        self.is_dropped = True


class Agent:
    """The way of a command through an agent, without its threads."""

    def __init__(self, directory: Path, executors: dict[str, Executor]) -> None:
        self.journal = Journal(directory)
        context = AgentContext(
            "n1", lambda: None, None, Policy(allow=frozenset({"gpu.power_limit"})), self.journal, AgentCounters()
        )
        self.replies = Replies()
        self.waiting: list[AcceptedCommand] = []
        self._runner = CommandRunner(context, executors, cast("AgentReplies", self.replies), threading.Event())
        self._runner.begin({"logs": cast("WorkerQueue", self)})

    def put(self, accepted: AcceptedCommand) -> None:
        """Queue a command, as its worker queue does."""
        self.waiting.append(accepted)

    def receive(self, command: envelope.Command) -> Received:
        received = Received(command)
        self._runner.receive(cast("ReceivedCommand", received))
        return received

    def work(self) -> None:
        """Carry out what waits."""
        for accepted in self.waiting:
            self._runner.carry_out(accepted)


Making = Callable[[dict[str, Executor]], Agent]


@pytest.fixture
def agent_with(tmp_path: Path) -> Iterator[Making]:
    made: list[Agent] = []

    def make(executors: dict[str, Executor]) -> Agent:
        made.append(Agent(tmp_path / "state", executors))
        return made[-1]

    yield make
    for agent in made:
        agent.journal.close()


def command(action: str, **params: Any) -> envelope.Command:
    return make_command(action, target={"kind": "node", "node": "n1"}, params=params)


def test_a_waiting_search_that_is_withdrawn_is_never_started(agent_with: Making) -> None:
    """The withdrawal is neither answered nor persisted, and the searches next to it are executed."""
    reading = Reading(READ, performed=[])
    agent = agent_with({READ: reading})
    left, kept = command(READ), command(READ)
    agent.receive(left)
    agent.receive(kept)
    withdrawal = command(WITHDRAW, command=left.id)
    assert agent.receive(withdrawal).is_dropped
    agent.work()
    assert reading.performed == [kept.id]
    assert agent.replies.answers[2:] == [(left.id, envelope.EXPIRED), (kept.id, envelope.APPLIED)]
    assert agent.journal.look_up(withdrawal.id) is None


@pytest.mark.parametrize("params", [{}, {"command": None}, {"command": "unknown"}, {"command": ["x"] * 1000}])
def test_a_withdrawal_without_a_search_changes_nothing(agent_with: Making, params: dict[str, Any]) -> None:
    """It may come after the search has ended, or twice."""
    reading = Reading(READ, performed=[])
    agent = agent_with({READ: reading})
    assert agent.receive(command(WITHDRAW, **params)).is_dropped
    search = command(READ)
    agent.receive(search)
    agent.work()
    assert reading.performed == [search.id]


def test_a_command_that_changes_something_cannot_be_withdrawn(agent_with: Making) -> None:
    """Its outcome must be known, so it ends as usual."""
    acting = Recorded("gpu.power_limit", performed=[])
    agent = agent_with({READ: Reading(READ, performed=[]), "gpu.power_limit": acting})
    cap = command("gpu.power_limit")
    agent.receive(cap)
    agent.receive(command(WITHDRAW, command=cap.id))
    agent.work()
    assert acting.performed == [cap.id]


def test_an_agent_without_withdrawal_support_reports_it_and_continues_the_search(agent_with: Making) -> None:
    """Agents of earlier versions do, and one that reads no logs."""
    reading = Recorded(READ, performed=[])
    agent = agent_with({READ: reading})
    search, withdrawal = command(READ), command(WITHDRAW)
    agent.receive(search)
    agent.receive(withdrawal)
    agent.work()
    assert reading.performed == [search.id]
    assert (withdrawal.id, envelope.UNSUPPORTED) in agent.replies.answers
