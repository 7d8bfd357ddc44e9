"""The commands to launchers: to which one, within which bounds, and what its answer means."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.clocks import ManualClock
from tests.unit.actions.test_commands import NOW, ScriptedBus, perform, replies
from trainmedic_server.actions.launchers import LauncherExcludeNode, LauncherIncludeNode
from trainmedic_server.errors import OutcomeUnknown, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.outside import Presence


class Launchers(ScriptedBus):
    """The launchers of jobs; each answers what the test says."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.answers = replies("applied", node="n1")

    def add(self, node: str, state: str = "running", job: str = "llm-1", **details: Any) -> None:
        said = {"node": node, "state": state, "min_nodes": 2, "max_nodes": 3, **details}
        self.present.append(Presence(job, NOW, said))


@pytest.fixture
def bus() -> Launchers:
    made = Launchers()
    for node in ("n1", "n2", "n3"):
        made.add(node)
    return made


async def test_the_launcher_of_the_node_is_asked(bus: Launchers) -> None:
    """By its own name, with the job beside it; that of another job on the same node is not."""
    bus.add("n2", job="llm-2")
    output = await perform(bus, LauncherExcludeNode, {"node": "n2"})
    assert output == {"ranks": 1, "node": "n1"}
    (sent,) = bus.sent
    assert (sent.action, sent.params) == ("launcher.exclude_node", {"node": "n2"})
    assert sent.target == {"kind": "job", "job": "llm-1", "launcher": "llm-1/n2"}


async def test_one_that_starts_all_nodes_is_asked_for_each(bus: Launchers) -> None:
    """It knows no number of nodes, and so has no bounds here."""
    bus.present = []
    bus.add("head", starts_all_nodes=True, min_nodes=None, max_nodes=None)
    await perform(bus, LauncherExcludeNode, {"node": "n7"})
    assert bus.sent[0].target["launcher"] == "llm-1/head"


async def test_a_job_keeps_as_many_nodes_as_it_needs(bus: Launchers) -> None:
    """Those that are left out already do not count; an undo is not held back."""
    await perform(bus, LauncherExcludeNode, {"node": "n1"})
    bus.present = []
    bus.add("n1", state="left_out")
    bus.add("n2")
    bus.add("n3", state="waiting")
    with pytest.raises(PermanentFailure, match="1 nodes would be left, and the job needs 2"):
        await perform(bus, LauncherExcludeNode, {"node": "n2"})
    await perform(bus, LauncherExcludeNode, {"node": "n2"}, undo_of="c0")
    assert len(bus.sent) == 2


async def test_a_job_gets_no_more_nodes_than_it_may_have(bus: Launchers) -> None:
    """One that is there already is none more."""
    await perform(bus, LauncherIncludeNode, {"node": "n3"})
    bus.add("n4", state="left_out")
    with pytest.raises(PermanentFailure, match="there would be 4 nodes, and the job may have 3"):
        await perform(bus, LauncherIncludeNode, {"node": "n4"})


async def test_without_a_launcher_it_fails_and_may_be_tried_again(bus: Launchers) -> None:
    """On that node, of that job, or because Redis is away. Nothing was sent."""
    with pytest.raises(TemporaryFailure, match="no launcher of job 'llm-1' on node 'n9' is connected"):
        await perform(bus, LauncherExcludeNode, {"node": "n9"})
    bus.present = []
    with pytest.raises(TemporaryFailure, match="no launcher of job 'llm-1' is connected"):
        await perform(bus, LauncherExcludeNode, {"node": "n1"})
    bus.is_away = True
    with pytest.raises(TemporaryFailure, match="Redis is away"):
        await perform(bus, LauncherExcludeNode, {"node": "n1"})
    assert bus.sent == []


async def test_silence_leaves_the_outcome_unknown(bus: Launchers) -> None:
    """It may have been carried out, so its undo stays owed."""
    bus.answers = ()
    with pytest.raises(OutcomeUnknown, match="the launcher 'llm-1/n1' did not answer in time"):
        await perform(bus, LauncherExcludeNode, {"node": "n1"})


async def test_an_undo_that_is_not_certain_is_not_done(bus: Launchers) -> None:
    """A launcher that was started anew says how it knows that nothing is left out."""
    bus.answers = replies("applied", nothing_to_undo=True)
    with pytest.raises(TemporaryFailure):
        await perform(bus, LauncherIncludeNode, {"node": "n1"}, undo_of="c0")
    bus.answers = replies("applied", nothing_to_undo=True, known="not_in_force")
    await perform(bus, LauncherIncludeNode, {"node": "n1"}, undo_of="c0")


def test_each_is_the_inverse_of_the_other() -> None:
    """Of the same node."""
    params = LauncherExcludeNode.Params.model_validate({"node": "n1"})
    inverse = LauncherExcludeNode.inverse(params, None)
    assert inverse is not None
    assert (inverse.action, inverse.params) == ("launcher.include_node", {"node": "n1"})
    back = LauncherIncludeNode.inverse(params, None)
    assert back is not None
    assert (back.action, back.params) == ("launcher.exclude_node", {"node": "n1"})


@pytest.mark.parametrize("node", ["", "-x", "a b", "a,b", "a/b", "x" * 254])
def test_what_is_no_name_of_a_node_is_refused_before_it_is_sent(node: str) -> None:
    """It goes into a command line and into a key."""
    with pytest.raises(ValueError, match="node"):
        LauncherExcludeNode.Params.model_validate({"node": node})
