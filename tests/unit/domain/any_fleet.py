"""Fleets at random, and what a server knows of them: for the property that no label set leads to another machine.

A fleet has nodes that are called differently by different programs, agents on most of them, perhaps a cluster with
the pods of exporters and of jobs, and perhaps an inventory. `known` is the topology that a server would have.
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from trainmedic_server.domain.node_names import NodeNames
from trainmedic_server.domain.topology import (
    AgentTopology,
    ClusterNode,
    ClusterTopology,
    JobTopology,
    Pod,
    Topology,
    WrittenTopology,
)

CENTRAL_NAMES = ("head-1", "mgmt", "slurm-ctl", "prom-a")


@dataclass
class Card:
    uuid: str
    index: int
    pci: str


@dataclass
class Node:
    """A machine, with all that it is called."""

    number: int
    short: str
    full: str
    internal: str
    cluster_name: str
    agent_name: str
    ipv4: str
    ipv6: str
    cards: list[Card]
    has_agent: bool = True
    is_gone: bool = False
    """Whether its agent was there, and is not."""
    pods: dict[str, Pod] = field(default_factory=dict)
    """By the exporter that runs in it."""

    def spellings(self) -> list[str]:
        return [self.short, self.full, self.internal, self.cluster_name, self.agent_name]


@dataclass
class Job:
    name: str
    namespace: str
    nodes: list[Node]
    cards: list[tuple[Node, Card]]
    is_connected: bool


class Fleet:
    """Made from `rng` alone."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.has_cluster = rng.random() < 0.6
        self.lists_full_names = rng.random() < 0.5
        """Whether the cluster has each node's full name, besides that within the cloud."""
        self.nodes = [self._node(number) for number in rng.sample(range(1, 60), rng.randint(2, 7))]
        self.has_inventory = not self.has_cluster or rng.random() < 0.3
        self.ghosts: list[Pod] = []
        """Pods of other nodes that still have the address of one that is there."""
        self.central = self.rng.choice(CENTRAL_NAMES)
        self.central_pods: dict[str, Pod] = {}
        if self.has_cluster:
            self._fill_with_pods()
        self.jobs = self._jobs()
        self.known = self._topology()

    def _node(self, number: int) -> Node:
        rng = self.rng
        short = rng.choice([f"gpu-{number:02}", f"gpu-node-{number}", f"gke-a3-pool-7f{number:02}-x{number % 7}q"])
        full = f"{short}.lab{number % 3}.example.net"
        internal = rng.choice([f"{short}.c.proj-1.internal", f"ip-10-8-0-{number}.zone.compute.internal"])
        cluster_name = rng.choice([short, full, internal]) if self.has_cluster else short
        agent_name = cluster_name if self.has_cluster and rng.random() < 0.7 else rng.choice([short, full])
        cards = [
            Card(f"GPU-{uuid.UUID(int=rng.getrandbits(128))}", index, f"00000000:{0x18 + index:02x}:00.0")
            for index in range(rng.randint(1, 4))
        ]
        state = rng.random()
        ipv6 = f"fd00:8::{number:x}"
        made = Node(number, short, full, internal, cluster_name, agent_name, f"10.8.0.{number}", ipv6, cards)
        made.has_agent, made.is_gone = state < 0.85, 0.85 <= state < 0.95
        return made

    # --- what runs on it ------------------------------------------------------------------------------------

    def pod(self, node: Node, name: str, namespace: str, owner: bool | None, **more: Any) -> Pod:
        address = more.pop("address", None) or f"10.{100 + node.number}.{self.rng.randint(0, 200)}.{len(node.pods) + 2}"
        uid = str(uuid.UUID(int=self.rng.getrandbits(128)))
        return Pod(
            uid, namespace, name, node.cluster_name, more.pop("job", None), (address,), is_per_node=owner, **more
        )

    def _suffix(self) -> str:
        return "".join(self.rng.choice("bcdfghjklmnpqrstvwxz2456789") for _ in range(5))

    def _fill_with_pods(self) -> None:
        tells_owner = self.rng.random() < 0.7
        owner = {True: True, False: None}[tells_owner]
        for node in self.nodes:
            dcgm = f"nvidia-dcgm-exporter-{self._suffix()}"
            node.pods["dcgm"] = self.pod(node, dcgm, "gpu-operator", owner)
            exporter = f"node-exporter-{self._suffix()}"
            node.pods["node"] = self.pod(node, exporter, "monitoring", owner, address=node.ipv4)
        if self.rng.random() < 0.3:
            node, other = self.rng.sample(self.nodes, 2)
            address, is_ending = node.pods["dcgm"].addresses[0], self.rng.random() < 0.5
            ghost = self.pod(other, f"old-{self._suffix()}", "batch", False, address=address, is_ending=is_ending)
            self.ghosts.append(ghost)
        host = self.rng.choice(self.nodes)
        for name in ("kube-state-metrics", "pushgateway"):
            central = f"{name}-7d9f8c6b5-{self._suffix()}"
            self.central_pods[name] = self.pod(host, central, "monitoring", False if tells_owner else None)
            host.pods[name] = self.central_pods[name]

    def _jobs(self) -> list[Job]:
        """Two jobs of one name in two namespaces, of which one takes commands, and one of another name."""
        rng, jobs = self.rng, []
        nodes = [node for node in self.nodes if node.has_agent]
        rng.shuffle(nodes)
        for number, (name, namespace) in enumerate(
            (("llm-70b", "research"), ("llm-70b", "team-b"), ("vit", "research"))
        ):
            if number < len(nodes):
                node = nodes[number]
                job = Job(name, namespace, [node], [(node, node.cards[0])], number != 1)
                jobs.append(job)
                if self.has_cluster:
                    node.pods[f"job-{number}"] = self.pod(node, f"{name}-worker-0", namespace, False, job=name, gpus=1)
        return jobs

    # --- what is known of it ----------------------------------------------------------------------------------

    def _topology(self) -> Topology:
        self.shared_uuid = f"GPU-{uuid.UUID(int=self.rng.getrandbits(128))}"
        """Which the agents of all nodes report."""
        shared = {"uuid": self.shared_uuid}
        agents = AgentTopology.of(
            {
                node.agent_name: {"gpus": [*(self._reported(node, card) for card in node.cards), shared]}
                for node in self.nodes
                if node.has_agent
            }
        )
        placed = {
            job.name: {"placement": [self._rank(number, *place) for number, place in enumerate(job.cards)]}
            for job in self.jobs
            if job.is_connected
        }
        addresses = {
            address: node.agent_name if node.has_agent or node.is_gone else node.cluster_name
            for node in self.nodes
            for address in (node.ipv4, node.ipv6)
        }
        gone = NodeNames(frozenset(node.agent_name for node in self.nodes if node.is_gone or node.has_agent))
        written = WrittenTopology(addresses if self.has_inventory else {})
        return Topology(written, JobTopology.of(placed, agents), agents, self._cluster(), remembered=gone)

    def _reported(self, node: Node, card: Card) -> dict[str, Any]:
        uids = [
            node.pods[key].uid
            for number, job in enumerate(self.jobs)
            if (key := f"job-{number}") in node.pods and (node, card) in job.cards
        ]
        return {"uuid": card.uuid, "index": card.index, "pci_bus_id": card.pci, "pods": uids}

    def _rank(self, number: int, node: Node, card: Card) -> dict[str, Any]:
        return {"rank": number, "node": node.agent_name, "gpu": card.uuid}

    def _cluster(self) -> ClusterTopology:
        if not self.has_cluster:
            return ClusterTopology()
        nodes = tuple(
            ClusterNode(
                node.cluster_name,
                (node.ipv4, node.ipv6, node.short, node.internal, *([node.full] if self.lists_full_names else [])),
            )
            for node in self.nodes
        )
        pods = [*self.ghosts, *(pod for node in self.nodes for pod in node.pods.values())]
        return ClusterTopology(nodes, {pod.uid: pod for pod in pods})

    def partly_known(self) -> Topology:
        """As it is after a start, before one or the other source has answered."""
        known, missing = self.known, self.rng.choice(["agents", "cluster", "both"])
        if missing != "cluster":
            known = replace(known, agents=AgentTopology(), jobs=JobTopology(), agents_answer=False)
        if missing != "agents" and self.has_cluster:
            known = replace(known, cluster=ClusterTopology(answers=False))
        return known

    # --- for those who judge ------------------------------------------------------------------------------------

    def is_known(self, node: Node) -> bool:
        return self.has_cluster or node.has_agent or node.is_gone or self.has_inventory

    def knows_full_name(self, node: Node) -> bool:
        """Whether the full name is a known one, or no other full name is known: a different one is another machine."""
        is_agents = node.agent_name == node.full and (node.has_agent or node.is_gone)
        return not self.has_cluster or self.lists_full_names or node.cluster_name == node.full or is_agents

    def node_of(self, name: str) -> Node | None:
        """The machine that a command to this name reaches."""
        return next((node for node in self.nodes if name in node.spellings()), None)
