from __future__ import annotations

from msgspec import Struct


class Unresolved(Struct, frozen=True):
    reason: str  # ``target_unknown``, ``target_ambiguous`` or ``not_accepted``
    why: str


class IdentityLabels(Struct, frozen=True):
    """Labels that name a target, most trusted first, case-insensitive, with their ``exported_`` forms.

    Defaults cover common exporters and scrape configurations.
    """

    gpu_uuid: tuple[str, ...] = ("uuid", "gpu_uuid", "deviceuuid", "device_uuid")
    gpu_index: tuple[str, ...] = ("gpu", "gpu_id", "gpu_index", "gpu_number", "deviceidx")
    gpu_pci: tuple[str, ...] = ("pci_bus_id", "pci_bus", "pci_address", "bus_id")
    node: tuple[str, ...] = (
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
    node_if_known: tuple[str, ...] = ("host", "host_name", "machine", "nodeid", "node_ip", "host_ip", "hostip")
    """Ambiguous labels, such as a virtual host, used only if the value is a known node.

    Ignored in the server's own log alerts: anyone may write them.
    """
    job: tuple[str, ...] = (
        "job_name",
        "training_job",
        "label_training_kubeflow_org_job_name",
        "label_jobset_sigs_k8s_io_jobset_name",
        "label_batch_kubernetes_io_job_name",
        "label_job_name",
    )
