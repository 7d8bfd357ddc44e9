"""Faults of the pods of jobs. Events are read only for verdicts and pods that do not start, with limited requests a
minute.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, Protocol

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_core import words
from trainmedic_logs.domain.pod_fault import PENDING, NodeNotReady, PodFault, PodFaultKind, PodReading
from trainmedic_server import telemetry
from trainmedic_server.adapters import kubernetes_pod_status as pod_status
from trainmedic_server.adapters.kubernetes_pod_status import PodOutline
from trainmedic_server.engine import loops
from trainmedic_server.errors import ActionFailure
from trainmedic_server.ports.cluster import Object, Resource
from trainmedic_server.ports.job_pods import IsOwn, JobPods
from trainmedic_server.ports.outside import Clock

EVENTS: Final = Resource("v1", "events", "Event")
KEPT_FOR: Final = timedelta(hours=2)  # Age at which faults are forgotten.
MOST_PODS: Final = 20_000
MOST_WITH_FAULTS: Final = 2000  # Pods.
MOST_FAULTS: Final = 8  # Of one pod.
MOST_READ: Final = 8  # Pods of a job whose events are read.
MOST_EVENTS: Final = 200  # For one pod. Kubernetes keeps events for an hour.
MOST_REQUESTS: Final = 60  # Within `_REQUESTS_WITHIN`.
_REQUESTS_WITHIN: Final = timedelta(minutes=1)
_CACHED_FOR: Final = timedelta(seconds=15)
_FAILURE_CACHED_FOR: Final = timedelta(seconds=30)
_ANSWER_SECONDS: Final = 5.0
_EVENTS_FROM: Final = timedelta(minutes=15)  # Older events count as over.
_SLOW_START: Final = timedelta(minutes=2)  # Time after a training pod's assignment; then its events are read.
_SLOW_REREAD_AFTER: Final = timedelta(minutes=1)
_SLOW_PER_LOOK: Final = 4  # Pods.
_SLOW_LOOK_EVERY: Final = timedelta(seconds=10)
_STILL_PENDING: Final = timedelta(minutes=5)  # Older events no longer explain why a pod waits.

log = telemetry.logger(__name__)


class EventLister(Protocol):
    async def list_some(
        self, resource: Resource, namespace: str, fields: str, most: int
    ) -> tuple[Sequence[Object], bool]: ...


class _PodFaults(Struct, frozen=True):
    outline: PodOutline
    faults: tuple[PodFault, ...]


class _EventsRead(Struct, frozen=True):
    at: datetime
    faults: tuple[PodFault, ...] = ()
    unread: str = ""  # Why events are missing; empty if none are.


class KubernetesPods(JobPods):
    def __init__(self, cluster: EventLister, clock: Clock, metrics: telemetry.Metrics) -> None:
        self._cluster = cluster
        self._clock = clock
        self._metrics = metrics
        self._present: dict[str, PodOutline] = {}
        self._faults: dict[str, _PodFaults] = {}
        """By UID, including deleted pods; the most recent entry is last."""
        self._not_ready: dict[str, NodeNotReady] = {}
        self._events: dict[str, _EventsRead] = {}
        self._requests: deque[datetime] = deque()
        self._slow_read: dict[str, datetime] = {}  # Last reading of a waiting pod's events, by UID.
        self._skipped: dict[str, str] = {}  # Job by UID, for pods beyond `MOST_PODS`.
        self._has_logged_full = False
        self.answers = True
        """False while the watch of `KubernetesTopology` fails: statuses may be old."""

    # --- changes, from the watch

    def pods_listed(self, pods: Iterable[Object], job_of: Callable[[Object], str | None]) -> None:
        self._present.clear()
        self._skipped.clear()
        for pod in pods:
            self.pod_changed(pod, job_of(pod))
        for absent in [each for uid, each in self._faults.items() if uid not in self._present]:
            self._merge_faults(absent.outline, (), is_deleted=True)  # deleted while the watch was down

    def pod_changed(self, pod: Object, job: str | None, *, is_deleted: bool = False) -> None:
        try:
            outline = pod_status.outline_of(pod, job)
        except (AttributeError, KeyError, TypeError):
            return  # a form that no release writes
        if outline is None:
            return
        self._skipped.pop(outline.uid, None)
        if is_deleted:
            self._present.pop(outline.uid, None)
            self._slow_read.pop(outline.uid, None)
        elif outline.uid in self._present or len(self._present) < MOST_PODS:
            self._present[outline.uid] = outline
        else:
            self._skipped[outline.uid] = outline.job
            if not self._has_logged_full:
                self._has_logged_full = True
                log.warning("skipping pods: too many have a job's label", most=MOST_PODS)
        self._merge_faults(outline, _read(pod, outline), is_deleted)

    def nodes_listed(self, nodes: Iterable[Object]) -> None:
        self._not_ready.clear()
        for node in nodes:
            self.node_changed(node)

    def node_changed(self, node: Object, *, is_deleted: bool = False) -> None:
        name = node["metadata"]["name"]
        not_ready = None if is_deleted else pod_status.not_ready(node)
        if not_ready is None:
            self._not_ready.pop(name, None)
        else:
            self._not_ready[name] = not_ready

    def _merge_faults(self, outline: PodOutline, faults: Sequence[PodFault], is_deleted: bool) -> None:
        now = self._clock.now()
        before = self._faults.pop(outline.uid, None)
        kept = _merged(before.faults if before else (), faults, outline, is_deleted=is_deleted)
        recent = tuple(fault for fault in kept if now - fault.at < KEPT_FOR)
        if recent:
            self._faults[outline.uid] = _PodFaults(outline, recent[-MOST_FAULTS:])
        while len(self._faults) > MOST_WITH_FAULTS:
            self._faults.pop(next(iter(self._faults)))

    # --- JobPods

    def faults(self) -> Mapping[str, Sequence[PodFault]]:
        oldest = self._clock.now() - KEPT_FOR
        by_job: dict[str, list[PodFault]] = {}
        for uid, of_pod in list(self._faults.items()):
            recent = [fault for fault in of_pod.faults if fault.at >= oldest]
            if not recent:
                del self._faults[uid]
            for fault in recent:
                by_job.setdefault(fault.job, []).append(fault)
        return by_job

    def namespaces_of(self, job: str) -> Collection[str]:
        outlines = (*self._present.values(), *(each.outline for each in self._faults.values()))
        return {outline.namespace for outline in outlines if outline.job == job}

    async def reading(self, job: str, is_own: IsOwn) -> PodReading:
        faulty = [each for each in self._faults.values() if _is_of(each.outline, job, is_own)]
        present = [outline for outline in self._present.values() if _is_of(outline, job, is_own)]
        # Events of pods with recent faults are read first.
        outlines = {each.outline.uid: each.outline for each in reversed(faulty)}
        outlines |= {outline.uid: outline for outline in present if outline.uid not in outlines}
        if not outlines:
            return PodReading(unread=tuple(self._unread(job, [], [], 0)) if self._has_skipped(job) else ())
        chosen = list(outlines.values())[:MOST_READ]
        read = await self._read_together(chosen)
        stated = [fault for each in faulty for fault in each.faults]
        kinds = {(fault.uid, fault.kind) for fault in stated}  # An event adds nothing to a status of its kind.
        added = [fault for each in read for fault in each.faults if (fault.uid, fault.kind) not in kinds]
        nodes = [outline.node for outline in outlines.values() if outline.node]
        return PodReading(
            faults=tuple(sorted([*stated, *added], key=lambda fault: fault.at)),
            not_ready=tuple(self._not_ready[node] for node in sorted(set(nodes)) if node in self._not_ready),
            shared_nodes=frozenset(node for node in nodes if nodes.count(node) > 1),
            unread=tuple(self._unread(job, chosen, read, len(outlines))),
        )

    def _has_skipped(self, job: str) -> bool:
        return job in self._skipped.values()

    def _unread(self, job: str, chosen: Sequence[PodOutline], read: Sequence[_EventsRead], count: int) -> Iterable[str]:
        if not self.answers:
            yield "the newest status of the pods: Kubernetes does not answer"
        if self._has_skipped(job):
            yield f"the status of some pods: those of {MOST_PODS} at most are kept"
        by_reason: dict[str, list[str]] = {}
        for outline, each in zip(chosen, read, strict=True):
            if each.unread:
                by_reason.setdefault(each.unread, []).append(outline.name)
        for reason, names in by_reason.items():
            yield f"the events of {words.some(names, 3, ', ')}: {reason}"
        if count > MOST_READ:
            yield f"the events of {count - MOST_READ} more pods: those of {MOST_READ} at most are read"

    # --- events

    async def _read_together(self, outlines: Sequence[PodOutline]) -> list[_EventsRead]:
        tasks = [asyncio.create_task(self._events_of(outline)) for outline in outlines]
        try:
            await asyncio.wait(tasks, timeout=_ANSWER_SECONDS)
        finally:
            for task in tasks:
                task.cancel()
        late = _EventsRead(self._clock.now(), unread=f"Kubernetes did not answer within {_ANSWER_SECONDS:.0f} s")
        done = [task.done() and not task.cancelled() for task in tasks]
        return [task.result() if is_done else late for task, is_done in zip(tasks, done, strict=True)]

    async def _events_of(self, outline: PodOutline) -> _EventsRead:
        now = self._clock.now()
        cached = self._events.get(outline.uid)
        if cached is not None and now - cached.at < (_FAILURE_CACHED_FOR if cached.unread else _CACHED_FOR):
            return cached
        if not self._take_request(now):
            return _EventsRead(now, unread=f"{MOST_REQUESTS} requests were sent within a minute")
        read = await self._read_events(outline, now)
        self._events[outline.uid] = read
        self._events = {uid: each for uid, each in self._events.items() if now - each.at < _FAILURE_CACHED_FOR}
        return read

    async def _read_events(self, outline: PodOutline, now: datetime) -> _EventsRead:
        fields = f"involvedObject.uid={outline.uid}"
        try:
            events, has_more = await self._cluster.list_some(EVENTS, outline.namespace, fields, MOST_EVENTS)
            faults = pod_status.faults_in_events(events, outline, now - _EVENTS_FROM)
        except ActionFailure as error:
            return _EventsRead(now, unread=" ".join(str(error).split())[:200])
        except (AttributeError, KeyError, TypeError):
            return _EventsRead(now, unread="they have a form that this version does not read")
        return _EventsRead(now, faults, f"there are more than {MOST_EVENTS}" if has_more else "")

    def _take_request(self, now: datetime) -> bool:
        while self._requests and now - self._requests[0] >= _REQUESTS_WITHIN:
            self._requests.popleft()
        if len(self._requests) >= MOST_REQUESTS:
            return False
        self._requests.append(now)
        return True

    # --- pods that do not start

    async def watch(self) -> None:
        await loops.repeat(self.look_at_slow_starts, _SLOW_LOOK_EVERY, "pods", self._metrics)

    async def look_at_slow_starts(self) -> None:
        now = self._clock.now()
        chosen: dict[str, PodOutline] = {}
        for outline in self._present.values():
            is_slow = outline.trains and outline.is_waiting and outline.placed_at is not None
            if is_slow and _SLOW_START <= now - (outline.placed_at or now) < KEPT_FOR:
                chosen.setdefault(outline.job, outline)  # One pod of each job is enough.
        self._slow_read = {uid: at for uid, at in self._slow_read.items() if uid in self._present}
        due = [
            each
            for each in chosen.values()
            if now - self._slow_read.get(each.uid, now - KEPT_FOR) >= _SLOW_REREAD_AFTER
        ]
        for outline in due[:_SLOW_PER_LOOK]:
            self._slow_read[outline.uid] = now
            read = await self._events_of(outline)
            still = [fault for fault in read.faults if fault.kind in PENDING and now - fault.at < _STILL_PENDING]
            # The time of a repeated event changes, and that of a fault must not.
            placed = [replace(fault, at=outline.placed_at or fault.at) for fault in still]
            if outline.uid in self._present:
                self._merge_faults(self._present[outline.uid], placed, is_deleted=False)


def _read(pod: Object, outline: PodOutline) -> Sequence[PodFault]:
    try:
        return pod_status.faults_in(pod, outline)
    except (AttributeError, KeyError, TypeError):
        return ()  # a form that no release writes


def _is_of(outline: PodOutline, job: str, is_own: IsOwn) -> bool:
    return outline.job == job and is_own(outline.namespace, outline.name, outline.node)


def _merged(
    before: Sequence[PodFault], new: Sequence[PodFault], outline: PodOutline, *, is_deleted: bool
) -> list[PodFault]:
    # A problem of starting is over unless the status still has it; one from an event, unless the pod still waits.
    repeated = {(fault.kind, fault.container, fault.at) for fault in new}
    kept = [
        fault
        for fault in before
        if (fault.kind, fault.container, fault.at) not in repeated
        and (fault.kind not in PENDING or (fault.is_event and outline.is_waiting and not is_deleted))
    ]
    pulls = {fault.container: fault for fault in before if fault.kind is PodFaultKind.IMAGE}
    # In older releases the back-off between two pulls has no reason of its own, so keep the pull's reason.
    new = [
        replace(fault, message=pulls[fault.container].message)
        if fault.reason == "ImagePullBackOff" and ": " not in fault.message and fault.container in pulls
        else fault
        for fault in new
        if not (is_deleted and fault.kind in PENDING)
    ]
    return sorted([*kept, *new], key=lambda fault: fault.at)
