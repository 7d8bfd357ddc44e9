"""The commands to launchers: to which one, within which bounds, and what its answer means."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.clocks import ManualClock
from tests.unit.actions.test_commands import NOW, ScriptedBus, perform, replies
from trainmedic.wire.envelope import Command, Reply
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.actions.launchers import LauncherExcludeNode, LauncherIncludeNode
from trainmedic_server.errors import OutcomeUnknown, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.outside import Presence

NODE = Target(TargetKind.NODE, node="n1")
C1 = "01890a5d-ac96-774b-bcce-b302099a8057"
C2 = "01890a5d-ac96-774b-bcce-b302099a8058"


class Launchers(ScriptedBus):
    """The launchers of jobs; each answers what the test says."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.answers = replies("applied", node="n1")
        self.launching: list[Presence] = []
        self.agents_there: list[Presence] = []
        self.answers_of: dict[str, tuple[Reply, ...]] = {}

    def add(self, node: str, state: str = "running", job: str = "llm-1", **details: Any) -> None:
        said = {"node": node, "state": state, "min_nodes": 2, "max_nodes": 3, **details}
        self.launching.append(Presence(job, NOW, said))

    async def launchers(self) -> list[Presence]:
        await self.jobs()
        return self.launching

    async def agents(self) -> list[Presence]:
        return self.agents_there

    async def request(self, command: Command, *_: Any) -> tuple[Reply, ...]:  # type: ignore[override]
        answers = await super().request(command)
        return (
            self.answers_of.get(command.target["job"], answers) if command.action.startswith("launcher.") else answers
        )


@pytest.fixture
def bus() -> Launchers:
    made = Launchers()
    for node in ("n1", "n2", "n3"):
        made.add(node)
    return made


async def test_the_launcher_of_the_node_is_asked(bus: Launchers) -> None:
    """It is addressed by its name and the job; that of another job on the same node is not asked."""
    bus.add("n2", job="llm-2")
    output = await perform(bus, LauncherExcludeNode, {"node": "n2"})
    assert output == {"ranks": 1, "node": "n1"}
    (sent,) = bus.sent
    assert (sent.action, sent.params) == ("launcher.exclude_node", {"node": "n2"})
    assert sent.target == {"kind": "job", "job": "llm-1", "launcher": "llm-1/n2"}


async def test_a_launcher_that_starts_all_nodes_is_asked_for_each(bus: Launchers) -> None:
    """It does not know the number of nodes, and so has no bounds here."""
    bus.launching = []
    bus.add("head", starts_all_nodes=True, min_nodes=None, max_nodes=None)
    await perform(bus, LauncherExcludeNode, {"node": "n7"})
    assert bus.sent[0].target["launcher"] == "llm-1/head"


async def test_a_job_keeps_as_many_nodes_as_it_needs(bus: Launchers) -> None:
    """Nodes already excluded do not count; an undo is not blocked."""
    await perform(bus, LauncherExcludeNode, {"node": "n1"})
    bus.launching = []
    bus.add("n1", state="left_out")
    bus.add("n2")
    bus.add("n3", state="waiting")
    with pytest.raises(PermanentFailure, match="1 nodes would be left, and the job needs 2"):
        await perform(bus, LauncherExcludeNode, {"node": "n2"})
    await perform(bus, LauncherExcludeNode, {"node": "n2"}, undo_of="c0")
    assert len(bus.sent) == 2


async def test_a_job_gets_no_more_nodes_than_allowed(bus: Launchers) -> None:
    """A node that is already included does not count as another."""
    await perform(bus, LauncherIncludeNode, {"node": "n3"})
    bus.add("n4", state="left_out")
    with pytest.raises(PermanentFailure, match="there would be 4 nodes, and the job may have 3"):
        await perform(bus, LauncherIncludeNode, {"node": "n4"})


async def test_without_a_launcher_it_fails_and_may_be_retried(bus: Launchers) -> None:
    """The node or the job has none, or Redis is unavailable. Nothing was sent."""
    with pytest.raises(TemporaryFailure, match="no launcher of job 'llm-1' on node 'n9' is connected"):
        await perform(bus, LauncherExcludeNode, {"node": "n9"})
    bus.launching = []
    with pytest.raises(TemporaryFailure, match="no launcher of job 'llm-1' is connected"):
        await perform(bus, LauncherExcludeNode, {"node": "n1"})
    bus.is_away = True
    with pytest.raises(TemporaryFailure, match="Redis is unavailable"):
        await perform(bus, LauncherExcludeNode, {"node": "n1"})
    assert bus.sent == []


async def test_silence_leaves_the_outcome_unknown(bus: Launchers) -> None:
    """The command may have been executed, so its undo stays pending."""
    bus.answers = ()
    with pytest.raises(OutcomeUnknown, match="the launcher 'llm-1/n1' did not answer in time"):
        await perform(bus, LauncherExcludeNode, {"node": "n1"})


async def test_an_uncertain_undo_is_not_done(bus: Launchers) -> None:
    """A restarted launcher says how it knows that no node is excluded."""
    bus.answers = replies("applied", nothing_to_undo=True)
    with pytest.raises(TemporaryFailure):
        await perform(bus, LauncherIncludeNode, {"node": "n1"}, undo_of="c0")
    bus.answers = replies("applied", nothing_to_undo=True, known="not_in_force")
    await perform(bus, LauncherIncludeNode, {"node": "n1"}, undo_of="c0")


async def on_node(bus: Launchers, kind: type[Any], command_id: str = C1, **options: Any) -> Any:
    return await perform(bus, kind, options.pop("params", None), NODE, command_id=command_id, **options)


async def test_every_elastic_job_on_a_node_continues_without_it(bus: Launchers) -> None:
    """Each launcher gets its own ID, after the checkpoints of just these jobs; the others are listed with reasons."""
    bus.add("n1", job="llm-2", min_nodes=None, max_nodes=None)
    bus.add("n1", job="llm-3", min_nodes=1)
    bus.add("head", job="llm-4", starts_all_nodes=True, min_nodes=None, max_nodes=None)
    bus.add("head", job="llm-5", starts_all_nodes=True, min_nodes=None, max_nodes=None)
    for job, node in (("llm-1", "n1"), ("llm-2", "n1"), ("llm-4", "n1"), ("llm-5", "n7")):
        bus.present.append(Presence(job, NOW, {"placement": [{"rank": 0, "node": node}]}))
    output = await on_node(bus, LauncherExcludeNode, params={"checkpoint": "30s"})
    assert output == {
        "node": "n1",
        "jobs": ["llm-1", "llm-4"],
        "not_asked": {
            "llm-2": "the job is not elastic: its trainmedic-run has no --max-nodes",
            "llm-3": "without 'n1' 0 nodes would be left, and the job needs 1",
        },
        "checkpoints": {"llm-1": "written", "llm-4": "written"},
    }
    checkpoints, orders = bus.sent[:2], bus.sent[2:]
    assert [sent.action for sent in checkpoints] == ["job.checkpoint"] * 2
    assert [sent.target["launcher"] for sent in orders] == ["llm-1/n1", "llm-4/head"]
    assert [sent.params for sent in orders] == [{"node": "n1"}] * 2
    assert len({sent.id for sent in bus.sent}) == 4


async def test_a_node_without_elastic_jobs_stays_unchanged_and_the_output_reports_it(bus: Launchers) -> None:
    """A step of a playbook for every node does not fail there."""
    bus.launching = []
    out = await on_node(bus, LauncherExcludeNode)
    assert (out["jobs"], out["note"]) == ([], LauncherExcludeNode.nothing_done)
    back = await on_node(bus, LauncherIncludeNode)
    assert (back["jobs"], back["note"]) == ([], LauncherIncludeNode.nothing_done)
    assert bus.sent == []


async def test_a_node_with_signs_of_life_is_not_down(bus: Launchers) -> None:
    """Prometheus may not reach it; its agent does, or the launcher that runs there."""
    bus.launching = []
    bus.add("head", job="llm-4", starts_all_nodes=True, min_nodes=None, max_nodes=None)
    bus.present.append(Presence("llm-4", NOW, {"placement": [{"rank": 0, "node": "n1"}]}))
    bus.agents_there = [Presence("n1", NOW, {"version": "1"})]
    heard = await on_node(bus, LauncherExcludeNode, params={"unless_heard": True})
    assert heard["not_asked"] == {"llm-4": "its agent is connected, so the node is not down"}
    bus.agents_there = []
    assert (await on_node(bus, LauncherExcludeNode, params={"unless_heard": True}))["jobs"] == ["llm-4"]
    bus.add("n1", min_nodes=0)
    heard = await on_node(bus, LauncherExcludeNode, params={"unless_heard": True})
    assert set(heard["not_asked"].values()) == {"a launcher there is connected, so the node is not down"}


async def test_a_node_is_restored_by_the_launchers_that_exclude_it(bus: Launchers) -> None:
    """A launcher above srun reports nodes other than its own."""
    bus.launching = []
    bus.add("n1", state="left_out", left_out=["n1"])
    bus.add("n1", job="llm-3")
    bus.add("head", job="llm-4", starts_all_nodes=True, left_out=["n1"], min_nodes=None, max_nodes=None)
    output = await on_node(bus, LauncherIncludeNode)
    assert output["jobs"] == ["llm-1", "llm-4"]


async def test_an_undo_on_a_node_asks_all_launchers_concerned(bus: Launchers) -> None:
    """It uses the IDs of the commands that it reverts; while one is silent it stays pending."""
    output = await on_node(bus, LauncherExcludeNode)
    inverse = LauncherExcludeNode.inverse(LauncherExcludeNode.Params(), output)
    assert inverse is not None
    assert inverse.params == {"jobs": ["llm-1"]}
    await on_node(bus, LauncherIncludeNode, C2, params=inverse.params, undo_of=C1)
    done, undone = bus.sent
    assert (undone.action, undone.undo_of) == ("launcher.include_node", done.id)
    bus.launching = []
    for params in (inverse.params, {}):
        with pytest.raises(TemporaryFailure, match=r"is not connected|no launcher on 'n1'"):
            await on_node(bus, LauncherIncludeNode, C2, params=params, undo_of=C1)


async def test_if_only_some_launchers_obey_the_outcome_is_unknown(bus: Launchers) -> None:
    """A retry has the same IDs, and none obeys twice. If all refuse, there is no retry."""
    bus.add("n1", job="llm-2")
    bus.add("n2", job="llm-2")
    bus.add("n3", job="llm-2")
    bus.answers_of["llm-2"] = replies("rejected", reason="no")
    with pytest.raises(OutcomeUnknown, match="'llm-2/n1' rejected the command: no") as raised:
        await on_node(bus, LauncherExcludeNode)
    assert raised.value.output["jobs"] == ["llm-1"]
    bus.answers_of["llm-1"] = bus.answers_of["llm-2"]
    with pytest.raises(PermanentFailure):
        await on_node(bus, LauncherExcludeNode)
    bus.answers_of = {"llm-1": replies("failed"), "llm-2": replies("rejected")}
    with pytest.raises(TemporaryFailure):
        await on_node(bus, LauncherExcludeNode)


async def test_on_a_job_the_node_must_be_named(bus: Launchers) -> None:
    """A job has many nodes."""
    with pytest.raises(PermanentFailure, match="needs the name of the node"):
        await perform(bus, LauncherExcludeNode)


def test_each_action_is_the_inverse_of_the_other() -> None:
    """Both concern the same node."""
    params = LauncherExcludeNode.Params.model_validate({"node": "n1"})
    inverse = LauncherExcludeNode.inverse(params, None)
    assert inverse is not None
    assert (inverse.action, inverse.params) == ("launcher.include_node", {"node": "n1"})
    back = LauncherIncludeNode.inverse(params, None)
    assert back is not None
    assert (back.action, back.params) == ("launcher.exclude_node", {"node": "n1"})


@pytest.mark.parametrize("node", ["", "-x", "a b", "a,b", "a/b", "x" * 254])
def test_an_invalid_node_name_is_rejected_before_it_is_sent(node: str) -> None:
    """It becomes part of a command line and a key."""
    with pytest.raises(ValueError, match="node"):
        LauncherExcludeNode.Params.model_validate({"node": node})
