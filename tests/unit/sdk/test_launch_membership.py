"""Which nodes a launcher leaves out, by whose command, and until when."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from trainmedic.errors import Rejected
from trainmedic.job.command import JobCommand
from trainmedic.launch.membership import EXCLUDE, INCLUDE, NodeExclusions
from trainmedic.wire import envelope

NOW = datetime(2026, 1, 31, tzinfo=UTC)


class Orders:
    """Commands, and what is answered to them."""

    def __init__(self) -> None:
        self.answers: list[Mapping[str, Any]] = []

    def command(self, action: str, node: Any, undo_of: str | None = None) -> JobCommand:
        sent = envelope.Command(
            envelope.new_id(), action, {}, {"node": node}, "run", "book", "why", NOW, NOW + timedelta(1), undo_of
        )
        return JobCommand(sent, None, b"1-1", lambda command, status, output: self.answers.append(output))


@pytest.fixture
def orders() -> Orders:
    return Orders()


def test_an_excluded_node_is_confirmed_when_its_processes_have_ended(orders: Orders) -> None:
    """It is readmitted in the same way."""
    nodes = NodeExclusions("n1", starts_all_nodes=False)
    nodes.exclude(orders.command(EXCLUDE, "n1"))
    assert (nodes.is_left_out, nodes.has_changed, orders.answers) == (True, True, [])
    nodes.answer()
    assert orders.answers == [{"node": "n1", "left_out": ["n1"]}]
    nodes.include(orders.command(INCLUDE, "n1"))
    nodes.answer()
    assert (nodes.is_left_out, orders.answers[1]) == (False, {"node": "n1", "left_out": []})


def test_two_playbooks_that_exclude_a_node_must_both_readmit_it(orders: Orders) -> None:
    """They do so by their undo; a command of its own readmits it at once."""
    nodes = NodeExclusions("n1", starts_all_nodes=False)
    first, second = orders.command(EXCLUDE, "n1"), orders.command(EXCLUDE, "n1")
    nodes.exclude(first)
    nodes.answer()
    assert nodes.exclude(second) == {"node": "n1", "left_out": ["n1"]}
    assert nodes.include(orders.command(INCLUDE, "n1", first.id)) == {"node": "n1", "left_out": ["n1"]}
    assert (nodes.is_in_force(first.id), nodes.is_in_force(second.id), nodes.is_left_out) == (False, True, True)
    nodes.include(orders.command(INCLUDE, "n1", second.id))
    assert not nodes.is_left_out


def test_nothing_is_applied_while_the_processes_still_run(orders: Orders) -> None:
    """A second command for the same node waits for the attempt's end too, as does one without effect."""
    nodes = NodeExclusions("head", starts_all_nodes=True)
    assert nodes.exclude(orders.command(EXCLUDE, "n1")) is None
    assert nodes.exclude(orders.command(EXCLUDE, "n1")) is None
    assert nodes.include(orders.command(INCLUDE, "n2")) is None
    assert orders.answers == []
    nodes.answer()
    assert orders.answers == [{"node": node, "left_out": ["n1"]} for node in ("n1", "n1", "n2")]
    assert nodes.exclude(orders.command(EXCLUDE, "n1")) == {"node": "n1", "left_out": ["n1"]}


def test_above_several_nodes_the_others_continue(orders: Orders) -> None:
    """The launcher itself always has something to start."""
    nodes = NodeExclusions("head", starts_all_nodes=True)
    nodes.exclude(orders.command(EXCLUDE, "n2"))
    nodes.exclude(orders.command(EXCLUDE, "n1"))
    assert (nodes.without, nodes.is_left_out) == (("n1", "n2"), False)


def test_a_launcher_that_cannot_exclude_a_node_reports_it(orders: Orders) -> None:
    nodes = NodeExclusions("head", starts_all_nodes=True, cannot="its --exclude names a file")
    with pytest.raises(Rejected, match="names a file"):
        nodes.exclude(orders.command(EXCLUDE, "n1"))
    assert nodes.without == ()


@pytest.mark.parametrize("node", ["n2", "", None, 7, "n1,n2", "--nodes=1", "a b"])
def test_a_node_unknown_to_this_launcher_is_rejected(orders: Orders, node: Any) -> None:
    """The name goes into a command line."""
    with pytest.raises(Rejected):
        NodeExclusions("n1", starts_all_nodes=False).exclude(orders.command(EXCLUDE, node))


def test_a_node_excluded_for_load_is_distinguished(orders: Orders) -> None:
    """It returns for load only if nothing else excludes it: a job does not lack a faulty node."""
    nodes = NodeExclusions("head", starts_all_nodes=True)
    for_load, fault = orders.command(EXCLUDE, "n4"), orders.command(EXCLUDE, "n4")
    for_load.params["for_load"] = True  # type: ignore[index]
    nodes.exclude(for_load)
    assert nodes.without_for_load == ("n4",)
    nodes.exclude(fault)
    assert (nodes.without, nodes.without_for_load) == (("n4",), ())
    back = orders.command(INCLUDE, "n4")
    back.params["for_load"] = True  # type: ignore[index]
    with pytest.raises(Rejected, match="another reason than load"):
        nodes.include(back)
    nodes.include(orders.command(INCLUDE, "n4", fault.id))
    assert nodes.without_for_load == ("n4",)
    nodes.include(back)
    nodes.answer()
    assert nodes.without == ()
