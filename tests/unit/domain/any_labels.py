"""Label sets as exporters write them, of a subject that the generator has chosen, with what stands beside it.

The spellings are those of dcgm-exporter (with and without a node's name in ``Hostname``), nvidia_gpu_exporter,
node-exporter, kube-state-metrics and Pushgateway (each with and without ``honor_labels``), federation, GKE's managed
collection, AMD's device metrics exporter, Slurm exporters, the kubelet, and Trainmedic's agent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.unit.domain.any_fleet import Card, Fleet, Job, Node
from trainmedic_server.domain.topology import Pod

Labels = dict[str, str]


@dataclass
class Case:
    """A label set, and what it is about."""

    kind: str
    labels: Labels
    node: Node | None = None
    card: Card | None = None
    job: Job | None = None
    names_one: bool = True
    """Whether it names exactly one known subject."""


def _spelling(fleet: Fleet, node: Node) -> str:
    """A name of the node that some source can map: with no cluster nobody knows a cloud's internal names, and with one
    a full name that it does not have is that of another machine."""
    names = [node.agent_name if node.has_agent or node.is_gone else node.cluster_name, node.short]
    if fleet.knows_full_name(node):
        names.append(node.full)
    if fleet.has_cluster:
        names += [node.internal, node.cluster_name]
    return fleet.rng.choice(names)


def _host(fleet: Fleet, node: Node, port: int) -> str:
    addresses = [node.ipv4, f"[{node.ipv6}]"] if fleet.has_cluster or fleet.has_inventory else []
    return f"{fleet.rng.choice([_spelling(fleet, node), *addresses])}:{port}"


def _dcgm(fleet: Fleet, node: Node, card: Card) -> Labels:
    rng = fleet.rng
    labels = {"UUID": card.uuid, "gpu": str(card.index), "device": f"nvidia{card.index}", "job": "dcgm-exporter"}
    labels |= {"pci_bus_id": card.pci, "Hostname": _spelling(fleet, node), "instance": _host(fleet, node, 9400)}
    if fleet.has_cluster:
        pod = node.pods["dcgm"]
        labels |= {"pod": pod.name, "namespace": pod.namespace, "instance": f"{pod.addresses[0]}:9400"}
        labels |= {"Hostname": rng.choice([pod.name, _spelling(fleet, node)])}
    elif rng.random() < 0.4:
        labels["Hostname"] = f"{rng.getrandbits(48):012x}"
    if rng.random() < 0.3:
        labels["node"] = _spelling(fleet, node)
    if rng.random() < 0.3:
        labels |= {"exported_namespace": "research", "exported_pod": "some-worker-3", "exported_container": "main"}
    return labels


def _gpu_cases(fleet: Fleet, node: Node, card: Card) -> list[Callable[[], Labels]]:
    bare = card.uuid.removeprefix("GPU-").upper()
    return [
        lambda: _dcgm(fleet, node, card),
        lambda: _dcgm(fleet, node, card) | {"GPU_I_ID": "7", "GPU_I_PROFILE": "1g.10gb"},
        lambda: _dcgm(fleet, node, card) | {"UUID": f"{card.uuid}::2"},
        lambda: _dcgm(fleet, node, card) | {"UUID": f"MIG-{card.uuid}/7/0", "GPU_I_ID": "7"},
        lambda: {"uuid": bare, "instance": _host(fleet, node, 9835), "job": "nvidia_gpu_exporter"},
        lambda: {"gpu_id": str(card.index), "node": _spelling(fleet, node), "instance": _host(fleet, node, 9445)},
        lambda: {"deviceuuid": card.uuid, "deviceidx": str(card.index), "nodeid": _spelling(fleet, node)},
        lambda: {"deviceidx": str(card.index), "nodeid": _spelling(fleet, node), "job": "hami-scheduler"},
        lambda: {"pci_bus_id": card.pci, "node": _spelling(fleet, node), "job": "gpu"},
        lambda: {"gpu_id": str(card.index), "hostname": _spelling(fleet, node), "instance": _host(fleet, node, 5000)},
        lambda: _pushed(fleet, node) | {"gpu": str(card.index)},
        lambda: _federated(fleet, node, _dcgm(fleet, node, card)),
        lambda: {
            "UUID": card.uuid,
            "gpu": str(card.index),
            "node": _spelling(fleet, node),
            "Hostname": _spelling(fleet, node),
            "instance": _host(fleet, node, 9400),
            "location": "europe-west4",
        },
    ]


def _pushed(fleet: Fleet, node: Node) -> Labels:
    """Through a Pushgateway, whose own place the scrape adds."""
    instance = f"{fleet.central}:9091"
    if fleet.has_cluster and fleet.rng.random() < 0.5:
        instance = f"{fleet.central_pods['pushgateway'].addresses[0]}:9091"
    return {
        "exported_instance": _spelling(fleet, node),
        "exported_job": "push",
        "instance": instance,
        "job": "pushgateway",
    }


def _federated(fleet: Fleet, node: Node, labels: Mapping[str, str]) -> Labels:
    """From another Prometheus, which renames what it has itself."""
    renamed = {f"exported_{name}" if name in ("instance", "job") else name: value for name, value in labels.items()}
    return renamed | {"instance": f"{fleet.central}:9090", "job": "federate"}


def _node_cases(fleet: Fleet, node: Node) -> list[Callable[[], Labels]]:
    rng = fleet.rng
    cases: list[Callable[[], Labels]] = [
        lambda: {"instance": _host(fleet, node, 9100), "job": "node"},
        lambda: {"instance": _host(fleet, node, 9100), "node": _spelling(fleet, node), "job": "node"},
        lambda: _pushed(fleet, node),
        lambda: _federated(fleet, node, {"instance": _host(fleet, node, 9100), "job": "node"}),
        lambda: {"nodes": _spelling(fleet, node), "instance": f"{fleet.central}:9341", "job": "slurm"},
        lambda: {
            "nodelist": f"{node.short[:-1]}[{node.short[-1]}]" if node.short[-1].isdigit() else node.short,
            "instance": f"{fleet.central}:9341",
            "job": "slurm_exporter",
        },
        lambda: {"instance": _host(fleet, node, 10250), "node": _spelling(fleet, node), "job": "kubelet"},
        lambda: {"instance": _host(fleet, node, 10250), "kubernetes_io_hostname": _spelling(fleet, node)},
        lambda: {"instance": _host(fleet, node, 9273), "host": _spelling(fleet, node), "job": "telegraf"},
        lambda: {"instance": _host(fleet, node, 9100), "host": "portal.example.net", "machine": "x86_64"},
        lambda: {"host_name": _spelling(fleet, node), "job": "otelcol"},
        lambda: {"instance": _host(fleet, node, 9798), "job": "slurm-job-exporter", "slurmjobid": "41"},
        lambda: {"instance": _host(fleet, node, 12345), "job": rng.choice(["integrations/unix", "nodes", "gpu"])},
        lambda: {"instance": _spelling(fleet, node), "job": "lab", "machine": "x86_64"},
        lambda: {"instance": _spelling(fleet, node), "job": "node", "host": "mon-1", "machine": "armv7l"},
        lambda: {"instance": _host(fleet, node, 9100), "job": "dgx", "gateway": fleet.central, "server": "prom-1"},
        lambda: {"instance": _host(fleet, node, 19100), "job": rng.choice(["dgx", "h100", "baremetal"])},
        # kube-prometheus and OpenShift.
        lambda: {
            "instance": _spelling(fleet, node),
            "job": "node-exporter",
            "service": "node-exporter",
            "container": "kube-rbac-proxy",
            "pod": "node-exporter-2vqfp",
            "namespace": "monitoring",
        },
    ]
    if fleet.has_cluster:
        metrics, exporter = fleet.central_pods["kube-state-metrics"], node.pods["node"]
        scraped = {"job": "kube-state-metrics", "instance": f"{metrics.addresses[0]}:8080"}
        scraped_pod = {"pod": metrics.name, "namespace": metrics.namespace}
        cases += [
            lambda: {"node": node.cluster_name, **scraped, "condition": "Ready", "status": "false"},
            lambda: {"exported_node": node.cluster_name, **scraped, **scraped_pod},
            lambda: {
                "instance": f"{node.ipv4}:9100",
                "pod": exporter.name,
                "namespace": exporter.namespace,
                "container": "node-exporter",
                "job": rng.choice(["node-exporter", "integrations/node_exporter"]),
            },
            lambda: {"Hostname": node.pods["dcgm"].name, "instance": f"{node.pods['dcgm'].addresses[0]}:9400"},
            lambda: {"namespace": "gpu-operator", "pod": node.pods["dcgm"].name},
            lambda: {"namespace": "gpu-operator", "pod": node.pods["dcgm"].name, "instance": node.pods["dcgm"].name},
        ]
    return cases


def clear_case(fleet: Fleet) -> Case:
    """A label set with one subject, and noise."""
    rng = fleet.rng
    node = rng.choice(fleet.nodes)
    card = rng.choice(node.cards)
    if rng.random() < 0.5:
        labels = rng.choice(_gpu_cases(fleet, node, card))()
        case = Case("gpu", labels, node, card, names_one=fleet.is_known(node))
    else:
        case = Case("node", rng.choice(_node_cases(fleet, node))(), node, names_one=fleet.is_known(node))
    if not fleet.has_cluster and not node.has_agent and not node.is_gone:
        case.names_one = False  # an inventory has addresses, and one of many names
    case.labels |= rng.choice([{}, {"severity": "page"}, {"team": "infra", "device": "/dev/sda"}, {"cluster": "here"}])
    return case


def unclear_case(fleet: Fleet) -> Case:
    """A label set that names a stranger, or two of the known: nothing may be done."""
    rng = fleet.rng
    node, other = rng.sample(fleet.nodes, 2)
    card, stranger = node.cards[0], "gpu-elsewhere-99"
    here, there = _spelling(fleet, node), _spelling(fleet, other)
    instance = f"{here}:9100"
    cases: list[Labels] = [
        {"exported_instance": stranger, "instance": f"{_spelling(fleet, node)}:9091", "job": "pushgateway"},
        {"exported_node": stranger, "node": _spelling(fleet, node), "job": "kube-state-metrics"},
        {"node": stranger, "instance": instance},
        {"Hostname": stranger, "node": _spelling(fleet, node), "instance": instance},
        {"kubernetes_io_hostname": stranger, "instance": instance},
        {"host": there, "instance": f"{here}:9273"},
        {"host": stranger},
        {"node": here, "Hostname": there, "instance": instance},
        {"exported_instance": there, "instance": f"{here}:9091", "job": "pushgateway"},
        {"nodes": f"{node.short},{other.short}", "instance": f"{_spelling(fleet, node)}:9341", "job": "slurm"},
        {"nodes": "gpu-[01-59]", "instance": instance},
        {"nodes": "gpu-[1-99999999999]", "instance": instance},
        {"instance": f"{_spelling(fleet, node)}:9091", "job": "pushgateway"},
        {"instance": f"{_spelling(fleet, node)}:9115", "job": "blackbox"},
        {"instance": "10.250.1.1:9100"},
        {"instance": f"https://{node.full}:8443/healthz"},
        # Relays, fabrics, storage and guests, whose exporter runs on a known node.
        {"host": stranger, "instance": f"{here}:9273", "job": "telegraf"},
        {"exported_host": stranger, "instance": f"{here}:8889"},
        {"zabbix_host": stranger, "instance": here},
        {"fqdn": f"{stranger}.example.net", "instance": here, "job": "logs", "filename": "/var/log/kern.log"},
        {"nodeid": stranger, "deviceidx": "0", "instance": f"{here}:31993", "job": "scheduling"},
        {"remote_name": f"{there} mlx5_0", "instance": f"{here}:9683", "job": "net"},
        {"domain": there, "instance": f"{here}:9177", "job": "libvirt"},
        {"vm_name": there, "host_name": here, "instance": "vcenter.example.net:443", "job": "vmware"},
        {"uplink": there, "instance": here},
        {"target": there, "instance": f"{here}:9427", "job": "node-ping"},
        {"peer": there, "instance": f"{here}:19427", "job": "gpu-links"},
        {"instance": f"{here}:9000", "job": rng.choice(["kubelet-probe", "gpu-mesh", "h100-pdu", "dcgm-aggregator"])},
        {"monitored_host": there, "instance": instance, "job": "node"},
        {"host": "10.250.9.9", "instance": here, "job": "logs"},
        {"sysName": f"{stranger}.example.net", "instance": here, "job": "lab"},
        {"host": f"https://{stranger}:8443", "instance": f"{here}:9374", "job": "smokeping-hosts"},
        {"pod": "llm-gpu-0", "container": "nvidia-train", "instance": f"{here}:9641", "job": "storage"},
        {"instance": f"{here}:10008", "job": "nvmeof"},
        {"pool_id": "7", "name": "checkpoints", "instance": f"{here}:19283", "job": "storage"},
        {"volume": "datasets", "instance": f"{here}:12990", "job": "harvest"},
        {"id": "qemu/103", "instance": f"{here}:9221", "job": "pve"},
        {"instance": here, "job": "syslog-relay", "filename": f"/var/log/remote/{stranger}/kern.log"},
        {"instance": f"{here}:8889", "job": "otel-gateway", "exported_job": "dcgm"},
        {"instance": f"{here}:8150", "job": "weka", "node_id": "NodeId<41>"},
    ]
    if node.has_agent and (other.has_agent or fleet.has_cluster):
        cases.append({"UUID": card.uuid, "Hostname": there, "node": there, "kind": "gpu"})
    if node.has_agent and other.has_agent:
        cases.append({"UUID": fleet.shared_uuid, "Hostname": here, "kind": "gpu"})
    if fleet.has_cluster:
        dcgm = other.pods["dcgm"]
        if not fleet.ghosts:
            cases.append({"node": here, "instance": f"{dcgm.addresses[0]}:9400", "pod": dcgm.name})
        metrics = fleet.central_pods["kube-state-metrics"]
        place = {"instance": f"{metrics.addresses[0]}:8080", "pod": metrics.name, "namespace": metrics.namespace}
        cases += [{**place, "job": "kube-state-metrics"}, {**place, "job": "ksm"}]
    labels = rng.choice(cases)
    kind = labels.pop("kind", "node")
    return Case(kind, labels | ({"gpu": "0"} if kind == "gpu" else {}), names_one=False)


def _pod_of(job: Job) -> Pod:
    return next(pod for pod in job.nodes[0].pods.values() if pod.job == job.name)


def job_case(fleet: Fleet) -> Case | None:
    """A label set about one of the jobs; of two jobs of one name it is always clear to a person which one is meant."""
    if not fleet.jobs:
        return None
    rng = fleet.rng
    job = rng.choice(fleet.jobs)
    node, card = job.cards[0]
    by_gpu = {"UUID": card.uuid, "gpu": str(card.index), "Hostname": node.agent_name}
    of_pod = {"exported_namespace": job.namespace, "exported_pod": f"{job.name}-worker-0"}
    cases: list[tuple[str, Labels]] = [
        ("gpu:alert", by_gpu),
        ("gpu:alert", by_gpu | of_pod),
        ("", {"job_name": job.name, **by_gpu, "exported_namespace": job.namespace}),
        (f"gpu:{card.uuid}", {}),
        (f"node:{node.agent_name}", {}),
    ]
    if fleet.has_cluster:
        metrics = fleet.central_pods["kube-state-metrics"]
        scraped = {"job": "kube-state-metrics", "instance": f"{metrics.addresses[0]}:8080"}
        cases += [
            ("", {"job_name": job.name, "namespace": job.namespace, **scraped}),
            ("", {"pod": f"{job.name}-worker-0", "namespace": job.namespace, **scraped}),
            ("", {"job_name": job.name, "instance": f"{_pod_of(job).addresses[0]}:8000"}),
            (f"pod:{job.namespace}/{job.name}-worker-0", {}),
            (job.name, {"exported_namespace": job.namespace}),
        ]
    reference, labels = rng.choice(cases)
    # What commands reach is the job that is connected; of the other one nothing may come.
    return Case(reference, labels, job=job, names_one=job.is_connected)
