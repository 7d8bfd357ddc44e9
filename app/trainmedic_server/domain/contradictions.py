"""Contradictions between locations reported by jobs and by agents, either of which may lie.

No action uses contradicted ones: a power cap could affect another job's GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trainmedic_core import gpu_names
from trainmedic_server.domain.topology import AgentTopology, Rank

Contradictions = Mapping[str, tuple[str, ...]]  # Sentences without full stops, by contradicted job or node

_SHOWN = 4


def of_jobs(ranks: Iterable[Rank], agents: AgentTopology) -> Contradictions:
    """Return GPUs that two jobs name, or that an agent reports elsewhere, by job."""
    jobs_by_gpu: dict[str, set[str]] = {}
    places: dict[str, set[tuple[str, str]]] = {}
    for rank in ranks:
        if rank.gpu is None:
            continue
        key = gpu_names.key(rank.gpu, rank.node)
        jobs_by_gpu.setdefault(key, set()).add(rank.job)
        places.setdefault(rank.job, set()).add((key, rank.node))
    return _by_name(
        (job, sentence)
        for job, of_job in places.items()
        for key, node in sorted(of_job)
        for sentence in _sentences(job, key, node, jobs_by_gpu[key], agents)
    )


def of_agents(agents: AgentTopology) -> Contradictions:
    """Return GPUs that several agents report, by node."""
    return _by_name(
        (node, f"{gpu_names.shown(uuid)} is listed by the agent of node {other} too")
        for uuid, nodes in sorted(agents.contested.items())
        for node in sorted(nodes)
        for other in sorted(nodes - {node})
    )


def _sentences(job: str, key: str, node: str, jobs: set[str], agents: AgentTopology) -> Iterable[str]:
    if others := sorted(jobs - {job}):
        yield f"{gpu_names.shown(key)} is named by job {', '.join(others[:_SHOWN])} too"
    gpu = agents.gpus_by_key.get(key)
    if gpu is not None and gpu.node != node:
        yield f"{gpu_names.shown(key)} is on node {gpu.node}, as its agent says, and not on {node}"


def _by_name(sentences: Iterable[tuple[str, str]]) -> Contradictions:
    texts: dict[str, list[str]] = {}
    for name, text in sentences:
        texts.setdefault(name, []).append(text)
    return {name: tuple(of_name) for name, of_name in texts.items()}
