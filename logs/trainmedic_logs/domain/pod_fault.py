"""Faults of pods, by statuses, events and node conditions."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from msgspec import Struct, field

LONGEST_MESSAGE = 500
"""Characters."""


class PodFaultKind(StrEnum):
    OUT_OF_MEMORY = "out_of_memory"
    EXITED = "exited"
    """Ended by exit code or signal, without another reason."""
    EVICTED = "evicted"
    """By the kubelet, for lack of a resource."""
    PREEMPTED = "preempted"
    API_EVICTED = "api_evicted"
    """Such as in a drain."""
    DEADLINE = "deadline"
    NODE_SHUTDOWN = "node_shutdown"
    NODE_LOST = "node_lost"
    """The node is unresponsive or gone."""
    TAINTED = "tainted"
    """By a NoExecute taint."""
    REJECTED = "rejected"
    IMAGE = "image"
    NOT_CREATED = "not_created"
    NOT_MOUNTED = "not_mounted"
    NO_SANDBOX = "no_sandbox"
    """Such as a network failure."""
    NODE_NOT_READY = "node_not_ready"
    PROBE_FAILED = "probe_failed"


NOT_STARTED = frozenset(
    {
        PodFaultKind.REJECTED,
        PodFaultKind.IMAGE,
        PodFaultKind.NOT_CREATED,
        PodFaultKind.NOT_MOUNTED,
        PodFaultKind.NO_SANDBOX,
    }
)
PENDING = NOT_STARTED - {PodFaultKind.REJECTED}  # Kubernetes retries these


class PodFault(Struct, frozen=True):
    kind: PodFaultKind
    job: str
    """Named by the pod's labels."""
    namespace: str
    pod: str
    uid: str  # of the pod
    node: str
    """Empty if not scheduled."""
    at: datetime
    """UTC, by Kubernetes, stable across server restarts."""
    reason: str = ""
    """``OOMKilled``, ``Evicted``, ``ImagePullBackOff`` …"""
    message: str = ""
    container: str = ""
    is_training: bool = False
    """It concerns the whole pod or the training container."""
    exit_code: int | None = None
    signal: int | None = None
    is_event: bool = False
    """No proof: accounts of the namespace may write events."""

    @property
    def full_name(self) -> str:
        return f"{self.namespace}/{self.pod}"


class NodeNotReady(Struct, frozen=True):
    """Node whose Ready condition is not true."""

    node: str
    since: datetime
    """UTC, by Kubernetes."""
    is_silent: bool
    """The kubelet does not report."""
    reason: str = ""
    message: str = ""


class PodReading(Struct, frozen=True):
    faults: tuple[PodFault, ...] = ()
    not_ready: tuple[NodeNotReady, ...] = ()
    shared_nodes: frozenset[str] = field(default_factory=frozenset)
    """Nodes with several pods of the job."""
    unread: tuple[str, ...] = ()
    """Unread data, as sentences."""
