"""``GET /jobs``: the training jobs that are connected, and, where it is known, where each of them runs.

What a job says of its ranks, what the agents see on their GPUs, and what the cluster knows of its pods are
put together here, at each call. Not here: finding a job for an alert (``engine.topology_watch``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, Field

from trainmedic_server.domain import gpu_names
from trainmedic_server.domain.topology import Gpu, Pod, gpus_in, ranks_in
from trainmedic_server.ports.outside import Clock, CommandBus, Pods, Presence
from trainmedic_server.server.auth import Authenticator, requires
from trainmedic_server.server.problems import responses
from trainmedic_server.server.tokens import Role


class GpuPlace(BaseModel):
    """A GPU, and the node that it is in."""

    node: str
    uuid: str


class PodPlace(BaseModel):
    """A pod, and the node that it runs on."""

    namespace: str
    name: str
    node: str


class JobView(BaseModel):
    """A job, what it said of itself, and where it runs. Lists that nothing is known for are left out."""

    name: str
    last_seen: datetime
    details: dict[str, Any] = Field(description="Such as its capabilities, its ranks, its version.")
    connected: bool | None = Field(None, description="False, and present, where only the cluster knows the job.")
    nodes: list[str] | None = None
    gpus: list[GpuPlace] | None = None
    pods: list[PodPlace] | None = None


class JobList(BaseModel):
    items: list[JobView]


def router(bus: CommandBus, pods: Pods | None, clock: Clock, auth: Authenticator) -> APIRouter:
    routes = APIRouter(tags=["operations"], dependencies=[Depends(requires(auth, Role.VIEWER))])

    @routes.get(
        "/jobs",
        summary="The training jobs that are connected",
        response_model=JobList,
        response_model_exclude_unset=True,
        responses=responses(401, 403, 422, 503),
    )
    async def jobs(
        cluster: bool = Query(False, description="Also the jobs that only the Kubernetes cluster knows."),
    ) -> JobList:
        """Each with what it said of itself, and the nodes, GPUs and pods that are known to be its."""
        picture = Picture(await bus.agents(), pods.pods() if pods is not None else ())
        found = [picture.of(job) for job in await bus.jobs()]
        if cluster:
            found += picture.others(found, clock.now())
        return JobList(items=sorted(found, key=lambda one: one.name))

    return routes


class Picture:
    """What agents and cluster know at one moment."""

    def __init__(self, agents: Sequence[Presence], pods: Sequence[Pod]) -> None:
        self._gpus: dict[str, Gpu] = {}
        self._of_pod: dict[str, list[Gpu]] = {}
        for gpu in (gpu for agent in agents for gpu in gpus_in(agent.name, agent.details)):
            self._gpus |= dict.fromkeys(gpu.names(), gpu)
            for uid in gpu.pods:
                self._of_pod.setdefault(uid, []).append(gpu)
        self._pods = {pod.uid: pod for pod in pods}
        self._by_job: dict[str, list[Pod]] = {}
        for pod in pods:
            if pod.job is not None:
                self._by_job.setdefault(pod.job, []).append(pod)

    def of(self, job: Presence) -> JobView:
        """A job that is connected. Its pods are those that an agent sees on the GPUs that its ranks name; where
        none is seen, those whose labels have its name."""
        ranks = ranks_in(job.name, job.details)
        gpus = {gpu_names.key(rank.gpu, rank.node): (rank.node, rank.gpu) for rank in ranks if rank.gpu}
        seen = {uid for key in gpus if key in self._gpus for uid in self._gpus[key].pods if uid in self._pods}
        pods = [self._pods[uid] for uid in seen] or self._by_job.get(job.name, [])
        places = set(gpus.values()) or self._places(pods)
        nodes = {rank.node for rank in ranks} or {pod.node for pod in pods}
        said = {"name": job.name, "last_seen": job.last_seen, "details": dict(job.details)}
        return JobView(**said, **_where(nodes, places, pods))

    def others(self, connected: Sequence[JobView], now: datetime) -> list[JobView]:
        """The jobs of which only the cluster knows."""
        taken = {(pod.namespace, pod.name) for job in connected for pod in job.pods or ()}
        found = []
        for name, of_job in self._by_job.items():
            pods = [pod for pod in of_job if (pod.namespace, pod.name) not in taken]
            if pods:
                where = _where({pod.node for pod in pods}, self._places(pods), pods)
                found.append(JobView(name=name, last_seen=now, details={}, connected=False, **where))
        return found

    def _places(self, pods: Sequence[Pod]) -> set[tuple[str, str]]:
        return {(gpu.node, gpu.uuid) for pod in pods for gpu in self._of_pod.get(pod.uid, ())}


def _where(nodes: Collection[str], gpus: Collection[tuple[str, str]], pods: Collection[Pod]) -> dict[str, Any]:
    """The members of a view for which there is something to say."""
    told = {
        "nodes": sorted(nodes),
        "gpus": [GpuPlace(node=node, uuid=uuid) for node, uuid in sorted(gpus)],
        "pods": [
            PodPlace(namespace=pod.namespace, name=pod.name, node=pod.node)
            for pod in sorted(pods, key=lambda pod: (pod.namespace, pod.name))
        ],
    }
    return {name: value for name, value in told.items() if value}
