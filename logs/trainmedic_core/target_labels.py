"""Labels that name a target in alerts."""

from __future__ import annotations

# Labels that name a target, most trusted first, case-insensitive, with their ``exported_`` forms. They cover common
# exporters and scrape configurations.
UUID_LABELS = ("uuid", "gpu_uuid", "deviceuuid", "device_uuid")
INDEX_LABELS = ("gpu", "gpu_id", "gpu_index", "gpu_number", "deviceidx")
PCI_LABELS = ("pci_bus_id", "pci_bus", "pci_address", "bus_id")
NODE_LABELS = (
    "node",
    "nodename",
    "node_name",
    "kubernetes_node",
    "kubernetes_node_name",
    "kubernetes_io_hostname",
    "label_kubernetes_io_hostname",
    "k8s_node_name",
    "hostname",
)
HOST_LABELS = ("host", "host_name", "machine", "nodeid", "node_ip", "host_ip", "hostip")
"""Ambiguous labels, such as a virtual host, used only if the value is a known node.

Ignored in the server's own log alerts: anyone may write them.
"""
JOB_LABELS = (
    "job_name",
    "training_job",
    "label_training_kubeflow_org_job_name",
    "label_jobset_sigs_k8s_io_jobset_name",
    "label_batch_kubernetes_io_job_name",
    "label_job_name",
)

_PLACES = (*UUID_LABELS, *INDEX_LABELS, *PCI_LABELS, *NODE_LABELS, *JOB_LABELS, "instance", "namespace", "pod")
NAMES_TARGET = frozenset({*_PLACES, *(f"exported_{plain}" for plain in _PLACES)})
"""Labels that a log line must not set."""
