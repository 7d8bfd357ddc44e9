"""Classification of exporters: central, or measuring their own node."""

from __future__ import annotations

import functools
import re

from trainmedic_server.domain.alert_labels import EXPORTED, AlertLabels
from trainmedic_server.domain.topology import Pod

_CENTRAL = re.compile(
    "kube-?_?state-?_?metrics|push-?_?gateway|blackbox|slurm-?_?exporter|federat|snmp|thanos|opencost|kubecost|"
    "cluster-?_?autoscaler|ceph-?_?mgr|(^| )(slurm|slurmctld|trainmedic|trainmedic-server|prometheus)( |$)"
)
_PER_NODE = re.compile(
    "dcgm|node-?_?exporter|nvidia|gpu|amd|rocm|device-metrics|habana|gaudi|neuron|cadvisor|kubelet|"
    "node-problem-detector|npd|node-status|trainmedic-agent|smi-exporter|windows-exporter"
)
# Prometheus, Pushgateway, blackbox, SNMP, Ceph and Slurm.
_CENTRAL_PORTS = frozenset({"9090", "9091", "9115", "9116", "9283", "9341"})
# Node, Windows, DCGM and other GPU exporters, and the kubelet.
_PER_NODE_PORTS = frozenset({"9100", "9182", "9400", "9445", "9835", "10250"})
# labels that name an exporter
_NAMING = ("job", "service", "container", "pod")
_NAMING_EXPORTED = tuple(EXPORTED + name for name in _NAMING)
_LONGEST_KEPT = 255
_CONTAINER_ID = re.compile("[0-9a-f]{12}|[0-9a-f]{64}")
_EXPORTER_POD = re.compile(r".*(exporter|dcgm).*-[a-z0-9]{4,5}")


def is_central(labels: AlertLabels, exported: bool = False) -> bool:
    """Return whether the exporter measures other machines; with `exported`, the one behind a federation or gateway."""
    port = labels.value("exported_instance" if exported else "instance").rpartition(":")[2]
    if port in _CENTRAL_PORTS:
        return True
    if port in _PER_NODE_PORTS:
        return False
    names = _NAMING_EXPORTED if exported else _NAMING
    return any(_is_central_text(label.value) for name in names for label in labels.under(name))


def is_central_name(pod: str) -> bool:
    return _is_central_text(pod)


def _is_central_text(text: str) -> bool:
    return _cached_is_central(text) if len(text) <= _LONGEST_KEPT else _CENTRAL.search(text.lower()) is not None


@functools.lru_cache(maxsize=2000)
def _cached_is_central(text: str) -> bool:
    return _CENTRAL.search(text.lower()) is not None


def is_on_its_node(pod: Pod, labels: AlertLabels, exported: bool = False) -> bool:
    """Return whether an exporter in this pod measures its own node. `exported` as in `is_central`."""
    if is_central_name(pod.name):
        return False
    if pod.is_per_node is not None:
        return pod.is_per_node
    begin = EXPORTED if exported else ""
    text = " ".join((pod.name, *(labels.value(begin + name) for name in _NAMING))).lower()
    return bool(_PER_NODE.search(text)) and not _is_central_text(text)


def names_an_exporter(value: str, labels: AlertLabels) -> bool:  # True for a pod's name or a container's ID
    if value in labels.values("pod"):
        return True
    if len(value) > _LONGEST_KEPT:
        return False
    text = value.lower()
    return bool(_CONTAINER_ID.fullmatch(text) or _EXPORTER_POD.fullmatch(text))
