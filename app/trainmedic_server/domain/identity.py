"""Which labels name a target, and how it is said that they name none. Pure; who looks them up is ``target``."""

from __future__ import annotations

from msgspec import Struct


class Unresolved(Struct, frozen=True):
    """The labels name no target, or several."""

    reason: str
    """``target_unknown`` or ``target_ambiguous``; ``not_accepted`` where the alert map refuses the alert, so that its
    labels are not looked up here."""
    why: str
    """For a person: what is missing, or what disagrees."""


class IdentityLabels(Struct, frozen=True):
    """Which labels name a target, most trusted first. They are compared without regard to case.

    The defaults are the labels of dcgm-exporter, nvidia_gpu_exporter, node-exporter, kube-state-metrics, HAMi,
    Telegraf, OpenTelemetry and Trainmedic's own exporter, and those that common scrape configurations add. With each
    name its ``exported_`` form is looked up, which Prometheus makes when a scrape adds a label of the same name.
    """

    gpu_uuid: tuple[str, ...] = ("uuid", "gpu_uuid", "deviceuuid", "device_uuid")
    gpu_index: tuple[str, ...] = ("gpu", "gpu_id", "deviceidx")
    gpu_pci: tuple[str, ...] = ("pci_bus_id", "pci_bus", "pci_address")
    """Where no UUID or index names the GPU."""
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
    """Labels that may mean something else, such as a virtual host or a kind of processor: one of them counts where its
    value is a known node, and is no unknown node elsewhere. Not read from alerts that the server makes of log lines,
    whose labels anybody may write."""
    job: tuple[str, ...] = (
        "job_name",
        "training_job",
        "label_training_kubeflow_org_job_name",
        "label_jobset_sigs_k8s_io_jobset_name",
        "label_batch_kubernetes_io_job_name",
        "label_job_name",
    )
