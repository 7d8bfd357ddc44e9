"""Failure signs and attributions from Kubernetes' statements about a job's pods.

A pod's status, written by the kubelet and controllers, is proof. Events, which accounts of the namespace can write,
prove nothing.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime, timedelta

from msgspec.structs import replace

from trainmedic_logs.diagnosis import exits
from trainmedic_logs.diagnosis.attribution import Attribution, EvidenceSource, Moment
from trainmedic_logs.diagnosis.exits import Exit
from trainmedic_logs.diagnosis.facts import Facts, Sign
from trainmedic_logs.diagnosis.verdict import Confidence, Evidence
from trainmedic_logs.domain.finding import CauseClass
from trainmedic_logs.domain.pod_fault import NOT_STARTED, PENDING, NodeNotReady, PodFault, PodFaultKind, PodReading
from trainmedic_logs.lines import message_causes

SOURCE = "kubernetes"
# Time in which Kubernetes' retries may still succeed after a failed start.
_START_RETRIED_FOR = timedelta(minutes=1)
# Largest age of a related fault at the first sign.
_FAULT_BEFORE = timedelta(minutes=10)
# The same for an unready node: the ranks that wait for it time out late.
_NODE_FAULT_BEFORE = timedelta(hours=1)
_CLOCK_ERROR_S = 2.0  # of Kubernetes' times
_MOST_EVIDENCE = 4
_ASKED_TO_END = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}

_RESOURCES = (
    (re.compile(r"low on resource: (?:memory)\b|MemoryPressure"), CauseClass.HOST_MEMORY, "memory"),
    (
        re.compile(r"(?i)ephemeral[- ](?:local )?storage"),
        CauseClass.STORAGE,
        "ephemeral storage (the node's local disk)",
    ),
    (re.compile(r"EmptyDir volume"), CauseClass.STORAGE, "the size limit of an emptyDir volume"),
    (re.compile(r"\binodes"), CauseClass.STORAGE, "inodes of the node's local disk"),
    (re.compile(r"DiskPressure|nodefs|imagefs"), CauseClass.STORAGE, "the node's local disk"),
    (re.compile(r"low on resource: pids\b|PIDPressure"), CauseClass.NODE, "process IDs of the node"),
)
_NO_SUCH_IMAGE = re.compile(
    r"(?i)not found|manifest unknown|does not exist|denied|unauthorized|authorization failed|authentication required"
    r"|invalid reference format|couldn't parse image|no match for platform|no matching manifest"
)
_SPECIFICATION = re.compile(
    r"(?i)(?:secrets?|configmaps?) ?\S* not found|couldn't find key|runAsNonRoot|executable file not found"
    r"|exec:.{0,100}(?:no such file or directory|permission denied)"
)
_QUOTED = re.compile(r'"[^"]*"')
_REGISTRY_OR_NETWORK = re.compile(
    r"(?i)timeout|timed out|toomanyrequests|too many requests|\b429\b|refused|reset by peer|no such host|\b50[0234]\b"
    r"|deadline exceeded|unexpected EOF|TLS handshake|x509|temporar"
)
_GPU_SETUP = re.compile(r"(?i)nvidia-container-cli|nvml|driver|failed to (?:inject|allocate)|device plugin|cdi\b")
_ALWAYS_SPECIFICATION = frozenset({"InvalidImageName", "ErrImageNeverPull"})


def signs(faults: Iterable[PodFault], now: datetime) -> list[Sign]:
    """Return signs that later steps disprove: a job can survive losing a pod."""
    return [Sign(fault.at, None, is_wait=True) for fault in faults if _is_sign(fault, now)]


def _is_sign(fault: PodFault, now: datetime) -> bool:
    if not fault.is_training:
        return False
    if fault.kind in PENDING:  # Kubernetes may still succeed
        return now - fault.at >= _START_RETRIED_FOR
    if fault.kind is PodFaultKind.EXITED:
        return _exit_of(fault).signal not in _ASKED_TO_END
    return not fault.is_event


def of_failure(reading: PodReading, began_at: datetime, taken_in: timedelta, after: datetime | None) -> PodReading:
    """Return only faults that can belong to the failure.

    `began_at`: its first sign. `taken_in`: how long faults count after that. `after`: end of the previous
    failure, if any.
    """
    first = began_at - _FAULT_BEFORE if after is None else max(began_at - _FAULT_BEFORE, after)
    faults = tuple(fault for fault in reading.faults if first <= fault.at <= began_at + taken_in)
    earliest = began_at - _NODE_FAULT_BEFORE
    not_ready = tuple(each for each in reading.not_ready if earliest <= each.since <= began_at + taken_in)
    return replace(reading, faults=faults, not_ready=not_ready)


def own_pod_test(
    namespace: str | None, is_known: bool, places: Collection[str], namespaces: Collection[str]
) -> Callable[[str, str, str], bool]:
    """Return a predicate (namespace, name, node): whether a pod with the job's label, which any account can set, is the
    job's.

    A connected job states its namespace. For a known job without one, only pods at known `places` (node or pod names)
    count. Otherwise the pods' `namespaces` must be one.
    """
    if namespace is not None:
        return lambda of_pod, _, __: of_pod == namespace
    if is_known:
        return lambda _, name, node: name in places or node in places
    is_one = len(set(namespaces)) == 1
    return lambda _, __, ___: is_one


def ends(facts: Facts) -> Sequence[Exit]:
    """Return containers' ends, none if logs or other faults say more."""
    reading = facts.pods
    if facts.exits or any(_explains_failure(fault) for fault in reading.faults):
        return ()
    ended = [fault for fault in reading.faults if fault.kind is PodFaultKind.EXITED and fault.is_training]
    return [replace(_exit_of(fault), rank=_only_rank_of(fault, facts)) for fault in ended]


def attributions(facts: Facts) -> Iterator[Attribution]:
    alike: dict[tuple[PodFaultKind, CauseClass, bool], list[PodFault]] = {}
    for fault in facts.pods.faults:
        if fault.kind is not PodFaultKind.EXITED and (fault.is_training or fault.kind is PodFaultKind.OUT_OF_MEMORY):
            cause, _ = _meaning(fault)
            alike.setdefault((fault.kind, cause, fault.is_event), []).append(fault)
    for (kind, cause, _), faults in alike.items():
        yield _attribution(kind, cause, faults, facts)
    for not_ready in facts.pods.not_ready:
        yield _node_attribution(not_ready, facts)


def _attribution(kind: PodFaultKind, cause: CauseClass, faults: Sequence[PodFault], facts: Facts) -> Attribution:
    first = faults[0]
    confidence = min((_confidence_of(fault) for fault in faults), key=list(Confidence).index)  # the highest
    nodes = {fault.node for fault in faults}
    return Attribution(
        EvidenceSource.KERNEL if not first.is_event else EvidenceSource.EXIT,
        cause,
        confidence,
        tuple(_evidence(fault) for fault in faults[:_MOST_EVIDENCE]),
        frozenset().union(*(_ranks_of(fault, facts) for fault in faults)),
        nodes.pop() if len(nodes) == 1 else "",
        moment=Moment(first.at, _CLOCK_ERROR_S, SOURCE),
        is_trusted=not first.is_event,
        is_proven=not first.is_event and confidence is Confidence.HIGH,
        names_node=kind is PodFaultKind.NODE_LOST and first.reason == "NodeLost" and not first.is_event,
        has_started=kind not in NOT_STARTED,
        fingerprint=f"{cause}:pod:{kind}",
    )


def _confidence_of(fault: PodFault) -> Confidence:
    if not fault.is_training:
        return Confidence.LOW
    cause, is_stated = _meaning(fault)
    if cause is CauseClass.UNKNOWN:
        return Confidence.LOW
    return Confidence.HIGH if is_stated and not fault.is_event else Confidence.MEDIUM


def _meaning(fault: PodFault) -> tuple[CauseClass, bool]:
    """Return the cause, and whether Kubernetes states it."""
    match fault.kind:
        case PodFaultKind.OUT_OF_MEMORY:
            return CauseClass.HOST_MEMORY, True
        case PodFaultKind.EVICTED:
            cause = next((cause for words, cause, _ in _RESOURCES if words.search(fault.message)), None)
            return (CauseClass.NODE, False) if cause is None else (cause, True)
        case PodFaultKind.PREEMPTED | PodFaultKind.API_EVICTED | PodFaultKind.DEADLINE:
            return CauseClass.PREEMPTION, True
        case PodFaultKind.NODE_LOST | PodFaultKind.NODE_SHUTDOWN:
            return CauseClass.NODE, fault.reason != "DeletionByPodGC"  # the node may be removed on purpose
        case PodFaultKind.TAINTED | PodFaultKind.REJECTED | PodFaultKind.NO_SANDBOX | PodFaultKind.NODE_NOT_READY:
            return CauseClass.NODE, False
        case PodFaultKind.NOT_MOUNTED:
            is_specified = _SPECIFICATION.search(_QUOTED.sub("", fault.message))
            return (CauseClass.CODE if is_specified else CauseClass.STORAGE), False
        case PodFaultKind.IMAGE | PodFaultKind.NOT_CREATED:
            return _meaning_of_failed_start(fault)
    return CauseClass.UNKNOWN, False


def _meaning_of_failed_start(fault: PodFault) -> tuple[CauseClass, bool]:
    text = _QUOTED.sub("", fault.message)  # names of images and files may contain any words
    is_image = fault.kind is PodFaultKind.IMAGE
    if fault.reason in _ALWAYS_SPECIFICATION:
        return CauseClass.CODE, True
    if "no space left on device" in text:
        return CauseClass.STORAGE, True
    if not is_image and _GPU_SETUP.search(text):
        return CauseClass.NODE, False
    if _REGISTRY_OR_NETWORK.search(text):
        return CauseClass.NETWORK, False
    if (_NO_SUCH_IMAGE if is_image else _SPECIFICATION).search(text):
        return CauseClass.CODE, True
    return message_causes.cause_of("", text) or CauseClass.UNKNOWN, False


def _explains_failure(fault: PodFault) -> bool:
    return fault.is_training and fault.kind not in (PodFaultKind.EXITED, PodFaultKind.PROBE_FAILED)


def _ranks_of(fault: PodFault, facts: Facts) -> frozenset[int]:
    # A rank that does not know its node reports its pod's name.
    in_pod = facts.ranks_on(fault.pod)
    if in_pod or fault.node in facts.pods.shared_nodes:
        return frozenset(in_pod)
    return frozenset(facts.ranks_on(fault.node))


def _only_rank_of(fault: PodFault, facts: Facts) -> int | None:
    ranks = _ranks_of(fault, facts)
    return next(iter(ranks)) if len(ranks) == 1 else None


def _exit_of(fault: PodFault) -> Exit:
    code, by_signal = exits.of_code(fault.exit_code) if fault.exit_code is not None else (None, None)
    by_signal = fault.signal or by_signal
    name = f"container {fault.container} of pod {fault.full_name}"
    return Exit(
        SOURCE,
        code=None if by_signal else code,
        signal=by_signal,
        node=fault.node,
        is_node_sure=bool(fault.node),
        at=fault.at,
        said=f"{name} says: {fault.message}" if fault.message else f"Kubernetes states no reason for {name}",
        line=f"{name}: {fault.reason} exit code {fault.exit_code}",
    )


def _evidence(fault: PodFault) -> Evidence:
    return Evidence(_why(fault), fault.message, SOURCE, fault.node, at=fault.at, rule=fault.reason)


def _why(fault: PodFault) -> str:
    pod, words = f"pod {fault.full_name}", f": {fault.message}" if fault.message else ""
    stated = "an event says that " if fault.is_event else ""
    match fault.kind:
        case PodFaultKind.OUT_OF_MEMORY:
            code = f", exit code {fault.exit_code}" if fault.exit_code is not None else ""
            return f"container {fault.container} of {pod} was killed, out of memory ({fault.reason}{code})"
        case PodFaultKind.EVICTED:
            resource = next((name for pattern, _, name in _RESOURCES if pattern.search(fault.message)), "")
            preposition = "over" if "limit" in resource else "out of"
            lack = f", {preposition} {resource}" if resource else ""
            return f"{stated}the kubelet evicted {pod}{lack}{words}"
        case PodFaultKind.PREEMPTED:
            return f"{stated}{pod} was preempted for another pod{words}"
        case PodFaultKind.API_EVICTED:
            return f"{pod} was evicted by a request, such as a drain{words}"
        case PodFaultKind.DEADLINE:
            return f"{pod} ran for longer than its deadline allows{words}"
        case PodFaultKind.NODE_SHUTDOWN:
            return f"{stated}{pod} was ended because its node shuts down{words}"
        case PodFaultKind.NODE_LOST:
            return f"{pod} was abandoned, because its node is lost{words}"
        case PodFaultKind.TAINTED:
            return f"{stated}{pod} was deleted because of a taint of its node, such as not-ready{words}"
        case PodFaultKind.NODE_NOT_READY:
            return f"{stated}the node of {pod} is not ready{words}"
        case PodFaultKind.REJECTED:
            return f"the node did not admit {pod} ({fault.reason}){words}"
        case PodFaultKind.IMAGE:
            check = (
                "; check the image's name, its tag and the pull secret" if _meaning(fault)[0] is CauseClass.CODE else ""
            )
            return f"{stated}an image of {pod} cannot be pulled ({fault.reason}{check}){words}"
        case PodFaultKind.NOT_CREATED:
            check = "; check the job's specification" if _meaning(fault)[0] is CauseClass.CODE else ""
            return f"a container of {pod} cannot be created ({fault.reason}{check}){words}"
        case PodFaultKind.NOT_MOUNTED:
            return (
                f"{stated}a volume of {pod} cannot be mounted ({fault.reason}; check the volume and its claim){words}"
            )
        case PodFaultKind.NO_SANDBOX:
            return f"{stated}the node cannot set up {pod} (for example its network){words}"
    return f"{stated}the kubelet restarts a container of {pod}, because its probe failed{words}"


def _node_attribution(not_ready: NodeNotReady, facts: Facts) -> Attribution:
    # A silent kubelet means a lost machine.
    what = "has stopped reporting to Kubernetes" if not_ready.is_silent else "is not ready, as its kubelet reports"
    words = f" ({not_ready.reason}: {not_ready.message})" if not_ready.reason else ""
    why = f"node {not_ready.node} {what}{words}"
    is_the_jobs = not facts.nodes or not_ready.node in facts.nodes
    likely = Confidence.MEDIUM if is_the_jobs else Confidence.LOW
    return Attribution(
        EvidenceSource.NODE,
        CauseClass.NODE,
        Confidence.HIGH if not_ready.is_silent and is_the_jobs else likely,
        (Evidence(why, source=SOURCE, node=not_ready.node, at=not_ready.since),),
        frozenset(facts.ranks_on(not_ready.node)),
        not_ready.node,
        moment=Moment(not_ready.since, 60.0),  # Kubernetes notices a silent kubelet late
        is_trusted=True,
        names_node=not_ready.is_silent and is_the_jobs,
        fingerprint="node:not-ready",
    )
