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
# Exporters of their own node.
_OF_NODES = re.compile(
    "dcgm|node-?_?exporter|windows-?_?exporter|process-?_?exporter|systemd-?_?exporter|cgroup-?_?exporter|"
    "slurm-?_?job-?_?exporter|smi-?_?exporter|nvidia-?_?gpu-?_?exporter|device-metrics|habana|gaudi|neuron|cadvisor|"
    "kubelet|kube-proxy|node-problem-detector|npd|node-status|trainmedic-agent|smart(ctl|mon)|nvitop|all-smi|"
    "integrations/(agent|alloy|docker|linux|unix)|(^| )slurmd( |$)"
)
# Usual names of scrapes of all machines.
_PER_NODE = re.compile(
    _OF_NODES.pattern + "|nvidia|gpu|amd|rocm|dgx|hgx|superpod|ethtool|zfs|edac|rasdaemon|kepler|xpum|"
    "(^|[^a-z])(nodes?|hosts?|machines|servers|workers|compute|bare-?metal|unix|linux|windows|docker|containerd|nvme|"
    "[abhlv][0-9]{2,3}s?|gb[0-9]{3}|mi[0-9]{3}x?)([^a-z]|$)"
)
# Programs that measure the network to other machines, or their power and cooling.
_FOR_OTHERS = re.compile("(smoke|gold|[^a-z])ping|probe|icmp|latency|reachab|mesh|aggregat|pdu|cdu|nmx")
# Also programs that pass on other machines' metrics or measure a fabric, storage, guests or management controllers, on
# any machine. Some of them also run on each node.
_OFTEN_FOR_OTHERS = re.compile(
    _FOR_OTHERS.pattern
    + "|relay|proxy|gateway|gw([^a-z]|$)|collector|forward|otel|opentelemetry|telegraf|netdata|graphite|statsd|"
    "influx|syslog|zabbix|infiniband|fabric|ufm|switch|idrac|redfish|ipmi|bmc|vmware|vcenter|libvirt|proxmox|"
    "pve|weka|netapp|harvest|ceph|lustre|hami|scheduler|controller|operator"
)
# Prometheus, Pushgateway, blackbox, SNMP, Ceph and Slurm.
_CENTRAL_PORTS = frozenset({"9090", "9091", "9115", "9116", "9283", "9341"})
# Node, Windows, DCGM and other GPU exporters, the kubelet, and exporters of processes, systemd, cgroups, disks and a
# node's Slurm jobs.
_PER_NODE_PORTS = frozenset({"9100", "9182", "9400", "9445", "9835", "10250", "9256", "9558", "9306", "9633", "9798"})
# Default ports of exporters of databases, brokers, proxies, guests, fabrics and management controllers.
_PORTS_OF_OTHERS = frozenset(
    {"9101", "9104", "9113", "9114", "9117", "9121", "9127", "9150", "9177", "9187", "9216", "9221", "9272", "9290"}
) | {"9308", "9315", "9419", "9610"}
# labels that name an exporter
_NAMING = ("job", "service", "container", "pod")
_NAMING_EXPORTED = tuple(EXPORTED + name for name in _NAMING)
_LONGEST_KEPT = 255  # characters of a cached name, and of an exporter's pod or container
_LONGEST_READ = 1000  # characters of joined names
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
    return any(is_central_name(label.value) for name in names for label in labels.under(name))


def is_surely_of_own_node(labels: AlertLabels) -> bool:
    """Return whether the port, or a name that no others have, is that of an exporter of its own node."""
    if labels.value("instance").rpartition(":")[2] in _PER_NODE_PORTS:
        return True
    names = _names(labels)
    return _OF_NODES.search(names) is not None and not _FOR_OTHERS.search(names)


def is_of_own_node(labels: AlertLabels) -> bool:
    """Return whether port or names are those of an exporter of its own node."""
    if is_surely_of_own_node(labels):
        return True
    names = _names(labels)
    return _PER_NODE.search(names) is not None and not _OFTEN_FOR_OTHERS.search(names)


def is_unknown(labels: AlertLabels) -> bool:
    """Return whether an exporter that is not central may still measure other machines than its own.

    Without names, only `_PORTS_OF_OTHERS` are unknown.
    """
    names = _names(labels)
    if not names:
        return labels.value("instance").rpartition(":")[2] in _PORTS_OF_OTHERS
    if is_of_own_node(labels):
        return False
    # Unlisted names are unknown with a port: `_PER_NODE_PORTS` do not come here.
    return ":" in labels.value("instance") or _OFTEN_FOR_OTHERS.search(names) is not None


def _names(labels: AlertLabels) -> str:
    # Not `container` and `pod`: they may be measured.
    return " ".join(label.value for name in ("job", "service") for label in labels.under(name))[:_LONGEST_READ].lower()


def is_central_name(text: str) -> bool:
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
    return bool(_PER_NODE.search(text)) and not is_central_name(text)


def names_an_exporter(value: str, labels: AlertLabels) -> bool:  # True for a pod's name or a container's ID
    if value in labels.values("pod"):
        return True
    if len(value) > _LONGEST_KEPT:
        return False
    text = value.lower()
    return bool(_CONTAINER_ID.fullmatch(text) or _EXPORTER_POD.fullmatch(text))
