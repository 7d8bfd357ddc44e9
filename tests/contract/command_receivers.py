"""The two receivers of commands, a training job and a node agent, as `test_command_receivers` drives them.

Each is its real parts, with a real Redis. Their threads are left out, all but the writer's: the test hands a command
over as the thread that follows the stream does, and carries out what waits as the training or worker thread does. So
a test says at which moment a process is killed. What a `kill` does not model: a write to the disk that is half done.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from tests.support.messages import make_command
from tests.support.programs import eventually
from trainmedic.errors import Rejected
from trainmedic.job.command import JobCommand
from trainmedic.job.handlers import LIVE, HandlerRegistry
from trainmedic.job.queue import CommandQueue
from trainmedic.wire import envelope
from trainmedic.wire.command_memory import CommandMemory
from trainmedic.wire.connection import OutageLog, RedisConnection
from trainmedic.wire.envelope import Command, Reply
from trainmedic.wire.receiver import CommandConsumer, ReceivedCommand
from trainmedic.wire.writer import PresenceKey, ReplyWriter
from trainmedic_agent.command_runner import CommandRunner
from trainmedic_agent.context import AgentContext
from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.errors import CommandFailed, CommandRejected, JournalUnavailable
from trainmedic_agent.executors import AcceptedCommand
from trainmedic_agent.journal import Journal
from trainmedic_agent.policy import Policy
from trainmedic_agent.replies import AgentReplies
from trainmedic_agent.worker_queues import WorkerQueue


class Killed(BaseException):
    """The process ends here."""


class WriterConnection(RedisConnection):
    """The writer's way to Redis, which a test can close: nothing that waits there arrives then."""

    def __init__(self, url: str) -> None:
        super().__init__(lambda: url, OutageLog("the contract"))
        self.is_open = True

    @contextlib.contextmanager
    def turn(self) -> Iterator[redis.Redis]:
        if not self.is_open:
            raise redis.ConnectionError("closed by the test")
        with super().turn() as client:
            yield client


class Receiver(ABC):
    """One receiver, over several processes of it."""

    action: str
    """An action that it carries out."""
    params: Mapping[str, Any]
    target: Mapping[str, str]
    stream: str
    full: str
    """The status of the answer where too many commands wait."""
    resumes: bool
    """Whether the next process carries out what an earlier one had when it was killed; else that is answered
    ``failed``."""
    failed_may_have_acted: bool
    """Whether there may be something to undo of a command that failed."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory = directory
        self.client = redis.Redis.from_url(url)
        self.done: list[str] = []
        """The ids of what had an effect, in order."""
        self.outcome = envelope.APPLIED
        """How commands end from now on."""
        self.is_killed_while_acting = False
        self._url = url
        self._begin_process()

    def close(self) -> None:
        self._end_process()
        self.client.close()

    def command(self, seconds: float = 60.0, undo_of: str | None = None, **changes: Any) -> Command:
        return make_command(self.action, seconds, target=self.target, params=self.params, undo_of=undo_of, **changes)

    def send(self, command: Command) -> Command:
        """Put it on the stream, and hand it over."""
        entry: Any = self.client.xadd(self.stream, {"command": command.encode()})
        self._consumer.receive(ReceivedCommand(command, entry, self.client, self.stream))
        return command

    def refuse(self, command: Command) -> None:
        """Put it on the stream, and hand it over as one that is not genuine."""
        entry: Any = self.client.xadd(self.stream, {"command": command.encode()})
        self._consumer.refuse(ReceivedCommand(command, entry, self.client, self.stream), "the command is forged")

    def answered(self, command: Command, nth: int = 1) -> Reply:
        """The nth final reply to a command, once Redis has it."""
        return eventually(lambda: self._finals(command)[nth - 1 :], 60, f"answer {nth}", 0.005)[0]

    def ask(self, command: Command) -> Reply:
        """Send a command, carry out what waits, and return the newest answer."""
        before = len(self._finals(command))
        self.send(command)
        self.work()
        return self.answered(command, before + 1)

    def is_off_the_stream(self) -> bool:
        return bool(self.client.xlen(self.stream) == 0)

    def restart(self) -> None:
        """Kill the process with all that waits in it, and begin the next, which is handed what is on the stream."""
        self._connection.is_open = False
        self._end_process()
        self._begin_process()
        entries: Any = self.client.xrange(self.stream)
        for entry, fields in entries:
            command = Command.decode(fields[b"command"])
            self._consumer.receive(ReceivedCommand(command, entry, self.client, self.stream))

    def lose_replies(self) -> None:
        """From now on nothing of this process arrives in Redis."""
        self._connection.is_open = False

    def begin_without_memory(self) -> None:
        """Kill the process, and begin the next with all that it remembered lost."""
        self._connection.is_open = False
        self._end_process()
        self._lose_memory()
        self._begin_process()

    @abstractmethod
    def work(self) -> None:
        """Carry out what waits."""

    @abstractmethod
    def _lose_memory(self) -> None: ...

    @abstractmethod
    def _end_process(self) -> None: ...

    @abstractmethod
    def _start(self) -> CommandConsumer: ...

    def _begin_process(self) -> None:
        self._connection = WriterConnection(self._url)
        self._consumer = self._start()
        self._consumer.connected(self.client)

    def _act(self, command_id: str, refusals: Mapping[str, Callable[[], Exception]]) -> dict[str, Any]:
        if self.outcome in refusals:
            raise refusals[self.outcome]()
        self.done.append(command_id)
        if self.is_killed_while_acting:
            raise Killed
        return {"number": len(self.done)}

    def _finals(self, command: Command) -> list[Reply]:
        entries: Any = self.client.xrange(envelope.REPLIES)
        replies = [Reply.decode(fields[b"reply"]) for _, fields in entries]
        return [reply for reply in replies if reply.command_id == command.id and reply.is_final]


class Agent(Receiver):
    """A node agent with one executor, which is its own worker queue."""

    action, params, target = "gpu.power_limit", {}, {"kind": "node", "node": "n1"}
    stream = envelope.node_commands("n1")
    full, resumes, failed_may_have_acted = envelope.FAILED, True, True
    queue = "gpu"

    def perform(self, accepted: AcceptedCommand) -> Mapping[str, Any]:
        refusals = {
            envelope.FAILED: lambda: CommandFailed("as the test says"),
            envelope.REJECTED: lambda: CommandRejected("as the test says"),
            "bug": lambda: KeyError("as the test says"),
        }
        return self._act(accepted.command.id, refusals)

    def put(self, accepted: AcceptedCommand) -> None:
        self._waiting.append(accepted)

    def work(self) -> None:
        while self._waiting:
            self._runner.carry_out(self._waiting.pop(0))

    @contextlib.contextmanager
    def without_journal(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """While this holds nothing can be written into the journal, as on a disk that fails."""

        def fail(*_: object) -> None:
            raise JournalUnavailable("as the test says")

        with monkeypatch.context() as patched:
            patched.setattr(self._journal, "write", fail)
            yield

    def _start(self) -> CommandConsumer:
        self._waiting: list[AcceptedCommand] = []
        self._journal = Journal(self.directory)
        policy = Policy(allow=frozenset({self.action}))
        context = AgentContext(
            "n1", lambda: None, None, policy, self._journal, AgentCounters(), lambda: envelope.utc_now()
        )
        self._replies = AgentReplies(context, envelope.new_id(), self._connection, dict)
        self._runner = CommandRunner(context, {self.action: self}, self._replies, threading.Event())
        self._runner.begin({self.queue: cast("WorkerQueue", self)})
        self._replies.start()
        return self._runner

    def _end_process(self) -> None:
        self._replies.stop(60)
        self._journal.close()

    def _lose_memory(self) -> None:
        shutil.rmtree(self.directory)


class ReadingAgent(Agent):
    """A node agent whose executor only reads, so that its journal has none of the commands."""

    is_only_reading = True


class Job(Receiver):
    """A job of one rank, with one handler that keeps no record of what is in force."""

    action, params, target = "job.scale_lr", {"factor": 0.5}, {"kind": "job", "job": "llm-1"}
    stream = envelope.job_commands("llm-1")
    full, resumes, failed_may_have_acted = envelope.REJECTED, False, False

    def work(self) -> None:
        self._handlers.carry_out(self._queue.take_due(envelope.utc_now()))

    def _handle(self, command: JobCommand) -> Mapping[str, Any]:
        refusals = {
            envelope.FAILED: lambda: RuntimeError("as the test says"),
            envelope.REJECTED: lambda: Rejected("as the test says"),
        }
        return self._act(command.id, refusals)

    def _start(self) -> CommandConsumer:
        memory = CommandMemory("job:llm-1", envelope.new_id())
        presence = PresenceKey(envelope.job_presence("llm-1"), "llm-1", dict, lambda _: None)
        self._writer = ReplyWriter(self._connection, memory, self.stream, presence, None)
        self._handlers = HandlerRegistry("llm-1", {}, contextlib.nullcontext)
        self._handlers.register(self.action, self._handle, LIVE)
        self._queue = CommandQueue("llm-1", "host", memory, self._handlers, self._writer.put, self._report_outcome)
        self._writer.start()
        return self._queue

    def _report_outcome(self, command: JobCommand, status: str, output: Mapping[str, Any]) -> None:
        self._handlers.in_progress.pop(command.id, None)
        self._queue.close(command, status, output)

    def _end_process(self) -> None:
        self._writer.stop(60)

    def _lose_memory(self) -> None:
        self.client.flushall()


def later(command: Command, seconds: float = 60.0) -> Command:
    """The same command, sent once more with more time."""
    return replace(command, expires_at=envelope.utc_now() + timedelta(seconds=seconds))
