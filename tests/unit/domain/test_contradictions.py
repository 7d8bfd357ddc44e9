"""What speaks against what jobs and agents say of where they are."""

from __future__ import annotations

from trainmedic_server.domain import contradictions
from trainmedic_server.domain.topology import AgentTopology, Rank


def agents(**uuids: list[str]) -> AgentTopology:
    return AgentTopology.of(
        {node.replace("_", "-"): {"gpus": [{"uuid": uuid} for uuid in of_node]} for node, of_node in uuids.items()}
    )


def test_a_gpu_of_two_jobs_contradicts_both() -> None:
    """However each of them writes its name."""
    ranks = [
        Rank("llm-1", 0, "gpu-1", "GPU-AAAA"),
        Rank("llm-2", 0, "gpu-1", "gpu-aaaa"),
        Rank("llm-1", 1, "gpu-1", "GPU-b"),
    ]
    assert contradictions.of_jobs(ranks, AgentTopology()) == {
        "llm-1": ("GPU-aaaa is named by job llm-2 too",),
        "llm-2": ("GPU-aaaa is named by job llm-1 too",),
    }


def test_a_gpu_that_its_agent_has_elsewhere_contradicts_the_job() -> None:
    """A node has its GPUs, whatever a job says."""
    ranks = [Rank("llm-1", 0, "gpu-2", "GPU-a"), Rank("llm-2", 0, "gpu-1", "GPU-b")]
    against = contradictions.of_jobs(ranks, agents(gpu_1=["GPU-a", "GPU-b"]))
    assert against == {"llm-1": ("GPU-a is on node gpu-1, as its agent says, and not on gpu-2",)}


def test_who_agrees_is_not_contradicted() -> None:
    """Two ranks of one job on one GPU, nodes without an agent, ranks without a GPU."""
    ranks = [Rank("llm-1", rank, "gpu-1", "GPU-a") for rank in range(2)] + [Rank("llm-2", 0, "gpu-9", None)]
    assert contradictions.of_jobs(ranks, agents(gpu_1=["GPU-a"])) == {}
    assert contradictions.of_jobs(ranks, AgentTopology()) == {}


def test_a_gpu_of_two_agents_is_nobodys() -> None:
    """It is found on neither of the nodes, until one of the agents is stopped or mended."""
    contested = agents(gpu_1=["GPU-a", "GPU-b"], gpu_2=["GPU-A"])
    assert contradictions.of_agents(contested) == {
        "gpu-1": ("GPU-a is listed by the agent of node gpu-2 too",),
        "gpu-2": ("GPU-a is listed by the agent of node gpu-1 too",),
    }
    assert set(contested.gpus_by_key) == {"b"}
