"""The cluster that strangers' alerts are about: nodes, GPUs, pods and jobs, and who runs where.

Two fleets live in it side by side. The names of the first are those of the cases in ``cases/shared.yaml``; the second
belongs to the cases in ``cases/own.yaml``. Not here: starting any of it (``site``), and what is expected.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Node:
    """A node of the cluster. It has an agent if it has GPUs."""

    name: str
    addresses: tuple[str, ...]
    """IP addresses and host names, as the cluster lists them in the node's status."""
    gpus: tuple[str, ...] = ()
    """The UUIDs of its GPUs, in the order of their indexes."""
    buses: tuple[int, ...] = (0x18, 0x20)
    """The PCI bus of each GPU."""


@dataclass(frozen=True)
class Pod:
    """A pod that runs on a node. An `owner` of the kind DaemonSet keeps it from being evicted."""

    namespace: str
    name: str
    node: str
    addresses: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    owner: str = "ReplicaSet"


@dataclass(frozen=True)
class Job:
    """A training job with the SDK. It has one rank, which computes on one GPU."""

    name: str
    node: str
    gpu: str


JOBSET = "jobset.sigs.k8s.io/jobset-name"
PYTORCHJOB = "training.kubeflow.org/job-name"
RAY_CLUSTER = "ray.io/cluster"

_SHARED_NODES = (
    Node(
        "gpu-node-01",
        ("10.0.0.11", "fd00:10::11", "gpu-node-01", "gpu-node-01.hpc.example.org"),
        ("GPU-00000000-1a3c-4e1b-9f00-00000000ab00", "GPU-00000001-1a3c-4e1b-9f00-00000000ab01"),
    ),
    Node(
        "gpu-node-02",
        ("10.0.0.12", "fd00:10::12", "gpu-node-02", "gpu-node-02.hpc.example.org"),
        ("GPU-00000000-2a3c-4e1b-9f00-00000000ab00", "GPU-00000001-2a3c-4e1b-9f00-00000000ab01"),
        buses=(0x20, 0x18),
    ),
    Node(
        "gpu-node-03",
        ("10.0.0.13", "fd00:10::13", "gpu-node-03", "gpu-node-03.hpc.example.org"),
        tuple(f"GPU-77777777-0000-0000-0000-00000000000{index}" for index in range(4)),
        buses=(0x20, 0x28, 0x30, 0x18),
    ),
    Node("gpu-node-04", ("10.0.0.14", "gpu-node-04", "gpu-node-04.hpc.example.org")),
    Node(
        "gke-a3-pool-1a2b3c4d-x1y2",
        ("10.128.0.31", "gke-a3-pool-1a2b3c4d-x1y2.c.p.internal"),
        ("GPU-3f9b1c22-a3a3-4b1d-8e00-0000000a3000",),
    ),
)
_OWN_NODES = (
    Node(
        "dgx-a07",
        ("10.71.0.7", "fd42:71::7", "dgx-a07", "dgx-a07.lab.example.net"),
        ("GPU-5e21c0de-71a0-4a07-8c00-0000000a0700", "GPU-5e21c0de-71a1-4a07-8c00-0000000a0701"),
    ),
    Node(
        "dgx-a08",
        ("10.71.0.8", "fd42:71::8", "dgx-a08", "dgx-a08.lab.example.net"),
        ("GPU-5e21c0de-80a0-4a08-8c00-0000000a0800", "GPU-5e21c0de-80a1-4a08-8c00-0000000a0801"),
    ),
    Node(
        "ip-10-72-3-19.us-west-2.compute.internal",
        ("10.72.3.19", "ip-10-72-3-19.us-west-2.compute.internal"),
        ("GPU-91c4e7d2-3019-4e15-9a00-000000003019",),
    ),
    Node("aks-gpunp-31215542-vmss000002", ("10.224.0.9", "aks-gpunp-31215542-vmss000002")),
    Node("mon-01", ("10.71.0.50", "mon-01", "mon-01.lab.example.net")),
)
NODES = {node.name: node for node in (*_SHARED_NODES, *_OWN_NODES)}

PODS = (
    Pod("gpu-operator", "nvidia-dcgm-exporter-ax7k2", "gpu-node-01", ("10.244.1.7",), owner="DaemonSet"),
    Pod("gpu-operator", "nvidia-dcgm-exporter-bx7k2", "gpu-node-02", ("10.244.2.7",), owner="DaemonSet"),
    Pod("gpu-operator", "nvidia-dcgm-exporter-cx7k2", "gpu-node-03", ("10.244.3.7",), owner="DaemonSet"),
    Pod("gpu-operator", "nvidia-node-status-exporter-q2", "gpu-node-02", ("10.244.2.9",), owner="DaemonSet"),
    Pod("monitoring", "node-exporter-bq9z", "gpu-node-02", ("10.0.0.12", "fd00:10::12"), owner="DaemonSet"),
    Pod("kube-system", "node-problem-detector-x2", "gpu-node-02", ("10.0.0.12",), owner="DaemonSet"),
    Pod("monitoring", "kube-state-metrics-7d9f-abc", "gpu-node-04", ("10.244.4.20",)),
    Pod("ml-training", "llama-70b-worker-0", "gpu-node-01", ("10.244.1.30",), {JOBSET: "llama-70b"}),
    Pod("ml-eval", "scorer-0", "gpu-node-02", ("10.244.2.31",), owner="StatefulSet"),
    Pod("team-b", "train-x", "gpu-node-03", ("10.244.3.30",), {JOBSET: "llama-70b"}),
    Pod("gpu-operator", "nvidia-dcgm-exporter-7kq2v", "dgx-a07", ("10.73.7.14",), owner="DaemonSet"),
    Pod("gpu-operator", "nvidia-dcgm-exporter-m4x9d", "dgx-a08", ("10.73.8.21",), owner="DaemonSet"),
    Pod(
        "kube-system",
        "dcgm-exporter-zt5wn",
        "ip-10-72-3-19.us-west-2.compute.internal",
        ("10.72.3.77",),
        owner="DaemonSet",
    ),
    Pod("monitoring", "prometheus-node-exporter-x8c2l", "dgx-a07", ("10.71.0.7",), owner="DaemonSet"),
    Pod("monitoring", "prometheus-node-exporter-q6r4t", "dgx-a08", ("10.71.0.8",), owner="DaemonSet"),
    Pod("monitoring", "kps-kube-state-metrics-5f9c7d8b6-hj2kp", "mon-01", ("10.73.50.5",)),
    Pod("monitoring", "pushgateway-6c8f7b5d4-wq9sz", "mon-01", ("10.73.50.9",)),
    Pod("nlp", "qwen-sft-workers-0-0-5k8rb", "dgx-a07", ("10.73.7.40",), {JOBSET: "qwen-sft"}),
    Pod("nlp", "bge-embed-workers-0-0-h7d2c", "dgx-a07", ("10.73.7.41",), {JOBSET: "bge-embed"}),
    Pod("search", "bge-embed-workers-0-0-z4m6n", "dgx-a08", ("10.73.8.50",), {JOBSET: "bge-embed"}),
    Pod("vision", "vit-large-worker-1", "dgx-a08", ("10.73.8.51",), {PYTORCHJOB: "vit-large"}),
    Pod("rl", "grpo-math-worker-gpu-8f2lx", "dgx-a08", ("10.73.8.52",), {RAY_CLUSTER: "grpo-math"}),
)

JOBS = (
    Job("llama-70b", "gpu-node-01", NODES["gpu-node-01"].gpus[0]),
    Job("qwen-sft", "dgx-a07", NODES["dgx-a07"].gpus[0]),
    Job("bge-embed", "dgx-a07", NODES["dgx-a07"].gpus[1]),
)

_INDEXES = {uuid: (node.name, index) for node in NODES.values() for index, uuid in enumerate(node.gpus)}


def canonical(target: str) -> str:
    """The target's key with the GPU as ``<node>/<index>`` where this fleet has it; unchanged otherwise.

    A run may name a GPU by its index or by its UUID, with or without the prefix: each spelling becomes one text.
    """
    kind, _, name = target.partition(":")
    node, _, gpu = name.partition("/")
    if kind != "gpu":
        return target
    uuid = gpu.lower() if gpu.lower().startswith("gpu-") else f"gpu-{gpu.lower()}"
    for known, (holder, index) in _INDEXES.items():
        if known.lower() == uuid and holder == node:
            return f"gpu:{node}/{index}"
    return target
