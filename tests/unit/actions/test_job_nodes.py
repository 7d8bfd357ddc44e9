"""Which node of an elastic job could leave it, or come back: within its bounds, and never the wrong one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.unit.actions.test_commands import NOW, perform
from tests.unit.actions.test_launchers import Launchers
from trainmedic_server.actions.launchers import LauncherExcludeNode, LauncherIncludeNode, LauncherNodes
from trainmedic_server.errors import TemporaryFailure
from trainmedic_server.ports.outside import Presence


class Elastic(Launchers):
    """A job of 2 to 4 nodes, with rank 0 on n1."""

    def __init__(self, *nodes: str, first: str | None = "n1") -> None:
        super().__init__()
        self._first = first
        for node in nodes:
            self.add(node, max_nodes=4)

    def leave(self, node: str, *, for_load: bool) -> None:
        said = {"left_out": [node], **({"left_out_for_load": [node]} if for_load else {})}
        self.add(node, "left_out", max_nodes=4, **said)

    async def jobs(self) -> list[Presence]:
        await super().jobs()
        placement = [{"rank": 0, "node": self._first, "gpu": None}] if self._first else []
        return [Presence("llm-1", NOW, {"placement": placement})]


async def nodes_of(bus: Launchers, **params: Any) -> Mapping[str, Any]:
    output = await perform(bus, LauncherNodes, params)
    assert bus.sent == []
    return output


async def test_the_node_with_the_highest_number_can_leave() -> None:
    """The node of rank 0 and nodes to be kept cannot leave."""
    bus = Elastic("n10", "n9", "n1")
    found = await nodes_of(bus)
    assert (found["nodes"], found["can_leave"], found["min_nodes"], found["max_nodes"]) == (
        ["n1", "n9", "n10"],
        "n10",
        2,
        4,
    )
    assert (await nodes_of(bus, keep=["n10"]))["can_leave"] == "n9"
    assert (await nodes_of(bus, keep=["n9", "n10"]))["why_none_leaves"] == "all of its nodes must stay"


async def test_a_job_keeps_as_many_nodes_as_it_needs() -> None:
    """Waiting nodes do not count."""
    bus = Elastic("n1", "n2")
    bus.leave("n3", for_load=True)
    found = await nodes_of(bus)
    assert (found["can_leave"], found["why_none_leaves"]) == (None, "the job has 2 nodes and needs 2")


async def test_only_a_node_excluded_for_load_can_return() -> None:
    """One with a fault waits for its repair; and a full job accepts none."""
    bus = Elastic("n1", "n2")
    bus.leave("n3", for_load=False)
    assert (await nodes_of(bus))["why_none_returns"] == "no node that was excluded for load is waiting"
    bus.leave("n4", for_load=True)
    found = await nodes_of(bus)
    assert (found["can_return"], found["waiting"]) == ("n4", ["n4"])
    for node in ("n5", "n6"):
        bus.add(node, max_nodes=4)
    assert (await nodes_of(bus))["why_none_returns"] == "the job has 4 nodes and may have 4"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"launching": []}, "no launcher of the job is connected"),
        ({"details": {"max_nodes": None}}, "the job is not elastic"),
        ({"details": {"starts_all_nodes": True}}, "one launcher starts all nodes"),
        ({"details": {"state": "waiting"}}, "the job is being started: its launcher on n2 is waiting"),
    ],
)
async def test_a_job_whose_nodes_cannot_be_changed_gives_the_reason(change: dict[str, Any], why: str) -> None:
    """No change is offered then in either direction."""
    bus = Elastic("n1", "n2", "n3")
    if "details" in change:
        kept = dict(bus.launching[1].details)
        bus.launching[1] = Presence("llm-1", NOW, {**kept, **change["details"]})
        if "max_nodes" in change["details"]:
            bus.launching = [
                Presence("llm-1", NOW, {**dict(each.details), "max_nodes": None}) for each in bus.launching
            ]
    else:
        bus.launching = []
    found = await nodes_of(bus)
    assert (found["can_leave"], found["can_return"]) == (None, None)
    assert found["why_none_leaves"].startswith(why)


async def test_while_rank_0_is_unknown_no_node_leaves() -> None:
    """Any node could be the one that the others depend on."""
    found = await nodes_of(Elastic("n1", "n2", "n3", first=None))
    assert "rank 0" in found["why_none_leaves"]


async def test_without_redis_the_lookup_may_be_retried() -> None:
    """Nothing is guessed."""
    bus = Elastic("n1", "n2", "n3")
    bus.is_away = True
    with pytest.raises(TemporaryFailure, match="Redis is unavailable"):
        await perform(bus, LauncherNodes, {})


async def test_the_load_reason_is_sent_with_the_command_and_its_undo() -> None:
    """Otherwise a launcher of an older SDK receives no new field."""
    bus = Elastic("n1", "n2", "n3")
    await perform(bus, LauncherExcludeNode, {"node": "n3", "for_load": True})
    await perform(bus, LauncherExcludeNode, {"node": "n3"})
    assert [sent.params for sent in bus.sent] == [{"node": "n3", "for_load": True}, {"node": "n3"}]
    back = LauncherIncludeNode.inverse(LauncherIncludeNode.Params(node="n3", for_load=True), {})
    assert back is not None
    assert (back.action, dict(back.params)) == ("launcher.exclude_node", {"node": "n3", "for_load": True})
