"""Location of a job without the SDK, by its pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainmedic_server.domain.topology import AgentTopology, Gpu, Pod
from trainmedic_server.errors import PermanentFailure, TemporaryFailure

_SHOWN = 4
_SEEING_HINT = (
    "an agent sees the processes of pods where it shares the node's process namespace (agent.seePods of the chart)"
)


def nodes_of(job: str, pods: Sequence[Pod]) -> list[str]:
    """Return the nodes of pods that request GPUs, or of all if none does. Raises PermanentFailure if several namespaces
    have jobs of that name.
    """
    return sorted({pod.node for pod in _training_pods(job, pods)})


def gpus_of(job: str, pods: Sequence[Pod], agents: AgentTopology) -> Mapping[str, tuple[str, ...]]:
    """Return GPU UUIDs by node. Raises PermanentFailure as `nodes_of`, TemporaryFailure unless agents see each pod on
    all GPUs that it requests.
    """
    used_by_node: dict[str, set[str]] = {}
    problems = []
    for pod in _training_pods(job, pods):
        gpus = agents.gpus_by_node.get(pod.node)
        used = [gpu.uuid for gpu in gpus or () if pod.uid in gpu.pods]
        if gpus is None:
            problems.append(f"no agent is connected on {pod.node}, where its pod {pod} runs")
        elif len(used) < pod.gpus:
            problems.append(_describe_missing_gpus(pod, used, gpus))
        used_by_node.setdefault(pod.node, set()).update(used)
    if not problems and not any(used_by_node.values()):
        problems.append(f"no agent sees a process of it on a GPU; {_SEEING_HINT}")
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise TemporaryFailure(f"not all GPUs of job {job!r} are known: {'; '.join(problems[:_SHOWN])}{more}")
    return {node: tuple(sorted(uuids)) for node, uuids in sorted(used_by_node.items()) if uuids}


def _training_pods(job: str, pods: Sequence[Pod]) -> Sequence[Pod]:
    namespaces = sorted({pod.namespace for pod in pods})
    if len(namespaces) > 1:
        raise PermanentFailure(f"there are jobs named {job!r} in several namespaces: {', '.join(namespaces)}")
    return [pod for pod in pods if pod.gpus] or pods


def _describe_missing_gpus(pod: Pod, used: Sequence[str], gpus: Sequence[Gpu]) -> str:
    problem = f"its pod {pod} asks for {pod.gpus}, and the agent on {pod.node} sees it on {len(used) or 'none'}"
    return problem if any(gpu.pods for gpu in gpus) else f"{problem}; {_SEEING_HINT}"
