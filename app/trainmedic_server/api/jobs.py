"""``GET /jobs`` and ``GET /agents``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from fastapi import Query, Response
from pydantic import Field

from trainmedic_core import gpu_names
from trainmedic_server.api import log_cuts
from trainmedic_server.api.query_types import PageCursor, PageLimit
from trainmedic_server.api.view import ApiModel
from trainmedic_server.domain.topology import AgentTopology, ClusterTopology, Pod, ranks_in
from trainmedic_server.engine.shared_presences import SharedPresences
from trainmedic_server.http.api_routes import ApiRoutes, RouteParts
from trainmedic_server.http.ascii_json import AsciiJson
from trainmedic_server.live.presence_lists import PresenceLists, PresenceNames, page
from trainmedic_server.ports.outside import CommandBus, Presence


class GpuPlace(ApiModel):
    node: str
    uuid: str


class PodPlace(ApiModel):
    namespace: str
    name: str
    node: str


class PresenceView(ApiModel):
    name: str
    last_seen: datetime
    details: dict[str, Any] = Field(description="Its ranks or GPUs, capabilities and version, for example.")
    believed: bool | None = Field(
        None, description="With a signing key: whether the present entry under its name in Redis is genuine."
    )
    doubts: list[str] = Field(
        [], description="Why it is not trusted, and contradictions by others: no action relies on it."
    )
    claims: dict[str, Any] = Field({}, description="Its untrusted entry in Redis.")
    signed_with: Literal["key", "previous key"] | None = Field(
        None, description="The signing key that it uses, during a rotation."
    )


class JobView(PresenceView):
    """Lists that are unknown or empty are omitted."""

    connected: bool | None = Field(None, description="False, and present, if only the cluster knows the job.")
    nodes: list[str] | None = None
    gpus: list[GpuPlace] | None = None
    pods: list[PodPlace] | None = None


class JobList(ApiModel):
    items: list[JobView]
    next: str | None = Field(None, description="Cursor of the next page; missing on the last.")


class PresenceList(ApiModel):
    items: list[PresenceView]
    next: str | None = Field(None, description="Cursor of the next page; missing on the last.")


def router(
    bus: CommandBus,
    presences: SharedPresences,
    cluster_topology: Callable[[], ClusterTopology],
    parts: RouteParts,
) -> ApiRoutes:
    routes = ApiRoutes("operations", parts.auth)
    lists = PresenceLists(presences)

    @routes.read("/agents", summary="Connected node agents", response_model=PresenceList)
    async def agents(limit: PageLimit = 1000, cursor: PageCursor = None, name: PresenceNames = None) -> Response:
        """By name, at most some seconds old."""
        listed = await lists.agents()
        shown = page(listed.presences, limit, cursor, name)

        def rendered() -> Response:
            items = [
                PresenceView(**members_of(agent, listed.against.get(agent.name, ()), bus.is_signed))
                for agent in shown.presences
            ]
            page_of = PresenceList(items=items, next=shown.next) if shown.next else PresenceList(items=items)
            return AsciiJson.of(page_of, exclude_unset=True)

        return await asyncio.to_thread(rendered)  # the answer can have several MB

    log_cuts.add_to(routes, lists)

    @routes.read("/jobs", summary="Connected training jobs", response_model=JobList)
    async def jobs(
        limit: PageLimit = 1000,
        cursor: PageCursor = None,
        name: PresenceNames = None,
        cluster: bool = Query(
            False, description="Also jobs that only the Kubernetes cluster knows, among the others of the last page."
        ),
    ) -> Response:
        """By name, at most some seconds old."""
        listed = await lists.jobs()
        directory = JobDirectory(listed.agents, cluster_topology())

        shown = page(listed.presences, limit, cursor, name)

        def view(job: Presence) -> JobView:
            return directory.connected(job, members_of(job, listed.against.get(job.name, ()), bus.is_signed))

        def jobs_shown() -> JobList:
            items = [view(job) for job in shown.presences]
            if shown.next:
                return JobList(items=items, next=shown.next)
            if not cluster:
                return JobList(items=items)
            connected = items if len(items) == len(listed.presences) else [view(job) for job in listed.presences]
            others = [
                job for job in directory.only_in_cluster(connected, parts.clock.now()) if not name or job.name in name
            ]
            return JobList(items=sorted([*items, *others], key=lambda job: job.name))

        return await asyncio.to_thread(
            lambda: AsciiJson.of(jobs_shown(), exclude_unset=True)
        )  # the answer can have several MB

    return routes


class JobDirectory:
    def __init__(self, agents: AgentTopology, cluster: ClusterTopology) -> None:
        self._agents = agents
        self._cluster = cluster

    def connected(self, job: Presence, members: Mapping[str, Any]) -> JobView:
        """Return the view of a job. Its pods are those that agents see on its ranks' GPUs, else those labelled with its
        name.
        """
        ranks = ranks_in(job.name, job.details)
        gpus = {gpu_names.key(rank.gpu, rank.node): (rank.node, rank.gpu) for rank in ranks if rank.gpu}
        known_gpus = [gpu for key in gpus if (gpu := self._agents.gpus_by_key.get(key)) is not None]
        uids = {uid for gpu in known_gpus for uid in gpu.pods}
        seen_pods = [pod for uid in uids if (pod := self._cluster.pods.get(uid)) is not None]
        pods = seen_pods or self._cluster.pods_by_job.get(job.name, ())
        places = set(gpus.values()) or self._gpus_of(pods)
        nodes = {rank.node for rank in ranks} or {pod.node for pod in pods}
        return JobView(**members, **_place_members(nodes, places, pods))

    def only_in_cluster(self, connected: Sequence[JobView], now: datetime) -> list[JobView]:
        # A job may report another name than its pods' label.
        taken = {(pod.namespace, pod.name) for job in connected for pod in job.pods or ()}
        jobs = []
        for name, job_pods in self._cluster.pods_by_job.items():
            pods = [pod for pod in job_pods if (pod.namespace, pod.name) not in taken]
            if pods:
                where = _place_members({pod.node for pod in pods}, self._gpus_of(pods), pods)
                jobs.append(JobView(name=name, last_seen=now, details={}, connected=False, **where))
        return jobs

    def _gpus_of(self, pods: Sequence[Pod]) -> set[tuple[str, str]]:
        return {(gpu.node, gpu.uuid) for pod in pods for gpu in self._agents.gpus_by_pod.get(pod.uid, ())}


def _place_members(nodes: Collection[str], gpus: Collection[tuple[str, str]], pods: Collection[Pod]) -> dict[str, Any]:
    members = {
        "nodes": sorted(nodes),
        "gpus": [GpuPlace(node=node, uuid=uuid) for node, uuid in sorted(gpus)],
        "pods": [
            PodPlace(namespace=pod.namespace, name=pod.name, node=pod.node)
            for pod in sorted(pods, key=lambda pod: (pod.namespace, pod.name))
        ],
    }
    return {name: value for name, value in members.items() if value}


def members_of(presence: Presence, contradictions: Sequence[str], is_signed: bool) -> dict[str, Any]:
    doubts = [*([presence.doubt] if presence.doubt is not None else []), *contradictions]
    members: dict[str, Any] = {
        "name": presence.name,
        "last_seen": presence.last_seen,
        "details": dict(presence.details),
    }
    if doubts:
        members["doubts"] = doubts
    if presence.claims:
        members["claims"] = dict(presence.claims)
    if is_signed:
        members["believed"] = presence.doubt is None
    if is_signed and presence.doubt is None:
        members["signed_with"] = "previous key" if presence.uses_previous_key else "key"
    return members
