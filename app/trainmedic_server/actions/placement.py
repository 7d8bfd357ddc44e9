"""Node actions on a job: one command and outcome for each node or GPU.

Nodes and GPUs come from the job's presence, otherwise from its pods, and are stored before any command is sent.
Command IDs derive from the attempt's, so that agents recognise repetitions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec.structs import replace
from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from trainmedic_core import words
from trainmedic_core.problems import did_you_mean
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.actions.base import ActionParams
from trainmedic_server.actions.commands import CommandAction, listed_ranks, stated_ranks
from trainmedic_server.domain import contradictions
from trainmedic_server.domain.destinations import DestinationOutcome, combine, command_id_for, merged_output
from trainmedic_server.domain.node_names import KnownNodes, NodeNames
from trainmedic_server.domain.topology import AgentTopology, Gpu, Pod, ranks_in
from trainmedic_server.errors import ActionFailure, BusUnavailable, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.actions import Call, Services
from trainmedic_server.ports.outside import Presence

Nodes = Mapping[str, tuple[str, ...]]  # GPUs by node; empty tuples if only nodes matter

_SHOWN = 4
_SEEING_HINT = (
    "an agent sees the processes of pods where it shares the node's process namespace (agent.seePods of the chart)"
)


class PlacedParams(ActionParams):
    nodes: Annotated[
        SkipJsonSchema[Nodes | None],
        Field(description="Set by the server: the nodes of the job, and its GPUs there."),
    ] = None


class PlacedAction(CommandAction):
    """A command to a node's agent, or for a job to each of its nodes or GPUs (``per_gpu``).

    - All applied it: success. The output has each number's highest value, the lowest under ``lowest``, and each
      destination's output under ``by_node``.
    - Certainly none applied it: failure.
    - Otherwise the outcome is unknown.

    A partly failed undo is repeated as a whole.
    """

    Params: ClassVar[type[BaseModel]] = PlacedParams
    per_gpu: ClassVar[bool] = False
    waits_for_receiver: ClassVar[bool] = False
    """An agent always runs, so a missing one needs a person soon."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._cluster_topology = services.cluster_topology

    @classmethod
    def check_template(cls, raw: Mapping[str, Any]) -> None:
        if "nodes" in raw:
            raise ValueError("nodes is set by the server, to the nodes of the target job")

    async def locate(self, call: Call) -> BaseModel:
        params = call.params
        if call.target.kind is not TargetKind.JOB or not isinstance(params, PlacedParams) or params.nodes is not None:
            return params
        try:
            nodes = await self._nodes_of_job(await self.target_for_commands(call))
        except BusUnavailable as error:
            raise TemporaryFailure("the job's location is unknown while Redis is unavailable") from error
        return params.model_copy(update={"nodes": nodes})

    async def _nodes_of_job(self, job: Target) -> Nodes:
        jobs = await self._bus.jobs()
        name = job.job or ""
        presence = next((presence for presence in jobs if presence.name == name), None)
        has_reported = presence is not None and presence.details.get("placement")
        cluster = self._cluster_topology()
        job_pods = () if has_reported else cluster.pods_by_job.get(name, ())
        if presence is None and not job_pods and not self.services.may_connect(name):
            near = did_you_mean(name, [*(job.name for job in jobs), *cluster.pods_by_job])
            raise PermanentFailure(f"no job named {name!r} is connected or was connected in the last day{near}")
        if not self.per_gpu and not job_pods:
            return placement_of(job, presence, with_gpus=False)
        agents = AgentTopology.of({agent.name: agent.details for agent in await self._bus.agents()})
        if job_pods:
            # Commands need the agents' names of nodes, which may differ from the cluster's.
            known = KnownNodes(agents.names, cluster.names, NodeNames(), NodeNames(), NodeNames())
            job_pods = [replace(pod, node=known.name_of(pod.node)) for pod in job_pods]
            if not self.per_gpu:
                return dict.fromkeys(nodes_of_pods(name, job_pods), ())
            return gpus_of_pods(name, job_pods, agents)
        nodes = placement_of(job, presence, with_gpus=True)
        await asyncio.to_thread(_refuse_contradictions, name, jobs, agents)
        return nodes

    @classmethod
    def places(cls, params: BaseModel | Mapping[str, Any]) -> Sequence[Target]:
        nodes: Nodes = (params.get("nodes") if isinstance(params, Mapping) else getattr(params, "nodes", None)) or {}
        if not cls.per_gpu:
            return [Target(TargetKind.NODE, node=node) for node in nodes]
        return [Target(TargetKind.GPU, node=node, gpu=gpu) for node, gpus in nodes.items() for gpu in gpus]

    async def perform(self, call: Call) -> Mapping[str, Any]:
        if call.target.kind is not TargetKind.JOB:
            return await super().perform(call)
        node_calls = [call_for(call, destination) for destination in self.places(call.params)]
        self._sent[call.command_id] = [node_call.command_id for node_call in node_calls]
        outcomes = await asyncio.gather(*(self._perform_one(node_call) for node_call in node_calls))
        return combine(outcomes, merged_output(outcomes), is_undo=call.undo_of is not None)

    def wire_params(self, call: Call) -> Mapping[str, Any]:
        return call.params.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"nodes"})

    async def _perform_one(self, node_call: Call) -> DestinationOutcome:
        try:
            return DestinationOutcome(node_call.target, await super().perform(node_call))
        except ActionFailure as failure:
            return DestinationOutcome(node_call.target, failure.output, failure)


def placement_of(job: Target, presence: Presence | None, *, with_gpus: bool) -> Nodes:
    if presence is None:
        raise TemporaryFailure(f"job {job.job!r} is not connected; its location is unknown")
    if presence.doubt is not None and not presence.details:
        raise TemporaryFailure(f"the location that job {job.job!r} reports is not trusted: {presence.doubt}")
    placed = ranks_in(job.job or "", presence.details)
    nodes: dict[str, set[str]] = {rank.node: set() for rank in placed}
    for rank in placed:
        if rank.gpu is not None:
            nodes[rank.node].add(rank.gpu)
    without_gpu = [rank.rank for rank in placed if rank.gpu is None]
    if not nodes:
        raise PermanentFailure(
            f"job {job.job!r} does not report its nodes: its presence has no placement, which "
            "trainmedic.distributed.share announces"
        )
    missing = sorted(stated_ranks(presence).difference(each.rank for each in placed if isinstance(each.rank, int)))
    if missing:
        raise PermanentFailure(f"job {job.job!r} does not report the location of {listed_ranks(missing, _SHOWN)}")
    if with_gpus and without_gpu:
        verb = "names" if len(without_gpu) == 1 else "name"
        raise PermanentFailure(f"{listed_ranks(without_gpu, _SHOWN)} of job {job.job!r} {verb} no GPU")
    return {node: tuple(sorted(nodes[node])) for node in sorted(nodes)}


def _refuse_contradictions(job: str, jobs: Sequence[Presence], agents: AgentTopology) -> None:
    """Raise TemporaryFailure: a contradiction can pass."""
    ranks = (rank for presence in jobs for rank in ranks_in(presence.name, presence.details))
    against = contradictions.of_jobs(ranks, agents).get(job, ())
    if against:
        raise TemporaryFailure(f"the location that job {job!r} reports is contradicted: {words.some(against, _SHOWN)}")


def call_for(call: Call, destination: Target) -> Call:
    undo_of = command_id_for(call.undo_of, destination) if call.undo_of is not None else None
    return replace(
        call,
        command_id=command_id_for(call.command_id, destination),
        target=destination,
        undo_of=undo_of,
        report_wait=None,  # all would change the step's one reason for waiting at once
    )


def nodes_of_pods(job: str, pods: Sequence[Pod]) -> list[str]:
    """Return the nodes of pods that request GPUs, or of all if none does. Raises PermanentFailure if several namespaces
    have jobs of that name.
    """
    return sorted({pod.node for pod in _training_pods(job, pods)})


def gpus_of_pods(job: str, pods: Sequence[Pod], agents: AgentTopology) -> Mapping[str, tuple[str, ...]]:
    """Return GPU UUIDs by node. Raises as `nodes_of_pods`, and TemporaryFailure unless agents see each pod on all GPUs
    that it requests.
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
        raise TemporaryFailure(f"not all GPUs of job {job!r} are known: {words.some(problems, _SHOWN)}")
    return {node: tuple(sorted(uuids)) for node, uuids in sorted(used_by_node.items()) if uuids}


def _training_pods(job: str, pods: Sequence[Pod]) -> Sequence[Pod]:
    namespaces = sorted({pod.namespace for pod in pods})
    if len(namespaces) > 1:
        raise PermanentFailure(f"there are jobs named {job!r} in several namespaces: {', '.join(namespaces)}")
    return [pod for pod in pods if pod.gpus] or pods


def _describe_missing_gpus(pod: Pod, used: Sequence[str], gpus: Sequence[Gpu]) -> str:
    problem = f"its pod {pod} asks for {pod.gpus}, and the agent on {pod.node} sees it on {len(used) or 'none'}"
    return problem if any(gpu.pods for gpu in gpus) else f"{problem}; {_SEEING_HINT}"
