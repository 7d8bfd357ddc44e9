"""Node actions on a job without the SDK: its places follow from its pods, and from the agents that see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from tests.unit.actions.test_commands import NoHttp
from tests.unit.actions.test_placement import NOW, AgentsBus, call, placed
from trainmedic_server.actions.nodes import GpuPowerLimit, NodeFacts
from trainmedic_server.domain.topology import ClusterNode, ClusterTopology, Pod
from trainmedic_server.errors import ActionFailure, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.actions import Services
from trainmedic_server.ports.outside import CommandBus, Presence


def pod(uid: str, node: str, gpus: int = 2, namespace: str = "ml") -> Pod:
    return Pod(uid, namespace, f"pod-{uid}", node, "llm-1", gpus=gpus)


def agent(node: str, **gpus: list[str]) -> Presence:
    told = [{"uuid": f"GPU-{name}", "index": i, "pods": pods} for i, (name, pods) in enumerate(gpus.items())]
    return Presence(node, NOW, {"gpus": told})


async def located(kind: type[Any], bus: AgentsBus, *pods: Pod, nodes: Sequence[ClusterNode] = (), **params: Any) -> Any:
    topology = ClusterTopology(nodes, {pod.uid: pod for pod in pods})
    services = Services(bus.clock, cast(CommandBus, bus), NoHttp(), cluster_topology=lambda: topology)
    found = await kind(services).locate(call(kind, params))
    return {node: list(gpus) for node, gpus in found.nodes.items()}


WORKERS = (pod("u1", "n1"), pod("u2", "n2"), pod("launcher", "cpu-1", gpus=0))


async def test_all_gpus_of_a_job_are_those_on_which_its_pods_are_seen() -> None:
    """GPUs are listed by node, without those of other jobs; a launcher without GPUs is ignored."""
    bus = AgentsBus()
    bus.agents_present = [agent("n2", c=["u2"], d=["u2", "other"]), agent("n1", a=["u1"], b=["u1"], z=["other"])]
    assert await located(GpuPowerLimit, bus, *WORKERS, percent=80) == {
        "n1": ["GPU-a", "GPU-b"],
        "n2": ["GPU-c", "GPU-d"],
    }
    assert await located(NodeFacts, bus, *WORKERS) == {"n1": [], "n2": []}


async def test_commands_reach_agents_whose_nodes_have_another_name_in_the_cluster() -> None:
    """They do not reach the agent of another node with the same short name."""
    bus = AgentsBus()
    bus.agents_present = [agent("n1", a=["u1"], b=["u1"])]
    full = pod("u1", "n1.site.example")
    assert await located(GpuPowerLimit, bus, full, percent=80) == {"n1": ["GPU-a", "GPU-b"]}
    assert await located(NodeFacts, bus, full) == {"n1": []}
    nodes = [ClusterNode("n1.site.example", ()), ClusterNode("n1.other.example", ())]
    assert await located(NodeFacts, bus, full, nodes=nodes) == {"n1.site.example": []}


async def test_the_jobs_own_statement_takes_precedence() -> None:
    """The job knows which of its processes are its ranks."""
    bus = AgentsBus()
    bus.present = placed((0, "n9", "GPU-x"))
    bus.agents_present = [agent("n1", a=["u1"], b=["u1"]), agent("n2", c=["u2"], d=["u2"])]
    assert await located(GpuPowerLimit, bus, *WORKERS, percent=80) == {"n9": ["GPU-x"]}
    bus.present = [Presence("llm-1", NOW, {"ranks": [0, 1]})]
    assert list(await located(GpuPowerLimit, bus, *WORKERS, percent=80)) == ["n1", "n2"]


@pytest.mark.parametrize(
    ("pods", "agents", "failure", "why"),
    [
        ([pod("u1", "n1")], [], TemporaryFailure, "no agent is connected on n1, where its pod ml/pod-u1 runs"),
        ([pod("u1", "n1")], [agent("n1", a=["u1"], b=[])], TemporaryFailure, "asks for 2, and .* n1 sees it on 1"),
        (
            [pod("u1", "n1")],
            [agent("n1", a=[], b=[])],
            TemporaryFailure,
            "sees it on none; an agent sees .*agent.seePods",
        ),
        ([pod("u1", "n1", 0)], [agent("n1", a=[])], TemporaryFailure, "no agent sees a process of it on a GPU"),
        ([pod("u1", "n1"), pod("u2", "n2", namespace="dev")], [], PermanentFailure, "several namespaces: dev, ml"),
        ([pod(f"u{n}", f"n{n}") for n in range(9)], [], TemporaryFailure, "and 5 more"),
    ],
)
async def test_a_job_whose_gpus_are_not_all_seen_is_rejected(
    pods: list[Pod], agents: list[Presence], failure: type[ActionFailure], why: str
) -> None:
    """All GPUs are needed or none; the reason names the pod and the remedy."""
    bus = AgentsBus()
    bus.agents_present = agents
    with pytest.raises(failure, match=why):
        await located(GpuPowerLimit, bus, *pods, percent=80)
