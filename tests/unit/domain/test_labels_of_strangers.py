"""Label sets as exporters, scrape configurations and aggregations make them, with what each of them is about.

The expectations were written down before the first run. The names of labels are those of the documentation of
dcgm-exporter, HAMi, AMD's device metrics exporter, node-exporter, kube-state-metrics, Telegraf, netdata, OpenTelemetry,
blackbox and Slurm exporters, Pushgateway, Thanos and Prometheus' examples of scrape configurations.
"""

from __future__ import annotations

from typing import Any

import pytest

from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain.node_names import NodeNames
from trainmedic_server.domain.target_resolution import resolve, unknown_node
from trainmedic_server.domain.topology import AgentTopology, ClusterNode, ClusterTopology, JobTopology, Pod, Topology

U11, U11B, U12, UEC, UAKS, TWO = (f"GPU-b7e4000{number}-11d2-4c3a-9d10-0000000000{number}f" for number in range(1, 7))
STRANGE = "GPU-ffff0000-11d2-4c3a-9d10-0000000000ff"
EC2, AKS, GKE = "ip-10-9-4-21.ec2.internal", "aks-h100-40211-vmss00000c", "gke-h100-77aa-zq1p"


def cards(*uuids: str) -> dict[str, Any]:
    return {
        "gpus": [
            {"uuid": uuid, "index": index, "pci_bus_id": f"00000000:{0x3B + index:02X}:00.0"}
            for index, uuid in enumerate(uuids)
        ]
    }


AGENTS = AgentTopology.of(
    {
        "hgx-11": cards(U11, U11B, TWO),
        "hgx-12": cards(U12, TWO),
        EC2: cards(UEC),
        AKS: cards(UAKS),
        GKE: cards(),
    }
)
PODS = [
    Pod("d1", "gpu", "dcgm-exporter-p2l7k", "hgx-11", None, ("10.60.1.2",), is_per_node=True),
    Pod("d2", "gpu", "dcgm-exporter-w9x4d", "hgx-12", None, ("10.60.2.2", "fd60:2::2"), is_per_node=True),
    Pod("n1", "mon", "node-exporter-c8s2b", "hgx-11", None, ("10.50.0.11", "fd50::11"), is_per_node=True),
    Pod("k1", "mon", "kube-state-metrics-6b9c-xx2fd", "hgx-12", None, ("10.60.2.9",), is_per_node=False),
    Pod("g1", "mon", "pushgateway-58b6-4rk7t", "store-1", None, ("10.60.9.3",), is_per_node=False),
    Pod("h1", "kube-system", "hami-scheduler-7c5d-9bq2l", "store-1", None, ("10.60.9.4",), is_per_node=False),
    Pod("w1", "speech", "wav2-0", "hgx-11", "wav2", ("10.60.1.40",), gpus=2),
    Pod("w2", "video", "wav2-0", "hgx-12", "wav2", ("10.60.2.40",), gpus=1),
    Pod("w3", "video", "clip-0", "hgx-12", "clip", ("10.60.2.41",), gpus=1),
]
CLUSTER = ClusterTopology(
    (
        ClusterNode("hgx-11", ("10.50.0.11", "fd50::11", "hgx-11", "hgx-11.hall2.example.net")),
        ClusterNode("hgx-12", ("10.50.0.12", "fd50::12", "hgx-12", "hgx-12.hall2.example.net")),
        ClusterNode("hgx-14", ("10.50.0.14", "hgx-14")),
        ClusterNode(EC2, ("10.9.4.21", EC2, "ec2-198-51-100-7.compute-1.amazonaws.com")),
        ClusterNode(AKS, ("10.224.0.31", AKS)),
        ClusterNode(GKE, ("10.128.4.7", f"{GKE}.us-east5-a.c.proj-9.internal")),
        ClusterNode("store-1", ("10.50.0.90", "store-1")),
    ),
    {pod.uid: pod for pod in PODS},
)
JOBS = JobTopology.of(
    {
        "wav2": {"placement": [{"rank": 0, "node": "hgx-11", "gpu": U11}, {"rank": 1, "node": "hgx-11", "gpu": U11B}]},
        "clip": {"placement": [{"rank": 0, "node": "hgx-12", "gpu": U12}]},
    },
    AGENTS,
)
KNOWN = Topology(agents=AGENTS, cluster=CLUSTER, jobs=JOBS, remembered=NodeNames(frozenset({"hgx-09", "hgx-11"})))
KSM = {"job": "kube-state-metrics", "instance": "10.60.2.9:8080"}
DCGM_12 = {"namespace": "gpu", "pod": "dcgm-exporter-w9x4d"}


def named(kind: str, labels: dict[str, str]) -> str:
    target = resolve(TargetKind(kind), labels, KNOWN)
    if isinstance(target, Target):
        target = unknown_node(target, KNOWN, labels) or target
    return target.key if isinstance(target, Target) else target.reason


CLEAR: list[tuple[str, dict[str, str], str]] = [
    # a scrape that adds the node of the exporter's pod, and labels that agree on a card
    ("node", {**KSM, "exported_node": "hgx-11", "node": "hgx-12", "condition": "DiskPressure"}, "hgx-11"),
    ("gpu", {"gpu": "01", "pci_bus_id": "00000000:3C:00.0", "node": "hgx-11"}, "hgx-11/01"),
    ("gpu", {"gpu": "0", "pci_bus_id": "00000000:77:00.0", "node": "hgx-11"}, "hgx-11/0"),
    # a node whose agent is gone, whose name has changed, or that never had an agent
    ("node", {"node": "hgx-09", "job": "kubelet"}, "hgx-09"),
    ("node", {"instance": "hgx-09:9100", "job": "node"}, "hgx-09"),
    ("node", {"instance": "10.50.0.14:9100"}, "hgx-14"),
    ("node", {"nodename": "store-1", "instance": "10.50.0.90:9100"}, "store-1"),
    # clouds
    ("node", {"instance": "10.9.4.21:10250", "node": EC2}, EC2),
    ("node", {"kubernetes_io_hostname": EC2, "instance": EC2}, EC2),
    ("node", {"node": EC2, "Hostname": "ip-10-9-4-21"}, EC2),
    ("node", {"instance": "ec2-198-51-100-7.compute-1.amazonaws.com:9100"}, EC2),
    ("node", {"instance": f"{AKS}:9100", "nodename": AKS}, AKS),
    ("node", {"Hostname": f"{AKS}.kx3.bx.internal.cloudapp.net", "node": AKS}, AKS),
    ("node", {"kubernetes_io_hostname": "aks-h100-40211-vmss00000C"}, AKS),
    ("node", {"Hostname": f"{GKE}.us-east5-a.c.proj-9.internal", "node": GKE, "location": "us-east5"}, GKE),
    # spellings
    ("node", {"Hostname": "HGX-11"}, "hgx-11"),
    ("node", {"hostname": "hgx-12.hall2.example.net."}, "hgx-12"),
    ("node", {"instance": "HGX-12.HALL2.example.net:9182", "job": "node"}, "hgx-12"),
    ("node", {"instance": "hgx-12"}, "hgx-12"),
    ("node", {"instance": "[fd50::12]:9100"}, "hgx-12"),
    ("node", {"instance": "fd50:0:0::12"}, "hgx-12"),
    ("node", {"node": " hgx-11 ", "instance": "[fd50::11]:9100"}, "hgx-11"),
    # other names of labels
    ("node", {"host": "hgx-12", "instance": "hgx-12:9273", "job": "telegraf"}, "hgx-12"),
    ("node", {"host": "hgx-12.hall2.example.net", "job": "telegraf"}, "hgx-12"),
    ("node", {"host_name": "hgx-11", "job": "otelcol"}, "hgx-11"),
    ("node", {"k8s_node_name": "hgx-11", "instance": "10.60.9.77:8888", "job": "otelcol"}, "hgx-11"),
    ("node", {"node_name": "hgx-12", "node_ip": "10.50.0.12", **DCGM_12, "instance": "10.60.2.2:9400"}, "hgx-12"),
    ("node", {"kubernetes_node_name": "hgx-12", "instance": "10.50.0.12:9100"}, "hgx-12"),
    ("node", {"host_ip": "10.50.0.11", "pod_ip": "10.60.1.40"}, "hgx-11"),
    ("node", {"label_kubernetes_io_hostname": "hgx-12", **KSM}, "hgx-12"),
    ("node", {"machine": "x86_64", "nodename": "hgx-11", "instance": "10.50.0.11:9100", "sysname": "Linux"}, "hgx-11"),
    ("node", {"host": "grafana.example.net", "node": "hgx-11"}, "hgx-11"),
    ("node", {"host": "train-portal", "instance": "hgx-11:9100"}, "hgx-11"),
    # exporters that run elsewhere
    ("node", {"node": "hgx-11", **KSM}, "hgx-11"),
    ("node", {"exported_node": "hgx-11", "namespace": "mon", "pod": "kube-state-metrics-6b9c-xx2fd", **KSM}, "hgx-11"),
    ("node", {"exported_node": "hgx-11", "node_ip": "10.50.0.12", **KSM}, "hgx-11"),
    ("node", {"exported_instance": "hgx-11:9100", "instance": "10.60.9.3:9091", "job": "pushgateway"}, "hgx-11"),
    ("node", {"exported_instance": "10.60.2.2:9400", "exported_job": "dcgm", "instance": "prom-east:9090"}, "hgx-12"),
    ("node", {"instance": "hgx-11:9100", "cluster": "east", "replica": "prometheus-1", "receive": "true"}, "hgx-11"),
    ("node", {"node": "hgx-12", "instance": "slurm-head:9341", "job": "slurm"}, "hgx-12"),
    ("node", {"nodes": "hgx-[12]", "instance": "slurm-head:8080", "job": "slurm-exporter"}, "hgx-12"),
    ("node", {"nodelist": "hgx-11,hgx-11", "job": "slurm"}, "hgx-11"),
    ("node", {"namespace": "mon", "pod": "node-exporter-c8s2b", "instance": "10.50.0.11:9100"}, "hgx-11"),
    ("node", {"namespace": "video", "pod": "clip-0", **KSM}, "hgx-12"),
    # GPUs
    ("gpu", {"UUID": U12}, f"hgx-12/{U12}"),
    ("gpu", {"UUID": U12.lower(), "gpu": "0"}, f"hgx-12/{U12}"),
    ("gpu", {"deviceuuid": U11B, "deviceidx": "1", "nodeid": "hgx-11", "instance": "10.60.9.4:9395"}, f"hgx-11/{U11B}"),
    ("gpu", {"device_uuid": U11B, "device_index": "1", "instance": "10.60.9.8:9394"}, f"hgx-11/{U11B}"),
    ("gpu", {"deviceidx": "0", "nodeid": "hgx-12", "job": "hami-scheduler"}, "hgx-12/0"),
    ("gpu", {"gpu": "0", **DCGM_12}, "hgx-12/0"),
    ("gpu", {"gpu": "0", **DCGM_12, "instance": "dcgm-exporter-w9x4d"}, "hgx-12/0"),
    ("gpu", {"gpu": "0", **DCGM_12, "instance": "[fd60:2::2]:9400"}, "hgx-12/0"),
    ("gpu", {"gpu": "0", "exported_instance": "dcgm-exporter-w9x4d", "instance": "prom-east:9090"}, "hgx-12/0"),
    ("gpu", {"UUID": UEC, "Hostname": "dcgm-exporter-zzzzz", "instance": "10.9.99.2:9400"}, f"{EC2}/{UEC}"),
    ("gpu", {"gpu_id": "1", "hostname": "hgx-11", "instance": "10.50.0.11:5000", "job": "amd"}, "hgx-11/1"),
    ("gpu", {"gpu_uuid": U11, "gpu_id": "0", "hostname": "hgx-11.hall2.example.net"}, f"hgx-11/{U11}"),
    ("gpu", {"UUID": f"{U11}::3", "exported_pod": "wav2-0", "exported_namespace": "speech"}, f"hgx-11/{U11}"),
    ("gpu", {"UUID": f"MIG-{U11}/3/0", "GPU_I_ID": "3", "instance": "localhost:9400"}, f"hgx-11/{U11}"),
    ("gpu", {"gpu": "1", "gpu_id": "0000:3c:00.0", "node": "hgx-11"}, "hgx-11/1"),
    ("gpu", {"gpu": "1", "exported_gpu": "01", "node": "hgx-11"}, "hgx-11/01"),
    ("gpu", {"UUID": U11, "Hostname": "old-name-of-11", "instance": "10.60.1.2:9400"}, f"hgx-11/{U11}"),
    ("gpu", {"gpu_index": "1", "node": "hgx-11"}, "hgx-11/1"),
    ("gpu", {"gpu_number": "1", "gpu_model": "H100", "host_name": "hgx-11", "job": "otelcol"}, "hgx-11/1"),
    ("gpu", {"gpu_index": "0", "gpu_uuid": U11B, "node": "hgx-11"}, f"hgx-11/{U11B}"),
    # models and other texts in a label for an index
    ("gpu", {"gpu": "NVIDIA H200 141GB HBM3", "uuid": U11B, "exported_instance": "hgx-11"}, f"hgx-11/{U11B}"),
    ("gpu", {"gpu": "nvidia-4080", "gpu_id": "1", "node": "hgx-11"}, "hgx-11/1"),
    ("gpu", {"gpu": "A100", "pci_bus_id": "0000:3c:00.0", "node": "hgx-11"}, "hgx-11/0000:3c:00.0"),
    ("gpu", {"gpu": U11B, "instance": "hgx-11:9400"}, f"hgx-11/{U11B}"),
    ("gpu", {"gpu": "GPU 1", "gpu_id": "1", "node": "hgx-11"}, "hgx-11/1"),
    # names of ports
    ("gpu", {"gpu": "0", "exported_instance": "dcgm-exporter-w9x4d:metrics", "instance": "prom-east:web"}, "hgx-12/0"),
    ("node", {"exported_instance": "hgx-11:metrics", "exported_job": "node", "instance": "prom-east:web"}, "hgx-11"),
]
UNCLEAR: list[tuple[str, dict[str, str], str]] = [
    # two subjects, or two machines
    ("gpu", {"UUID": TWO, "Hostname": "hgx-11", "gpu": "2"}, "target_ambiguous"),
    ("gpu", {"UUID": U12, "Hostname": "hgx-11"}, "target_ambiguous"),
    ("gpu", {"UUID": U12, "host": "hgx-11"}, "target_ambiguous"),
    ("gpu", {"UUID": U11, "deviceuuid": U12}, "target_ambiguous"),
    ("node", {"host": "hgx-12", "instance": "hgx-11:9273", "job": "web"}, "target_ambiguous"),
    ("node", {"host": "hgx-12", "node": "hgx-11"}, "target_ambiguous"),
    ("node", {"nodelist": "hgx-[11-12]", "node": "hgx-11", "job": "slurm"}, "target_ambiguous"),
    ("node", {"node": "hgx-11,hgx-12", "instance": "slurm-head:9341"}, "target_ambiguous"),
    ("node", {**DCGM_12, "Hostname": "hgx-11", "instance": "10.60.2.2:9400"}, "target_ambiguous"),
    ("gpu", {"UUID": "MIG-3f9e1b77-5d10-5ac1-8e1f-c0ffee000001", "Hostname": "hgx-11"}, "target_unknown"),
    # a machine that nobody knows beside one that somebody knows
    ("node", {"Hostname": "hgx-11.berlin.example.org", "instance": "hgx-11.berlin.example.org:9400"}, "target_unknown"),
    ("node", {"node": "hgx-12.hall3.example.net"}, "target_unknown"),
    ("node", {"node": "ip-10-9-4-21.us-west-2.compute.internal", "instance": "10.77.1.1:9100"}, "target_unknown"),
    ("node", {"kubernetes_io_hostname": "hgx-77", "instance": "hgx-11:10250"}, "target_unknown"),
    ("node", {"node_name": "hgx-77", "instance": "10.50.0.11:9100"}, "target_unknown"),
    ("node", {"host": "hgx-11", "node": "hgx-77"}, "target_unknown"),
    ("gpu", {"UUID": STRANGE, "gpu": "0", "instance": "10.77.0.9:9400"}, "target_unknown"),
    ("gpu", {"gpu": "0", "namespace": "gpu", "pod": "dcgm-exporter-00000"}, "target_unknown"),
    ("node", {"exported_instance": "hgx-77:9100", "instance": "hgx-11:9091"}, "target_unknown"),
    # machines that are no nodes, and exporters that measure others
    ("node", {"instance": "https://hgx-11.hall2.example.net/healthz", "job": "blackbox"}, "target_unknown"),
    ("node", {"target": "hgx-12", "instance": "hgx-11:9115", "job": "blackbox"}, "target_unknown"),
    ("node", {"instance": "10.66.0.12", "job": "ipmi"}, "target_unknown"),
    ("node", {"instance": "hgx-12-bmc.mgmt.example.net:9290", "job": "ipmi"}, "target_unknown"),
    ("node", {"instance": "pdu-a4.example.net", "job": "snmp", "outlet": "12"}, "target_unknown"),
    ("node", {**KSM, "namespace": "speech", "deployment": "portal"}, "target_unknown"),
    ("node", {**KSM, "node_ip": "10.50.0.12", "deployment": "portal"}, "target_unknown"),
    ("node", {"instance": "10.60.9.3:9091", "job": "pushgateway", "host": "nightly"}, "target_unknown"),
    ("node", {"instance": "localhost:9100", "job": "node"}, "target_unknown"),
    ("node", {"cluster": "east", "replica": "prometheus-0"}, "target_unknown"),
    ("node", {"job_name": "wav2", "host": "hgx-12", "source": "log"}, "target_unknown"),
    ("node", {"job_name": "wav2", "nodelist": "hgx-12", "source": "log"}, "target_unknown"),
    ("gpu", {"gpu": "0", "instance": "10.60.9.4:9395", "namespace": "kube-system"}, "target_unknown"),
    ("gpu", {"gpu": "0"}, "target_unknown"),
    *(
        ("gpu", {"gpu": text, "node": "hgx-11"}, "target_unknown")
        for text in ("NVIDIA H200 141GB HBM3", "nvidia-4080", "A100", "all", "nvidia1", "card0", "GPU 1", "A100-40")
    ),
    ("gpu", {"gpu": "0", "gpu_index": "1", "node": "hgx-11"}, "target_ambiguous"),
    ("gpu", {"GpuIndex": "0", "ip": "10.60.2.41", "instance": "10.60.2.41:8080", "job": "ray"}, "target_unknown"),
    ("gpu", {"minor_number": "1", "instance": "hgx-11:9445"}, "target_unknown"),
    ("node", {"instance": "hgx-12:9121"}, "target_unknown"),
    ("node", {"exported_instance": "hgx-77:metrics", "instance": "hgx-11:web"}, "target_unknown"),
    ("node", {"agent_hostname": "hgx-11", "cluster": "east"}, "target_unknown"),
    ("node", {"agent_hostname": "hgx-12", "instance": "hgx-11:9100", "job": "integrations/unix"}, "target_ambiguous"),
    # texts with another index, and a job's own count of its container's GPUs
    *(
        ("gpu", {"gpu": text, "gpu_id": "0", "node": "hgx-11"}, "target_ambiguous")
        for text in ("GPU 1", "gpu1", "nvidia1", "/dev/nvidia1", "card1", "0,1", "GPU-1")
    ),
    *(
        ("gpu", {label: "0", "node": "hgx-11", "instance": "10.60.1.40:8000", "job": "wav2"}, "target_unknown")
        for label in ("gpu", "gpu_index")
    ),
    ("gpu", {"gpu": "0", "gpu_id": "0000:3c:00.0", "node": "hgx-11"}, "target_ambiguous"),
    ("gpu", {"gpu": "0", "pci_bus_id": "00000000:3C:00.0", "node": "hgx-11"}, "target_ambiguous"),
    # the scrape's label only counts as the exporter's place if the exporter measures other nodes
    ("node", {"exported_node": "hgx-11", "node": "hgx-12", "job": "node"}, "target_ambiguous"),
    ("node", {**KSM, "exported_node": "hgx-11", "node": "store-1", "nodename": "hgx-12"}, "target_ambiguous"),
]
JOBS_OF: list[tuple[dict[str, str], str]] = [
    ({"job_name": "wav2", "instance": "10.60.1.40:8000"}, "wav2"),
    ({"job_name": "wav2", "instance": "10.50.0.11:8000"}, "wav2"),
    ({"job_name": "wav2", "namespace": "speech", "pod": "wav2-0", "instance": "10.60.1.40:8000"}, "wav2"),
    ({"job_name": "wav2", "instance": "10.60.9.3:9091", "job": "pushgateway"}, "wav2"),
    ({"job_name": "wav2", "instance": "store-1:8000"}, "wav2"),
    ({"job_name": "clip", "namespace": "video", **KSM}, "clip"),
    ({"label_jobset_sigs_k8s_io_jobset_name": "clip", "namespace": "video", **KSM}, "clip"),
    ({"label_jobset_sigs_k8s_io_jobset_name": "clip", "label_batch_kubernetes_io_job_name": "clip-node-0"}, "clip"),
    ({"label_jobset_sigs_k8s_io_jobset_name": "clip", "job_name": "clip-node-12", "namespace": "video", **KSM}, "clip"),
    ({"label_jobset_sigs_k8s_io_jobset_name": "clip", "job_name": "clip-2"}, "target_ambiguous"),
    ({"training_job": "clip", "job_name": "clip-node-0"}, "target_ambiguous"),
    ({"exported_job_name": "clip", "exported_namespace": "video", "namespace": "mon"}, "clip"),
    ({"job_name": "wav2", "instance": "10.60.2.40:8000"}, "target_ambiguous"),
    ({"job_name": "wav2", "exported_instance": "10.60.2.40:8000", "instance": "prom-east:9090"}, "target_ambiguous"),
    ({"job_name": "wav2", "namespace": "video", "pod": "wav2-0", "instance": "10.60.2.40:8000"}, "target_ambiguous"),
    ({"job_name": "wav2", "instance": "10.60.2.41:8000"}, "target_ambiguous"),
    ({"job_name": "wav2", "instance": "hgx-12:8000"}, "target_ambiguous"),
    ({"job_name": "wav2", "node_name": "hgx-12"}, "target_ambiguous"),
    ({"job_name": "wav2", "host": "hgx-12"}, "target_ambiguous"),
    ({"job_name": "wav2", "namespace": "video", **KSM}, "target_ambiguous"),
    ({"job_name": "wav2", "deviceuuid": U12}, "target_ambiguous"),
    ({"job_name": "wav2", "exported_job_name": "clip"}, "target_ambiguous"),
]


def told(value: str | dict[str, str]) -> str:
    """A parameter as a part of a test's name."""
    return value if isinstance(value, str) else ",".join(f"{name}={each}" for name, each in value.items())[:90]


@pytest.mark.parametrize(("kind", "labels", "expected"), CLEAR, ids=told)
def test_labels_that_name_one_known_subject_lead_to_it(kind: str, labels: dict[str, str], expected: str) -> None:
    """In whatever spelling, under whatever name of the label."""
    assert named(kind, labels) == f"{kind}:{expected}"


@pytest.mark.parametrize(("kind", "labels", "reason"), UNCLEAR, ids=told)
def test_labels_that_name_a_stranger_or_several_are_refused(kind: str, labels: dict[str, str], reason: str) -> None:
    """For the reason that a person can act on."""
    assert named(kind, labels) == reason


@pytest.mark.parametrize(("labels", "expected"), JOBS_OF, ids=told)
def test_a_job_is_taken_unless_it_runs_elsewhere(labels: dict[str, str], expected: str) -> None:
    """The pod, the node and the namespace from which the alert comes are those of the job that takes commands."""
    found = named("job", labels)
    assert found == (expected if expected.startswith("target_") else f"job:{expected}")
