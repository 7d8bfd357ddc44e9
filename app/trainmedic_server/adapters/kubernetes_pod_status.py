"""Faults of pods from the Kubernetes API's documents. Pure. Unknown reasons and malformed members are skipped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from msgspec import Struct

from trainmedic_logs.domain.pod_fault import LONGEST_MESSAGE, NodeNotReady, PodFault, PodFaultKind
from trainmedic_logs.lines.masks import masked
from trainmedic_server.ports.cluster import OF_RUN, Object

# Labels of training operators: a pod with one trains, also without an accelerator.
_OPERATOR_LABELS: Final = (
    "training.kubeflow.org/job-name",
    "jobset.sigs.k8s.io/jobset-name",
    "trainer.kubeflow.org/trainjob-name",
)
# Resources in a container's limits, such as nvidia.com/gpu.
_ACCELERATOR: Final = re.compile(r"[\w.-]+/\S*(?:gpu|gaudi|tpu|ascend|neuron|mlu|npu|mig-)", re.IGNORECASE)
# Names that training operators give to the container that trains.
_OPERATORS_CONTAINERS: Final = frozenset(
    {"pytorch", "tensorflow", "mpi", "jax", "xgboost", "paddle", "node", "trainer"}
)
_MOST_FAULTS: Final = 8  # Newest faults of a pod.
# Reasons of containers that wait or have ended.
_IMAGE_REASONS: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
     "RegistryUnavailable", "SignatureValidationFailed"}
)  # fmt: skip
_CREATION_REASONS: Final = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CreatePodSandboxError",
     "ContainerCannotRun", "StartError", "PostStartHookError", "PreCreateHookError", "PreStartHookError"}
)  # fmt: skip
_STARTING_REASONS: Final = frozenset({"ContainerCreating", "PodInitializing"})
# Reasons of a failed pod that its kubelet did not accept. Others begin with OutOf.
_REJECTION_REASONS: Final = frozenset(
    {"UnexpectedAdmissionError", "NodeAffinity", "MatchNodeSelector", "NodePorts", "TopologyAffinityError",
     "NodeSelectorMismatching", "InvalidNodeInfo", "AppArmor", "SysctlForbidden"}
)  # fmt: skip
_BY_POD_REASON: Final[Mapping[str, PodFaultKind]] = {  # by the `reason` of the pod's status
    "Evicted": PodFaultKind.EVICTED,
    "Preempting": PodFaultKind.PREEMPTED,
    "Preempted": PodFaultKind.PREEMPTED,
    "NodeLost": PodFaultKind.NODE_LOST,
    "NodeShutdown": PodFaultKind.NODE_SHUTDOWN,
    "Shutdown": PodFaultKind.NODE_SHUTDOWN,
    "DeadlineExceeded": PodFaultKind.DEADLINE,
}
_BY_DISRUPTION: Final[Mapping[str, PodFaultKind]] = {  # by the reason of the condition DisruptionTarget
    "PreemptionByScheduler": PodFaultKind.PREEMPTED,
    "PreemptionByKubeScheduler": PodFaultKind.PREEMPTED,
    "DeletionByTaintManager": PodFaultKind.TAINTED,
    "EvictionByEvictionAPI": PodFaultKind.API_EVICTED,
    "DeletionByPodGC": PodFaultKind.NODE_LOST,
}
_BY_EVENT: Final[Mapping[str, PodFaultKind]] = {  # by the event's reason
    "FailedMount": PodFaultKind.NOT_MOUNTED,
    "FailedAttachVolume": PodFaultKind.NOT_MOUNTED,
    "FailedMapVolume": PodFaultKind.NOT_MOUNTED,
    "FailedCreatePodSandBox": PodFaultKind.NO_SANDBOX,
    "NodeNotReady": PodFaultKind.NODE_NOT_READY,
    "Evicted": PodFaultKind.EVICTED,
    "Preempted": PodFaultKind.PREEMPTED,
    "Preempting": PodFaultKind.PREEMPTED,
    "TaintManagerEviction": PodFaultKind.TAINTED,
    "NodeShutdown": PodFaultKind.NODE_SHUTDOWN,
}
_SHUTDOWN_MESSAGE: Final = re.compile(r"node shutdown|[Nn]ode is shutting down")
# A cancelled eviction has the reason TaintManagerEviction, too.
_CANCELLED_DELETION_MESSAGE: Final = re.compile(r"[Cc]ancell?ing deletion")
_PULL_MESSAGE: Final = re.compile(r"(?:[Ff]ailed to pull image|pulling image|ErrImagePull|ErrImageNeverPull)")
_PROBE_MESSAGE: Final = re.compile(r"failed (?:liveness|startup) probe")


class PodOutline(Struct, frozen=True):
    uid: str
    namespace: str
    name: str
    node: str
    job: str
    trains: bool  # It has an accelerator, or a training operator made it.
    placed_at: datetime | None  # Assignment to its node, else its creation.
    is_waiting: bool
    """It has a node, and its containers are being created, without an error in its status."""


def outline_of(pod: Object, job: str | None) -> PodOutline | None:
    """Return None without a job, or if the server made the pod's Job."""
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    if job is None or OF_RUN in (metadata.get("annotations") or {}):  # a node's health check, not training
        return None
    labels = metadata.get("labels") or {}
    trains = any(labels.get(name) for name in _OPERATOR_LABELS) or bool(_with_accelerator(spec))
    status = pod.get("status") or {}
    waiting = [(state.get("waiting") or {}).get("reason") for _, state in _states(status)]
    is_waiting = (
        status.get("phase") == "Pending" and bool(waiting) and all(reason in _STARTING_REASONS for reason in waiting)
    )
    return PodOutline(
        uid=metadata["uid"],
        namespace=metadata["namespace"],
        name=metadata["name"],
        node=str(spec.get("nodeName") or ""),
        job=job,
        trains=trains,
        placed_at=_placed_at(pod),
        is_waiting=is_waiting,
    )


def faults_in(pod: Object, outline: PodOutline) -> tuple[PodFault, ...]:
    status = pod.get("status") or {}
    faults = [*_pod_faults(status, outline), *_container_faults(pod, status, outline)]
    return tuple(sorted(faults, key=lambda fault: fault.at)[-_MOST_FAULTS:])


def faults_in_events(events: Iterable[Object], outline: PodOutline, since: datetime) -> tuple[PodFault, ...]:
    newest: dict[tuple[PodFaultKind, str], PodFault] = {}
    for event in events:
        fault = _event_fault(event, outline)
        if fault is not None and fault.at >= since:
            key = (fault.kind, fault.container)
            if key not in newest or newest[key].at < fault.at:
                newest[key] = fault
    return tuple(sorted(newest.values(), key=lambda fault: fault.at)[-_MOST_FAULTS:])


def not_ready(node: Object) -> NodeNotReady | None:
    for condition in _mappings((node.get("status") or {}).get("conditions")):
        if condition.get("type") != "Ready" or condition.get("status") == "True":
            continue
        since = _time(condition.get("lastTransitionTime"))
        if since is not None:
            silent = condition.get("status") == "Unknown"  # set by Kubernetes if the kubelet does not report
            reason, message = _text(condition.get("reason")), _message(condition.get("message"))
            return NodeNotReady(node["metadata"]["name"], since, silent, reason, message)
    return None


# --- a pod's own status ---------------------------------------------------------------------------


def _pod_faults(status: Mapping[str, Any], outline: PodOutline) -> Iterator[PodFault]:
    reason, message = _text(status.get("reason")), _message(status.get("message"))
    disruption = _condition(status, "DisruptionTarget", "True")
    at = _time(disruption.get("lastTransitionTime")) or _ended_at(status) or outline.placed_at
    kind = _kind_of_pod(status, reason, message)
    if kind is None and disruption:
        reason, message = _text(disruption.get("reason")), _message(disruption.get("message"))
        kind = _BY_DISRUPTION.get(reason) or _kind_of_kubelet(reason, message)
    if kind is not None and at is not None:
        yield _fault(kind, outline, at, reason, message, is_training=True)


def _kind_of_pod(status: Mapping[str, Any], reason: str, message: str) -> PodFaultKind | None:
    if reason == "Terminated" and _SHUTDOWN_MESSAGE.search(message):
        return PodFaultKind.NODE_SHUTDOWN
    if status.get("phase") == "Failed" and (reason in _REJECTION_REASONS or reason.startswith("OutOf")):
        return PodFaultKind.REJECTED
    return _BY_POD_REASON.get(reason)


def _kind_of_kubelet(reason: str, message: str) -> PodFaultKind | None:
    """Classify by message: a kubelet gives all terminations one reason."""
    if reason != "TerminationByKubelet":
        return None
    if _SHUTDOWN_MESSAGE.search(message):
        return PodFaultKind.NODE_SHUTDOWN
    return PodFaultKind.PREEMPTED if "preempt" in message.lower() else PodFaultKind.EVICTED


def _container_faults(pod: Object, status: Mapping[str, Any], outline: PodOutline) -> Iterator[PodFault]:
    training = _training_containers(pod.get("spec") or {})
    stopped_at = _deletion_requested_at(pod["metadata"])
    unready = _condition(status, "ContainersReady", "False")
    unready_at = _time(unready.get("lastTransitionTime"))
    for container in _mappings(status.get("containerStatuses")):
        name = _text(container.get("name"))
        states = [state for which in ("lastState", "state") if isinstance(state := container.get(which), Mapping)]
        for state in states:
            terminated = state.get("terminated")
            if isinstance(terminated, Mapping):
                yield from _faults_of_ended(terminated, outline, name, name in training, stopped_at)
        yield from _faults_of_waiting(container, outline, name, unready_at)
    # An init container does not train: only what keeps it from starting is a fault.
    for container in _mappings(status.get("initContainerStatuses")):
        yield from _faults_of_waiting(container, outline, _text(container.get("name")), unready_at)


def _faults_of_ended(
    ended: Mapping[str, Any], outline: PodOutline, name: str, is_training: bool, stopped_at: datetime | None
) -> Iterator[PodFault]:
    at, reason, message = _time(ended.get("finishedAt")), _text(ended.get("reason")), _message(ended.get("message"))
    code, signal = ended.get("exitCode"), ended.get("signal")
    code = code if isinstance(code, int) else None
    signal = signal if isinstance(signal, int) and 0 < signal <= 64 else None
    if at is None or (code == 0 and signal is None and reason != "OOMKilled"):
        return  # Its end has no time, or was regular.
    was_stopped = stopped_at is not None and at >= stopped_at
    if reason == "OOMKilled":
        kind = PodFaultKind.OUT_OF_MEMORY
    elif reason in _CREATION_REASONS:
        kind, is_training = PodFaultKind.NOT_CREATED, True  # Counts for the whole pod.
    elif was_stopped or reason == "ContainerStatusUnknown":
        return  # Deleting the pod ended it, or its end was not observed.
    else:
        kind = PodFaultKind.EXITED
    yield _fault(
        kind, outline, at, reason, message, container=name, is_training=is_training, exit_code=code, signal=signal
    )


def _faults_of_waiting(
    container: Mapping[str, Any], outline: PodOutline, name: str, unready_at: datetime | None
) -> Iterator[PodFault]:
    state = container.get("state")
    waiting = state.get("waiting") if isinstance(state, Mapping) else None
    if not isinstance(waiting, Mapping):
        return
    reason, message = _text(waiting.get("reason")), _message(waiting.get("message"))
    last = container.get("lastState")
    before = last.get("terminated") if isinstance(last, Mapping) else None
    # It waits since its last end, or since the pod got its node. An end that was not observed has no time.
    at = outline.placed_at
    if isinstance(before, Mapping):
        at = _time(before.get("finishedAt")) or unready_at or at
    kind = None
    if reason in _IMAGE_REASONS:
        kind = PodFaultKind.IMAGE
    elif reason in _CREATION_REASONS:
        kind = PodFaultKind.NOT_CREATED
    if kind is not None and at is not None:
        yield _fault(kind, outline, at, reason, message, container=name, is_training=True)


def _training_containers(spec: Mapping[str, Any]) -> frozenset[str]:
    """Return the containers with an accelerator, else the only one, else those with an operator's name."""
    names = frozenset(_text(each.get("name")) for each in _mappings(spec.get("containers")))
    return _with_accelerator(spec) or (names if len(names) == 1 else names & _OPERATORS_CONTAINERS)


def _with_accelerator(spec: Mapping[str, Any]) -> frozenset[str]:
    names = set()
    for container in _mappings(spec.get("containers")):
        resources = container.get("resources")
        limits = resources.get("limits") if isinstance(resources, Mapping) else None
        if isinstance(limits, Mapping) and any(_ACCELERATOR.match(str(name)) for name in limits):
            names.add(_text(container.get("name")))
    return frozenset(names)


def _deletion_requested_at(metadata: Mapping[str, Any]) -> datetime | None:
    """Return when the deletion was requested: the API has the end of its grace period."""
    over = _time(metadata.get("deletionTimestamp"))
    grace = metadata.get("deletionGracePeriodSeconds")
    seconds = grace if isinstance(grace, int) and 0 <= grace < 1_000_000 else 0
    return None if over is None else over - timedelta(seconds=seconds)


def _placed_at(pod: Object) -> datetime | None:
    status = pod.get("status") or {}
    placed = _condition(status, "PodScheduled", "True")
    return (
        _time(placed.get("lastTransitionTime"))
        or _time(status.get("startTime"))
        or _time(pod["metadata"].get("creationTimestamp"))
    )


def _ended_at(status: Mapping[str, Any]) -> datetime | None:
    """Return the last end of a container, else the last change of a condition."""
    ended = [_time((state.get("terminated") or {}).get("finishedAt")) for _, state in _states(status)]
    changed = [_time(each.get("lastTransitionTime")) for each in _mappings(status.get("conditions"))]
    return max((at for at in ended if at is not None), default=None) or max(filter(None, changed), default=None)


def _states(status: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for each in _mappings(status.get("containerStatuses")):
        state = each.get("state")
        yield _text(each.get("name")), state if isinstance(state, Mapping) else {}


def _condition(status: Mapping[str, Any], kind: str, value: str) -> Mapping[str, Any]:
    wanted = (kind, value)
    listed = _mappings(status.get("conditions"))
    return next((each for each in listed if (each.get("type"), each.get("status")) == wanted), {})


# --- events ---------------------------------------------------------------------------------------


def _event_fault(event: Object, outline: PodOutline) -> PodFault | None:
    reason, message = _text(event.get("reason")), _message(event.get("message"))
    series = event.get("series")
    last = series.get("lastObservedTime") if isinstance(series, Mapping) else None
    times = (last, event.get("lastTimestamp"), event.get("eventTime"), event.get("firstTimestamp"))
    at = next((at for written in times if (at := _time(written)) is not None), None)
    kind = _BY_EVENT.get(reason)
    if kind is PodFaultKind.TAINTED and _CANCELLED_DELETION_MESSAGE.search(message):
        return None
    if (
        kind is None
        and reason in ("Failed", "BackOff", "InspectFailed", "ErrImageNeverPull")
        and _PULL_MESSAGE.search(message)
    ):
        kind = PodFaultKind.IMAGE
    elif kind is None and reason in ("Killing", "Unhealthy") and _PROBE_MESSAGE.search(message):
        kind = PodFaultKind.PROBE_FAILED
    if kind is None or at is None:
        return None
    return _fault(kind, outline, at, reason, message, is_training=True, is_event=True)


# --- values ---------------------------------------------------------------------------------------


def _fault(
    kind: PodFaultKind,
    outline: PodOutline,
    at: datetime,
    reason: str,
    message: str,
    container: str = "",
    *,
    is_training: bool,
    exit_code: int | None = None,
    signal: int | None = None,
    is_event: bool = False,
) -> PodFault:
    return PodFault(
        kind=kind,
        job=outline.job,
        namespace=outline.namespace,
        pod=outline.name,
        uid=outline.uid,
        node=outline.node,
        at=at,
        reason=reason,
        message=message,
        container=container,
        is_training=is_training and outline.trains,  # A job may also have pods that do not train.
        exit_code=exit_code,
        signal=signal,
        is_event=is_event,
    )


def _message(value: Any) -> str:
    return masked(" ".join(value[: 2 * LONGEST_MESSAGE].split()))[:LONGEST_MESSAGE] if isinstance(value, str) else ""


def _text(value: Any) -> str:
    return value[:253] if isinstance(value, str) else ""  # Longest name in Kubernetes.


def _mappings(value: Any) -> Sequence[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _time(value: Any) -> datetime | None:
    if not isinstance(value, str):
        return None
    try:
        at = datetime.fromisoformat(value)
    except ValueError:
        return None
    return at.astimezone(UTC) if at.tzinfo is not None else None
