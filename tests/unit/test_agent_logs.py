"""Lines from the agents: who does not answer, and who answers nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.clocks import ManualClock
from tests.support.nodes_with_logs import BusOfNodes, LogNode, names
from trainmedic.wire import envelope
from trainmedic_agent.executors import AcceptedCommand
from trainmedic_agent.no_logs import NoLogsExecutor
from trainmedic_logs.domain import log_pages
from trainmedic_logs.domain.log_search import LogQuery, TimeKnownBy, left_out
from trainmedic_server.adapters import agent_logs
from trainmedic_server.adapters.agent_logs import AgentLogs
from trainmedic_server.adapters.system_clock import SystemClock
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
    assert batch.notes == ["lines of 1 node are missing: gpu-02: did not answer"]


async def test_a_node_that_reads_no_logs_says_so(node: LogNode, tmp_path: Path) -> None:
    """Its policy is the place to change that."""
    deaf = LogNode(tmp_path, "gpu-02")
    deaf.executor = NoLogsExecutor()
    (batch,) = await asked(BusOfNodes(names([node, deaf])), "gpu-01", "gpu-02")
    assert "gpu-02: this node's policy has no logs part" in batch.notes[0]


async def test_a_search_cut_between_two_batches_names_the_last_line_shown(
    node: LogNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes on from there misses nothing, and reads nothing twice."""
    monkeypatch.setattr(agent_logs, "BATCH", 100)
    for number in range(1, 150):
        node.write("llm-1", 1, NOW + timedelta(milliseconds=number), "a line")
    batches = await asked(BusOfNodes(names([node])), "gpu-01")
    assert [len(batch.lines) for batch in batches] == [100, 0]
    assert left_out(100, batches[0].lines[-1].at) in batches[-1].notes


async def test_where_no_node_can_be_asked_that_is_an_error() -> None:
    """An empty answer would look like a quiet job. Asking again helps where a node is silent, and not where none is
    known."""
    with pytest.raises(LogsUnavailable, match="gpu-09: did not"):
        await asked(BusOfNodes({}), "gpu-09")
    with pytest.raises(NotFound, match="the nodes of llm-1 are unknown"):
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
        log_pages.packed({"lines": ["x"], "cursor": [], "end": True, "notes": []}),
        log_pages.packed({"cursor": [], "end": True, "notes": []}),
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


async def test_an_error_of_more_seconds_than_a_float_holds_is_unknown(node: LogNode) -> None:
    """And hides no lines, of this node or others."""

    class Odd:
        def perform(self, accepted: object) -> dict[str, Any]:
            lines = [LIE | {"time_error": 10**400}]
            return {"page": log_pages.packed({"lines": lines, "cursor": [], "end": True, "notes": []})}

    odd = LogNode(node.root.parents[1], "gpu-02")
    odd.executor = Odd()  # type: ignore[assignment]
    (batch,) = await asked(BusOfNodes(names([node, odd])), "gpu-01", "gpu-02")
    assert [line.time_error for line in batch.lines if line.node == "gpu-02"] == [None]
    assert len(batch.lines) == 2


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
    assert await read(12) == ([], ["lines of 1 node are missing: gpu-01: did not answer"])
    node.write("llm-1", 1, NOW, "printed while its agent was dead")
    bus.nodes["gpu-01"] = node
    assert await read(12) == (["printed while its agent was dead"], ["lines of 1 node are available again: gpu-01"])
    del bus.nodes["gpu-01"], bus.nodes["gpu-02"]
    assert await read(12) == ([], ["lines of 2 nodes are missing: gpu-01: did not answer; gpu-02: did not answer"])
    await batches.aclose()


async def test_who_follows_until_a_time_is_not_kept_waiting_after_it(node: LogNode) -> None:
    """Nor who names one that has passed."""
    for until in (NOW + timedelta(minutes=1), NOW - timedelta(minutes=1)):
        clock = ManualClock(NOW)
        query = replace(QUERY, until=until)
        async for _ in AgentLogs(BusOfNodes(names([node])), clock).follow(query, ["gpu-01"]):
            assert clock.now() <= max(until, NOW) + timedelta(seconds=20)


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
    async with asyncio.timeout(60):
        for number in range(3):
            other.write("llm-1", 1, NOW, f"line {number}")
            while len(found) <= number:
                found += [line.text.partition(" ")[2] for line in (await anext(batches)).lines]
                await asyncio.sleep(0.01)
    assert found == ["line 0", "line 1", "line 2"]
    await batches.aclose()


SEARCH = replace(QUERY, is_search=True)


async def searched(bus: BusOfNodes, query: LogQuery, *nodes: str, clock: Any = None) -> list[LogBatch]:
    return [batch async for batch in AgentLogs(bus, clock or SystemClock()).search(query, nodes, 100)]


async def test_of_a_job_that_nobody_knows_all_are_asked_and_those_with_its_files_answer(
    node: LogNode, tmp_path: Path
) -> None:
    """Who does not answer is named; the kernels of other nodes have nothing to do with the job."""
    others = [LogNode(tmp_path, f"gpu-0{number}") for number in (2, 3)]
    others[1].write("llm-1", 1, NOW - timedelta(seconds=5), "a line before")
    for each in (node, *others):
        each.write_kernel(NOW, "NVRM: Xid (PCI:0000:9b:00): 79")
    bus = BusOfNodes(names([node, *others]))
    query = replace(SEARCH, kernel=True)
    (batch,) = await searched(bus, query, "gpu-01", "gpu-02", "gpu-03", "gpu-04")
    assert [(line.node, line.source) for line in batch.lines if line.source != "kernel"] == [
        ("gpu-03", "launcher"),
        ("gpu-01", "launcher"),
    ]
    assert sorted(line.node for line in batch.lines if line.source == "kernel") == ["gpu-01", "gpu-03"]
    assert batch.notes == ["lines of 1 node are missing: gpu-04: did not answer"]


async def test_a_job_of_which_no_node_has_files_is_not_found(node: LogNode, tmp_path: Path) -> None:
    """Unless one did not answer, which may have some."""
    bus = BusOfNodes(names([node, LogNode(tmp_path, "gpu-02")]))
    query = replace(SEARCH, job="llm-9")
    with pytest.raises(NotFound, match="none of the 2 nodes whose agents were asked has files of it"):
        await searched(bus, query, "gpu-01", "gpu-02")
    (batch,) = await searched(bus, query, "gpu-01", "gpu-02", "gpu-03")
    assert "gpu-03: did not answer" in batch.notes[0]


async def test_a_search_of_all_nodes_is_bounded(node: LogNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """In number and in time; the answer says what was not asked."""
    monkeypatch.setattr(agent_logs, "MOST_SEARCHED", 3)
    bus = BusOfNodes(names([node]))
    (batch,) = await searched(bus, SEARCH, *(f"gpu-{number:02}" for number in range(9)))
    assert len(bus.asked) == 3
    assert "only 3 nodes were asked for files of llm-1; name a node to ask another" in batch.notes

    class LateClock(ManualClock):
        """Each look at it takes a while."""

        def now(self) -> datetime:
            self.sleep(12.0)
            return super().now()

    bus = BusOfNodes(names([node]))
    (batch,) = await searched(bus, SEARCH, "gpu-01", "gpu-02", "gpu-03", clock=LateClock(NOW))
    assert "was not asked in time" in " ".join(batch.notes)
    assert len(bus.asked) < 3


async def test_what_states_no_rank_is_counted_over_all_nodes(node: LogNode, tmp_path: Path) -> None:
    """In one note at the end."""
    other = LogNode(tmp_path, "gpu-02")
    other.write("llm-1", 1, NOW, "another line")
    batches = await searched(BusOfNodes(names([node, other])), replace(QUERY, rank=3), "gpu-01", "gpu-02")
    assert [batch.lines for batch in batches] == [()]
    assert batches[-1].notes == ["2 lines state no rank and are left out"]


async def test_lines_of_an_agent_of_an_earlier_release_are_read(node: LogNode) -> None:
    """It does not say how it knows a time, and not what it has left out."""
    line = {"at": NOW.isoformat(), "node": "gpu-01", "source": "training", "line": "x", "clock": "guessed"}

    class Earlier:
        def perform(self, accepted: object) -> dict[str, Any]:
            kernel = {**line, "source": "kernel"}
            return {"page": log_pages.packed({"lines": [line, kernel], "cursor": [], "end": True, "notes": []})}

    node.executor = Earlier()  # type: ignore[assignment]
    (batch,) = await searched(BusOfNodes(names([node])), SEARCH, "gpu-01")
    assert [(each.source, each.known_by, each.is_sure) for each in batch.lines] == [
        ("training", TimeKnownBy.NEIGHBOURS, False)
    ]


@pytest.mark.parametrize("follow", [False, True])
async def test_each_node_is_told_when_the_caller_leaves(follow: bool) -> None:
    """Otherwise it searches further for nobody, and other searches of that node wait."""
    bus = SilentBus({})
    logs = AgentLogs(bus, SystemClock())
    batches = logs.follow(QUERY, ["gpu-01", "gpu-02"]) if follow else logs.search(QUERY, ["gpu-01", "gpu-02"], 100)
    asking = asyncio.ensure_future(anext(batches))
    while len(bus.asked) < 2:
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    asked_of = {command.target["node"]: command.id for command in bus.asked}
    assert {command.target["node"]: command.params["command"] for command in bus.told} == asked_of
    assert {command.action for command in bus.told} == {"logs.withdraw"}
    assert not {command.id for command in bus.told} & set(asked_of.values())


class SilentBus(BusOfNodes):
    """No node has answered yet."""

    async def request(
        self, command: envelope.Command, unheard: Callable[[], Awaitable[bool]] | None = None
    ) -> tuple[envelope.Reply, ...]:
        self.asked.append(command)
        await asyncio.Event().wait()
        return ()


async def test_a_search_ends_although_a_node_always_has_more(node: LogNode) -> None:
    """Pages without lines follow each other where a node is slow. The answer says what is missing."""
    clock = ManualClock(NOW)

    class Slow:
        """Stands for an agent whose pages take 7 s and reach nothing."""

        action, queue = "logs.read", "logs"

        def perform(self, accepted: AcceptedCommand) -> dict[str, Any]:
            clock.sleep(7.0)
            page = {"lines": [], "cursor": [], "end": False, "notes": [], "left_out": {}, "job_files": 1}
            return {"page": log_pages.packed(page)}

    slow = replace_executor(node, Slow())
    bus = BusOfNodes(names([slow]))
    with pytest.raises(LogsUnavailable, match="its further lines were not read within 60 s"):
        _ = [batch async for batch in AgentLogs(bus, clock).search(QUERY, ["gpu-01"], 100)]
    assert len(bus.asked) == 9
    assert all(command.expires_at <= NOW + timedelta(seconds=agent_logs.SEARCH_SECONDS) for command in bus.asked)


def replace_executor(node: LogNode, executor: Any) -> LogNode:
    node.executor = executor
    return node
