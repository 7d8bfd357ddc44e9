"""Detection of a kubelet, which alone removes its node's images and containers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_KUBELETS = frozenset(
    {"kubelet", "kubelite", "k3s", "k3s-server", "k3s-agent", "rke2", "k0s", "hyperkube"}
)  # process names, cut to the kernel's 15 characters
_LABEL_PREFIXES = ("io.kubernetes.", "io.cri-")


def sign_of_kubelet(proc: Path = Path("/proc"), pods: Path = Path("/var/lib/kubelet/pods")) -> str | None:
    """Return the evidence for a kubelet here, in words; None without any."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "this agent runs in a pod"
    for name in _process_names(proc):
        if name in _KUBELETS:
            return f"the process {name} runs here"
    try:
        if any(pods.iterdir()):
            return f"{pods} has pods"
    except OSError:
        pass
    return None


def is_of_kubelet(container: Mapping[str, Any]) -> bool:
    labels = container.get("Labels")
    return isinstance(labels, Mapping) and any(str(label).startswith(_LABEL_PREFIXES) for label in labels)


def _process_names(proc: Path) -> Iterable[str]:
    for process in proc.iterdir():
        if process.name.isdigit():
            try:
                yield (process / "comm").read_text("utf-8", "replace").strip()
            except OSError:
                continue  # the process has ended
