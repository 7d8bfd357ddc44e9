"""Pods and events as the Kubernetes API writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from trainmedic_server.ports.cluster import Object

JOBSET = "jobset.sigs.k8s.io/jobset-name"


def written(at: datetime) -> str:
    """A time in whole seconds, as the API has it."""
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def pod(
    placed_at: datetime,
    *,
    name: str = "llm-7-worker-0",
    namespace: str = "team-a",
    node: str = "gpu-11",
    labels: Mapping[str, str] | None = None,
    containers: Sequence[str] = ("main",),
    gpus: int = 8,
    **status: Any,
) -> Object:
    """A pod of the JobSet llm-7. The first of its containers has the GPUs."""
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    return {
        "metadata": {
            "uid": f"uid-of-{namespace}-{name}",
            "name": name,
            "namespace": namespace,
            "labels": {JOBSET: "llm-7"} if labels is None else dict(labels),
        },
        "spec": {
            "nodeName": node,
            "containers": [
                {"name": each, "resources": {"limits": limits if number == 0 else {}}}
                for number, each in enumerate(containers)
            ],
        },
        "status": {
            "phase": "Running",
            "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": written(placed_at)}],
            **status,
        },
    }


def ended(
    at: datetime, code: int, reason: str = "Error", container: str = "main", which: str = "state", **more: Any
) -> dict[str, Any]:
    """The status of a container that has ended."""
    return {
        "name": container,
        which: {"terminated": {"exitCode": code, "reason": reason, "finishedAt": written(at), **more}},
    }


def waiting(reason: str, message: str = "", container: str = "main") -> dict[str, Any]:
    """The status of a container that does not run."""
    return {"name": container, "state": {"waiting": {"reason": reason, "message": message}}}


def disrupted(at: datetime, reason: str, message: str = "") -> dict[str, Any]:
    """The condition of a pod that is being ended."""
    return {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": written(at),
    }


def event(at: datetime, reason: str, message: str, **members: Any) -> Object:
    """An event of a pod."""
    return {"reason": reason, "message": message, "lastTimestamp": written(at), "type": "Warning", **members}
