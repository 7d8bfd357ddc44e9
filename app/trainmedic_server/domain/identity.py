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

    The defaults are the labels of dcgm-exporter, nvidia_gpu_exporter, node-exporter, kube-state-metrics and
    Trainmedic's own exporter. With each name its ``exported_`` form is looked up, which Prometheus makes when a
    scrape adds a label of the same name.
    """

    gpu_uuid: tuple[str, ...] = ("uuid", "gpu_uuid")
    gpu_index: tuple[str, ...] = ("gpu", "gpu_id")
    gpu_pci: tuple[str, ...] = ("pci_bus_id", "pci_bus", "pci_address")
    """Where no UUID or index names the GPU."""
    node: tuple[str, ...] = ("node", "nodename", "kubernetes_node", "hostname")
    job: tuple[str, ...] = (
        "job_name",
        "training_job",
        "label_training_kubeflow_org_job_name",
        "label_jobset_sigs_k8s_io_jobset_name",
        "label_batch_kubernetes_io_job_name",
        "label_job_name",
    )
