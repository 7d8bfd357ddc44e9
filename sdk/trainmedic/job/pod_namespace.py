"""The Kubernetes namespace of this process. Two teams may have jobs of one name, each in a namespace of its own."""

from __future__ import annotations

from pathlib import Path

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""File with the namespace. Kubernetes mounts it into every pod that has a service account's token."""
_LONGEST = 63


def pod_namespace(file: Path = SERVICE_ACCOUNT) -> str | None:
    """Return the namespace; None outside of a pod, or where the pod has no token."""
    try:
        name = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return name if 0 < len(name) <= _LONGEST and name.isprintable() else None
