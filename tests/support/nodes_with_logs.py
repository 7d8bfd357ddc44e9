"""Nodes that have logs of a job, behind a command bus in memory: the agents' own code answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.support.search_in_process import search_executor, searcher_of
from trainmedic.wire import envelope
from trainmedic.wire.log_layout import AttemptLogs
from trainmedic.wire.output import fitting, plain
from trainmedic_agent.errors import CommandNotExecuted
from trainmedic_agent.executors import AcceptedCommand, Executor
from trainmedic_agent.log_reading.log_policy import KernelLog, KernelReading, LogsPolicy
from trainmedic_server.ports.outside import Presence


class LogNode:
    """One node: a log directory and a kernel's log."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.root = directory / name / "logs"
        self.root.mkdir(parents=True)
        self.kernel = directory / name / "kern.log"
        self.kernel.touch()
        kernel = KernelLog(KernelReading.FILE, str(self.kernel))
        self.executor: Executor = search_executor(searcher_of(LogsPolicy(roots=(str(self.root),), kernel=kernel), name))

    def write(self, job: str, attempt: int, at: datetime, text: str) -> None:
        """A line that the job prints here, with its time."""
        file = AttemptLogs.of(self.root, job, attempt).launcher(self.name)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as opened:
            opened.write(f"{at.isoformat()} {text}\n")

    def write_kernel(self, at: datetime, text: str) -> None:
        with self.kernel.open("a") as opened:
            opened.write(f"{at.isoformat()} {self.name} kernel: {text}\n")


@dataclass
class BusOfNodes:
    """Carries commands to the nodes that are there; others do not answer."""

    nodes: dict[str, LogNode]
    is_signed: bool = True
    asked: list[envelope.Command] = field(default_factory=list)
    told: list[envelope.Command] = field(default_factory=list)
    """Messages that expect no reply."""

    async def request(
        self, command: envelope.Command, unheard: Callable[[], Awaitable[bool]] | None = None
    ) -> tuple[envelope.Reply, ...]:
        self.asked.append(command)
        node = self.nodes.get(command.target["node"])
        if node is None:
            return ()
        try:
            status, output = envelope.APPLIED, node.executor.perform(AcceptedCommand(command))
        except CommandNotExecuted as error:
            status, output = error.status, {"reason": str(error)}
        sent: Any = fitting(plain(output))
        now = datetime.now(UTC)
        return (envelope.Reply(command.id, node.name, status, None, sent, now, node=node.name),)

    def tell(self, command: envelope.Command) -> None:
        self.told.append(command)

    def acknowledge(self, command_id: str) -> None:
        assert command_id in {command.id for command in self.asked}

    async def agents(self) -> list[Presence]:
        return []

    async def jobs(self) -> list[Presence]:
        return []

    async def launchers(self) -> list[Presence]:
        return []

    async def check(self) -> None:
        return None


def names(nodes: Sequence[LogNode]) -> dict[str, LogNode]:
    return {node.name: node for node in nodes}
