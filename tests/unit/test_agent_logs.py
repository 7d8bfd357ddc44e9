"""Lines from the agents: who does not answer, and who answers nonsense."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.clocks import ManualClock
from tests.support.nodes_with_logs import BusOfNodes, LogNode, names
from trainmedic_server.adapters.agent_logs import AgentLogs
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.agent.no_logs import NoLogsExecutor
from trainmedic_server.domain import log_pages
from trainmedic_server.domain.log_search import LogQuery
from trainmedic_server.errors import LogsUnavailable, NotFound
from trainmedic_server.ports.logs import LogBatch

NOW = datetime.now(UTC)
QUERY = LogQuery("llm-1", NOW - timedelta(hours=1))


@pytest.fixture
def node(tmp_path: Path) -> LogNode:
    made = LogNode(tmp_path, "gpu-01")
    made.write("llm-1", 1, NOW, "a line")
    return made


async def asked(bus: BusOfNodes, *nodes: str) -> list[LogBatch]:
    return [batch async for batch in AgentLogs(bus, SystemClock()).search(QUERY, nodes, 100)]


async def test_a_node_that_does_not_answer_is_named_and_the_others_are_shown(node: LogNode) -> None:
    """Whoever reads the lines must know that some are missing."""
    (batch,) = await asked(BusOfNodes(names([node])), "gpu-01", "gpu-02")
    assert [line.node for line in batch.lines] == ["gpu-01"]
    assert batch.notes == ["no lines of 1 node are here: gpu-02: did not answer"]


async def test_a_node_that_reads_no_logs_says_so(node: LogNode, tmp_path: Path) -> None:
    """Its policy is the place to change that."""
    deaf = LogNode(tmp_path, "gpu-02")
    deaf.executor = NoLogsExecutor()
    (batch,) = await asked(BusOfNodes(names([node, deaf])), "gpu-01", "gpu-02")
    assert "gpu-02: this node's policy has no logs part" in batch.notes[0]


async def test_where_no_node_can_be_asked_that_is_an_error() -> None:
    """An empty answer would look like a quiet job. Asking again helps where a node is silent, and not where none is
    known."""
    with pytest.raises(LogsUnavailable, match="gpu-09: did not"):
        await asked(BusOfNodes({}), "gpu-09")
    with pytest.raises(NotFound, match="not known on which nodes llm-1 runs"):
        await asked(BusOfNodes({}))


LIE = {"at": "2026-01-31T12:00:00Z", "node": "gpu-99", "source": "training", "line": "x"}


@pytest.mark.parametrize(
    "page",
    [
        None,
        ["x"],
        log_pages.packed({"lines": [{"line": 3}], "cursor": [], "end": True, "notes": []}),
        log_pages.packed({"lines": [LIE], "end": True, "notes": []}),
        log_pages.packed({"lines": 3, "cursor": [], "end": True, "notes": []}),
    ],
)
async def test_an_answer_that_makes_no_sense_is_told_and_costs_nothing_else(node: LogNode, page: Any) -> None:
    """An agent of another version, or one that is not the node's own."""

    class Odd:
        def perform(self, accepted: object) -> dict[str, Any]:
            return {"page": page}

    odd = LogNode(node.root.parents[1], "gpu-02")
    odd.executor = Odd()  # type: ignore[assignment]
    (batch,) = await asked(BusOfNodes(names([node, odd])), "gpu-01", "gpu-02")
    assert len(batch.lines) == 1
    assert "gpu-02: its answer cannot be read" in batch.notes[0]


async def test_an_agent_speaks_for_its_own_node_alone(node: LogNode) -> None:
    """Whatever name stands in its lines."""

    class Liar:
        def perform(self, accepted: object) -> dict[str, Any]:
            return {"page": log_pages.packed({"lines": [LIE], "cursor": [], "end": True, "notes": []})}

    node.executor = Liar()  # type: ignore[assignment]
    (batch,) = await asked(BusOfNodes(names([node])), "gpu-01")
    assert [line.node for line in batch.lines] == ["gpu-01"]


async def test_commands_expire_and_are_acknowledged(node: LogNode) -> None:
    """So that no answer is delivered again after a restart, and none is waited for without an end."""
    bus = BusOfNodes(names([node]))
    await asked(bus, "gpu-01")
    (command,) = bus.asked
    assert command.action == "logs.read"
    assert timedelta(0) < command.expires_at - command.issued_at <= timedelta(seconds=15)


async def test_who_follows_is_told_once_who_stops_answering_and_once_who_answers_again(
    node: LogNode, tmp_path: Path
) -> None:
    """Silence looks like a quiet job; what was printed meanwhile comes afterwards, each line once."""
    other = LogNode(tmp_path, "gpu-02")
    bus = BusOfNodes(names([node, other]))
    batches = AgentLogs(bus, ManualClock(NOW)).follow(QUERY, ["gpu-01", "gpu-02"])

    async def read(count: int) -> tuple[list[str], list[str]]:
        lines, notes = [], []
        for _ in range(count):
            batch = await anext(batches)
            await asyncio.sleep(0.01)
            lines += [line.text.partition(" ")[2] for line in batch.lines]
            notes += batch.notes
        return lines, notes

    assert await read(1) == (["a line"], [])
    del bus.nodes["gpu-01"]
    assert await read(12) == ([], ["no lines of 1 node are here: gpu-01: did not answer"])
    node.write("llm-1", 1, NOW, "printed while its agent was dead")
    bus.nodes["gpu-01"] = node
    assert await read(12) == (["printed while its agent was dead"], ["the lines of 1 node come again: gpu-01"])
    del bus.nodes["gpu-01"], bus.nodes["gpu-02"]
    assert await read(12) == ([], ["no lines of 2 nodes are here: gpu-01: did not answer; gpu-02: did not answer"])
    await batches.aclose()


async def test_nobody_waits_for_nodes_that_have_stopped_answering(node: LogNode, tmp_path: Path) -> None:
    """An agent is given many seconds to answer; the lines of the others come meanwhile, however many are silent."""
    other = LogNode(tmp_path, "gpu-02")

    class Slow(BusOfNodes):
        async def request(self, command: Any, unheard: Any = None) -> Any:
            if command.target["node"] not in self.nodes and self.is_told:
                await asyncio.Event().wait()
            return await super().request(command, unheard)

        is_told = False

    bus = Slow(names([node, other]))
    silent = [f"gone-{number:02}" for number in range(40)]
    batches = AgentLogs(bus, ManualClock(NOW)).follow(QUERY, ["gpu-01", "gpu-02", *silent])
    await anext(batches)
    del bus.nodes["gpu-01"]
    while "gpu-01" not in " ".join((await anext(batches)).notes):
        pass
    bus.is_told = True
    found: list[str] = []
    async with asyncio.timeout(30):
        for number in range(3):
            other.write("llm-1", 1, NOW, f"line {number}")
            while len(found) <= number:
                found += [line.text.partition(" ")[2] for line in (await anext(batches)).lines]
                await asyncio.sleep(0.01)
    assert found == ["line 0", "line 1", "line 2"]
    await batches.aclose()
