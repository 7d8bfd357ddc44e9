"""Labels that name a target, and the result if they name none. Pure. ``target`` looks them up."""

from __future__ import annotations

from msgspec import Struct


class Unresolved(Struct, frozen=True):
    """Refusal of labels that name no target, or several."""

    reason: str
    """``target_unknown`` or ``target_ambiguous``; ``not_accepted`` if the alert map refuses the alert, whose labels are
    then not looked up here."""
    why: str
    """Reason for a person: what is missing, or what disagrees."""


class IdentityLabels(Struct, frozen=True):
    """Labels that name a target, most trusted first. They are compared without regard to case.

    The defaults are the labels of dcgm-exporter, nvidia_gpu_exporter, node-exporter, kube-state-metrics, HAMi,
    Telegraf, OpenTelemetry and Trainmedic's own exporter, and those that common scrape configurations add. With each
    name its ``exported_`` form is looked up. Prometheus makes it when a scrape adds a label of the same name.
    """

    gpu_uuid: tuple[str, ...] = ("uuid", "gpu_uuid", "deviceuuid", "device_uuid")
    gpu_index: tuple[str, ...] = ("gpu", "gpu_id", "deviceidx")
    gpu_pci: tuple[str, ...] = ("pci_bus_id", "pci_bus", "pci_address")
    """Labels for the GPU if no UUID or index names it."""
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
    """Labels that may mean something else, such as a virtual host or a kind of processor. One of them counts if its
    value is a known node. Otherwise it is ignored, and is no unknown node. They are not read from the server's own
    alerts about log lines, because anyone may write those labels."""
    job: tuple[str, ...] = (
        "job_name",
        "training_job",
        "label_training_kubeflow_org_job_name",
        "label_jobset_sigs_k8s_io_jobset_name",
        "label_batch_kubernetes_io_job_name",
        "label_job_name",
    )
