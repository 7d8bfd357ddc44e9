"""Where a job runs that does not say so itself: by the cluster's pods, and the agents that see them on their GPUs.

Who calls it: ``placement``, for a job without the SDK.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainmedic_server.domain.topology import Gpu, Pod, gpus_in
from trainmedic_server.errors import PermanentFailure, TemporaryFailure
from trainmedic_server.ports.outside import Presence

_SHOWN = 4
_SEEING = (
    "an agent sees the processes of pods where it shares the node's process namespace (agent.seePods of the chart)"
)


def nodes_of(job: str, pods: Sequence[Pod]) -> list[str]:
    """The nodes of the pods that ask for GPUs; of all where none does. A launcher on a node of its own is no
    part of the training. Raises PermanentFailure where there are jobs of that name in several namespaces."""
    return sorted({pod.node for pod in _working(job, pods)})


def gpus_of(job: str, pods: Sequence[Pod], agents: Sequence[Presence]) -> Mapping[str, tuple[str, ...]]:
    """The GPUs by node that the job's pods have processes on: all of them, or it raises. PermanentFailure where
    there are jobs of that name in several namespaces, TemporaryFailure where not all that was asked for is seen."""
    by_agent = {agent.name: gpus_in(agent.name, agent.details) for agent in agents}
    found: dict[str, set[str]] = {}
    problems = []
    for pod in _working(job, pods):
        on = by_agent.get(pod.node)
        used = [gpu.uuid for gpu in on or () if pod.uid in gpu.pods]
        if on is None:
            problems.append(f"no agent is connected on {pod.node}, where its pod {pod} runs")
        elif len(used) < pod.gpus:
            problems.append(_missing(pod, used, on))
        found.setdefault(pod.node, set()).update(used)
    if not problems and not any(found.values()):
        problems.append(f"no agent sees a process of it on a GPU; {_SEEING}")
    if problems:
        more = f"; and {len(problems) - _SHOWN} more alike" if len(problems) > _SHOWN else ""
        raise TemporaryFailure(f"not all GPUs of job {job!r} are known: {'; '.join(problems[:_SHOWN])}{more}")
    return {node: tuple(sorted(found[node])) for node in sorted(found) if found[node]}


def _working(job: str, pods: Sequence[Pod]) -> Sequence[Pod]:
    namespaces = sorted({pod.namespace for pod in pods})
    if len(namespaces) > 1:
        raise PermanentFailure(f"there are jobs named {job!r} in several namespaces: {', '.join(namespaces)}")
    return [pod for pod in pods if pod.gpus] or pods


def _missing(pod: Pod, used: Sequence[str], on: Sequence[Gpu]) -> str:
    seen = f"its pod {pod} asks for {pod.gpus}, and the agent on {pod.node} sees it on {len(used) or 'none'}"
    return seen if any(gpu.pods for gpu in on) else f"{seen}; {_SEEING}"
