"""Faults of pods as Kubernetes states them: in a pod's status, in its events, and in its node's condition.

Values only. ``adapters.kubernetes_pod_status`` reads them from the API's objects. ``trainmedic_logs.diagnosis.pods``
derives their meaning for a job.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from msgspec import Struct, field

LONGEST_MESSAGE = 500
"""Characters of a fault's message."""


class PodFaultKind(StrEnum):
    """Kind of a fault of a pod or one of its containers."""

    OUT_OF_MEMORY = "out_of_memory"
    """A container was killed, and its status has the reason OOMKilled."""
    EXITED = "exited"
    """A container ended with an exit code or by a signal, and its status has no other reason."""
    EVICTED = "evicted"
    """The kubelet ended the pod, because the node or the pod's own limit had no more of a resource."""
    PREEMPTED = "preempted"
    """The pod was ended to make room for another pod."""
    API_EVICTED = "api_evicted"
    """The Eviction API evicted the pod, for example for a drain."""
    DEADLINE = "deadline"
    """The pod exceeded its deadline."""
    NODE_SHUTDOWN = "node_shutdown"
    """The kubelet ended the pod because the node shuts down."""
    NODE_LOST = "node_lost"
    """The node is unresponsive or gone, so the pod was abandoned."""
    TAINTED = "tainted"
    """The pod was deleted because its node has a taint with the effect NoExecute."""
    REJECTED = "rejected"
    """The kubelet did not admit the pod."""
    IMAGE = "image"
    """An image cannot be pulled."""
    NOT_CREATED = "not_created"
    """A container cannot be created or started."""
    NOT_MOUNTED = "not_mounted"
    """A volume cannot be attached or mounted."""
    NO_SANDBOX = "no_sandbox"
    """The node cannot set up the pod's sandbox, for example its network."""
    NODE_NOT_READY = "node_not_ready"
    """An event of the pod states that its node is not ready."""
    PROBE_FAILED = "probe_failed"
    """The kubelet restarted a container because a probe failed."""


NOT_STARTED = frozenset(
    {
        PodFaultKind.REJECTED,
        PodFaultKind.IMAGE,
        PodFaultKind.NOT_CREATED,
        PodFaultKind.NOT_MOUNTED,
        PodFaultKind.NO_SANDBOX,
    }
)
"""Faults that keep a pod from starting."""
PENDING = NOT_STARTED - {PodFaultKind.REJECTED}
"""Faults that Kubernetes retries, so that they can pass by themselves."""


class PodFault(Struct, frozen=True):
    """One fault of one pod."""

    kind: PodFaultKind
    job: str
    """The job that the pod's labels name."""
    namespace: str
    pod: str
    uid: str
    node: str
    """Empty if the pod had no node yet."""
    at: datetime
    """Aware UTC, by Kubernetes. It is the same after a restart of the server. For a pod that does not start: when it
    got its node, or when its container last ended."""
    reason: str = ""
    """As Kubernetes writes it: ``OOMKilled``, ``Evicted``, ``ImagePullBackOff``."""
    message: str = ""
    container: str = ""
    is_training: bool = False
    """True if the fault ends the training: it is of the whole pod, or of the container that trains."""
    exit_code: int | None = None
    signal: int | None = None
    is_event: bool = False
    """True if an event states it. That is no proof, because accounts of the pod's namespace may be able to write
    events."""

    @property
    def full_name(self) -> str:
        """The pod as ``namespace/name``."""
        return f"{self.namespace}/{self.pod}"


class NodeNotReady(Struct, frozen=True):
    """A node whose condition Ready is not true, as its status states it."""

    node: str
    since: datetime
    """Aware UTC, by Kubernetes."""
    is_silent: bool
    """True if the condition is unknown because the kubelet has stopped reporting. False if the kubelet itself reports
    it."""
    reason: str = ""
    message: str = ""


class PodReading(Struct, frozen=True):
    """The known faults of one job's pods."""

    faults: tuple[PodFault, ...] = ()
    """Earliest first."""
    not_ready: tuple[NodeNotReady, ...] = ()
    shared_nodes: frozenset[str] = field(default_factory=frozenset)
    """Nodes with several pods of the job. There the node does not identify a pod's ranks."""
    unread: tuple[str, ...] = ()
    """Unread data, in sentences for people."""
