"""Verdicts by what Kubernetes states of a job's pods, from the objects of its API to the alert."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from tests.support import pods
from tests.support.clocks import START
from tests.support.pods import disrupted, ended, event, pod, waiting, written
from tests.unit.diagnosis.test_job_diagnoses import World
from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.diagnosis.pods import own_pod_test
from trainmedic_logs.domain.finding import CauseClass, Origin, Role
from trainmedic_logs.domain.known_verdict import KnownVerdict
from trainmedic_server.adapters import kubernetes_pods
from trainmedic_server.adapters.kubernetes_pods import KubernetesPods
from trainmedic_server.adapters.kubernetes_topology import job_of
from trainmedic_server.domain.job_life import JobLife, LifeState
from trainmedic_server.engine.job_diagnoses import JobDiagnoses
from trainmedic_server.errors import ClusterRefused, ClusterUnavailable
from trainmedic_server.ports.cluster import Object, Resource
from trainmedic_server.ports.outside import Presence
from trainmedic_server.telemetry import Metrics

AT = START + timedelta(seconds=30)


class Events:
    """The events that the API server has, by the pod's uid."""

    def __init__(self) -> None:
        self.by_uid: dict[str, list[Object]] = {}
        self.asked: list[str] = []
        self.error: Exception | None = None
        self.has_more = False

    async def list_some(
        self, resource: Resource, namespace: str, fields: str, most: int
    ) -> tuple[Sequence[Object], bool]:
        uid = fields.removeprefix("involvedObject.uid=")
        self.asked.append(uid)
        if self.error is not None:
            raise self.error
        return self.by_uid.get(uid, [])[:most], self.has_more


class Cluster(World):
    """A server that watches pods."""

    def __init__(self) -> None:
        super().__init__()
        self.clock.sleep((AT - START).total_seconds())
        self.events = Events()
        self.pods = KubernetesPods(self.events, self.clock, Metrics())
        every = timedelta(minutes=1)
        self.diagnoses = JobDiagnoses(self.store, self, self, self.clock, Metrics(), every, pods=self.pods)  # type: ignore[arg-type]

    def change(self, changed: Object, *, is_deleted: bool = False) -> None:
        self.pods.pod_changed(changed, job_of(changed), is_deleted=is_deleted)

    def happened(self, changed: Object, *events: Object) -> None:
        self.events.by_uid[changed["metadata"]["uid"]] = list(events)

    async def verdicts(self, job: str = "llm-7") -> list[KnownVerdict]:
        return await self.store.verdicts_of(job, 10)

    async def verdict(self, seconds: float = 10) -> dict[str, Any]:
        """The only verdict on llm-7, some time later."""
        await self.look()
        await self.look(seconds)
        [known] = await self.verdicts()
        return dict(known.plain)


_EVICTED = {"phase": "Failed", "reason": "Evicted"}


@pytest.mark.parametrize(
    ("status", "cause", "confidence", "advice", "said"),
    [
        (
            {"containerStatuses": [ended(AT, 137, "OOMKilled")]},
            "host_memory", "high", "restart", "was killed, out of memory (OOMKilled, exit code 137)",
        ),
        # restarted at once, so that the end is the state before this one; a shell in between has its own exit code
        (
            {"containerStatuses": [{**ended(AT, 1, "OOMKilled", which="lastState"), "state": {"running": {}}}]},
            "host_memory", "high", "restart", "OOMKilled, exit code 1",
        ),
        (
            {**_EVICTED, "message": "The node was low on resource: ephemeral-storage. Threshold quantity: 10Gi, "
                                    "available: 9Gi. "},
            "storage", "high", "ask", "out of ephemeral storage (the node's local disk)",
        ),
        (
            {**_EVICTED, "message": "Pod ephemeral local storage usage exceeds the total limit of containers 20Gi. "},
            "storage", "high", "ask", "ephemeral storage",
        ),
        (
            {**_EVICTED, "message": 'Usage of EmptyDir volume "shm" exceeds the limit "64Mi". '},
            "storage", "high", "ask", "over the size limit of an emptyDir volume",
        ),
        (
            {**_EVICTED, "message": "The node was low on resource: memory. Container main was using 410Gi"},
            "host_memory", "high", "restart", "out of memory",
        ),
        ({**_EVICTED, "message": "The node had condition: [PIDPressure]. "}, "node", "high", "ask", "process IDs"),
        # an eviction that does not say why
        ({**_EVICTED, "message": ""}, "node", "medium", "ask", "the kubelet evicted pod team-a/llm-7-worker-0"),
        (
            {"conditions": [disrupted(AT, "PreemptionByScheduler", "default-scheduler: preempting to accommodate a "
                                                                   "higher priority pod")]},
            "preemption", "high", "restart", "was preempted for another pod",
        ),
        ({"phase": "Failed", "reason": "Preempting", "message": "Preempted in order to admit critical pod"},
         "preemption", "high", "restart", "admit critical pod"),
        ({"conditions": [disrupted(AT, "EvictionByEvictionAPI", "Eviction API: evicting")]},
         "preemption", "high", "restart", "by a request, such as a drain"),
        ({"conditions": [disrupted(AT, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")]},
         "node", "medium", "ask", "because of a taint of its node"),
        ({"phase": "Failed", "reason": "Terminated", "message": "Pod was terminated in response to imminent node "
                                                               "shutdown."},
         "node", "high", "ask", "its node shuts down"),
        ({"reason": "NodeLost", "message": "Node gpu-11 which was running pod llm-7-worker-0 is unresponsive"},
         "node", "high", "isolate_node", "its node is lost"),
        ({"phase": "Failed", "reason": "DeadlineExceeded", "message": "Pod was active on the node longer than the "
                                                                     "specified deadline"},
         "preemption", "high", "restart", "longer than its deadline"),
        ({"phase": "Failed", "reason": "OutOfnvidia.com/gpu", "message": "Node didn't have enough resource"},
         "node", "medium", "ask", "did not admit"),
        # nobody says why it was killed
        ({"containerStatuses": [ended(AT, 137)]}, "unknown", "low", "restart", "SIGKILL"),
    ],
)  # fmt: skip
async def test_a_pod_status_proves_what_it_names(
    status: dict[str, Any], cause: str, confidence: str, advice: str, said: str
) -> None:
    """It has the confidence that follows from the status, and no more."""
    cluster = Cluster()
    if "conditions" not in status and "containerStatuses" not in status:
        status["containerStatuses"] = [ended(AT, 137)]
    cluster.change(pod(START, **status))
    verdict = await cluster.verdict()
    assert (verdict["cause"], verdict["confidence"], verdict["advice"]) == (cause, confidence, advice)
    assert said in verdict["summary"] + verdict["evidence"][0]["why"]
    assert (verdict["node"] == "gpu-11") == (advice == "isolate_node")


@pytest.mark.parametrize(
    ("reason", "message", "cause", "confidence"),
    [
        ("ErrImagePull", 'rpc error: code = NotFound desc = failed to pull and unpack image "r.example/llm:v9": '
                         "r.example/llm:v9: not found", "code", "high"),
        ("ImagePullBackOff", 'Back-off pulling image "r.example/llm:v9": ErrImagePull: pull access denied, repository '
                             "does not exist or may require authorization", "code", "high"),
        ("InvalidImageName", "Failed to apply default image tag", "code", "high"),
        ("ErrImagePull", "failed to do request: Head \"https://r.example/v2/\": dial tcp: i/o timeout",
         "network", "medium"),
        ("ImagePullBackOff", 'Back-off pulling image "r.example/timeout:not-found"', "unknown", "low"),
        ("CreateContainerConfigError", 'secret "wandb" not found', "code", "high"),
        ("RunContainerError", 'failed to create containerd task: exec: "torchrun": executable file not found in $PATH',
         "code", "high"),
        ("CreateContainerError", "nvidia-container-cli: initialization error: nvml error: driver not loaded",
         "node", "medium"),
    ],
)  # fmt: skip
async def test_a_job_that_does_not_start_is_reported_as_such(
    reason: str, message: str, cause: str, confidence: str
) -> None:
    """The report comes after a minute in which it could have passed. No restart from a checkpoint is advised."""
    cluster = Cluster()
    cluster.change(pod(AT, phase="Pending", containerStatuses=[waiting(reason, message)]))
    await cluster.look(30)
    assert await cluster.verdicts() == []
    verdict = await cluster.verdict(40)
    assert (verdict["cause"], verdict["confidence"], verdict["advice"]) == (cause, confidence, "ask")
    assert verdict["summary"].startswith("The job did not start on gpu-11: ")
    assert reason in verdict["summary"]


@pytest.mark.parametrize("has_condition", [True, False])
async def test_a_container_whose_last_exit_was_not_seen_still_waits_for_its_image(has_condition: bool) -> None:
    """After a node restart the kubelet states no time of the exit. The job may have run for days."""
    cluster = Cluster()
    unseen = {"terminated": {"reason": "ContainerStatusUnknown", "exitCode": 137, "finishedAt": None}}
    placed_at = AT - timedelta(days=3) if has_condition else AT
    changed = pod(placed_at, containerStatuses=[{**waiting("ImagePullBackOff", "not found"), "lastState": unseen}])
    if has_condition:
        unready = {"type": "ContainersReady", "status": "False", "lastTransitionTime": written(AT)}
        changed["status"]["conditions"].append(unready)
    cluster.change(changed)
    [faults] = cluster.pods.faults().values()
    assert [(fault.reason, fault.at) for fault in faults] == [("ImagePullBackOff", AT)]


async def test_an_image_that_arrives_late_is_no_failure() -> None:
    """The registry was unavailable for a moment."""
    cluster = Cluster()
    cluster.change(pod(AT, phase="Pending", containerStatuses=[waiting("ErrImagePull", "503 Service Unavailable")]))
    await cluster.look(30)
    cluster.change(pod(AT, containerStatuses=[{"name": "main", "state": {"running": {}}}]))
    await cluster.look(60)
    assert await cluster.verdicts() == []


async def test_a_pod_removed_while_no_watch_ran_does_not_wait_any_more() -> None:
    """What happened to another one stays known."""
    cluster = Cluster()
    cluster.change(pod(AT, phase="Pending", containerStatuses=[waiting("ErrImagePull", "llm:v9: not found")]))
    cluster.change(pod(START, name="other", containerStatuses=[ended(AT, 137, "OOMKilled")]))
    cluster.pods.pods_listed([], job_of)
    [faults] = cluster.pods.faults().values()
    assert [fault.pod for fault in faults] == ["other"]


async def test_the_back_off_keeps_the_message_of_the_pull() -> None:
    """Releases before 1.31 do not repeat it."""
    cluster = Cluster()
    cluster.change(pod(AT, phase="Pending", containerStatuses=[waiting("ErrImagePull", "llm:v9: not found")]))
    cluster.change(pod(AT, phase="Pending", containerStatuses=[waiting("ImagePullBackOff", "Back-off pulling image")]))
    assert (await cluster.verdict(70))["cause"] == "code"


async def test_a_volume_that_is_not_mounted_is_detected_from_its_events() -> None:
    """The status only states that the container is being created."""
    cluster = Cluster()
    stuck = pod(AT, phase="Pending", containerStatuses=[waiting("ContainerCreating")])
    cluster.change(stuck)
    cluster.happened(
        stuck,
        event(AT + timedelta(seconds=150), "FailedMount", 'MountVolume.SetUp failed for volume "data": timed out'),
    )
    cluster.clock.sleep(60)
    await cluster.pods.look_at_slow_starts()
    assert cluster.events.asked == []
    cluster.clock.sleep(90)
    await cluster.pods.look_at_slow_starts()
    verdict = await cluster.verdict()
    assert (verdict["cause"], verdict["confidence"], verdict["advice"]) == ("storage", "medium", "ask")
    assert "cannot be mounted (FailedMount; check the volume and its claim): MountVolume.SetUp" in verdict["summary"]


# --- what is no failure of the job ------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        pod(START, containers=("main", "proxy"), containerStatuses=[ended(AT, 137, "OOMKilled", "proxy")]),
        pod(START, containerStatuses=[ended(AT, 0, "Completed")], phase="Succeeded"),
        pod(START, containerStatuses=[ended(AT, 143)]),
        # a Job of any other kind, such as a nightly copy
        pod(START, labels={"batch.kubernetes.io/job-name": "llm-7"}, gpus=0, containerStatuses=[ended(AT, 1)]),
        pod(START, labels={}, containerStatuses=[ended(AT, 137, "OOMKilled")]),
        pod(START, phase="Pending", containerStatuses=[waiting("ContainerCreating")]),
        pod(
            START, phase="Pending", conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]
        ),
        pod(START, containerStatuses=[waiting("CrashLoopBackOff", "back-off 10s restarting failed container")]),
        pod(START, reason="FromTheFuture", message="x", conditions="of another form", containerStatuses=[7, None]),
    ],
)
async def test_container_exits_that_end_no_training_make_no_verdict(changed: Object) -> None:
    """They are of another container, of another kind of job, or successful."""
    cluster = Cluster()
    cluster.change(changed)
    await cluster.look(10)
    await cluster.look(120)
    assert await cluster.verdicts() == []


async def test_a_deleted_pod_was_not_killed_by_a_fault() -> None:
    """Its exit follows the deletion request, with its grace period. An earlier exit counts."""
    cluster = Cluster()
    deleted = pod(START, containerStatuses=[ended(AT, 137)])
    metadata = {**deleted["metadata"], "deletionTimestamp": pods.written(AT), "deletionGracePeriodSeconds": 20}
    cluster.change({**deleted, "metadata": metadata}, is_deleted=True)
    await cluster.look(10)
    assert await cluster.verdicts() == []
    late = {**metadata, "deletionTimestamp": pods.written(AT + timedelta(seconds=60))}
    cluster.change({**deleted, "metadata": late}, is_deleted=True)
    assert "SIGKILL" in (await cluster.verdict())["summary"]


async def test_a_health_check_pod_of_the_server_is_no_training() -> None:
    """Its pods have GPUs, and the run in their annotations."""
    cluster = Cluster()
    own = pod(START, labels={"job-name": "llm-7"}, containerStatuses=[ended(AT, 1)])
    cluster.change({**own, "metadata": {**own["metadata"], "annotations": {"trainmedic.io/run": "r1"}}})
    await cluster.look(10)
    assert await cluster.verdicts() == []


async def test_a_job_that_keeps_stepping_has_not_failed() -> None:
    """It has lost a pod, and is elastic."""
    cluster = Cluster()

    def step(number: int) -> Presence:
        details = {"step": number, "instance": "i", "namespace": "team-a", "placement": []}
        return Presence("llm-7", cluster.clock.now(), details)

    for number in range(20):
        cluster.present_jobs = [step(number)]
        await cluster.look(5)
        if number == 3:
            cluster.change(pod(START, conditions=[disrupted(cluster.clock.now(), "PreemptionByScheduler")]))
    assert await cluster.verdicts() == []


async def test_a_container_that_ends_with_its_job_has_not_failed() -> None:
    """The job has reported its end."""
    cluster = Cluster()
    life = JobLife("llm-7", LifeState.ENDED, AT)
    await cluster.store.transact(lambda tx: tx.save_job_lives([life]))
    cluster.change(pod(START, containerStatuses=[ended(AT + timedelta(seconds=2), 1)]))
    await cluster.look(10)
    assert await cluster.verdicts() == []


# --- whose pod it is --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("namespace", "is_known", "places", "namespaces", "expected"),
    [
        ("team-a", True, (), ("team-a", "evil"), [True, False]),
        (None, True, ("gpu-11",), ("team-a", "evil"), [True, False]),
        (None, True, ("llm-7-worker-0",), ("evil",), [True, False]),
        (None, True, (), ("team-a",), [False, False]),
        (None, False, (), ("team-a",), [True, True]),
        (None, False, (), ("team-a", "evil"), [False, False]),
    ],
)
def test_a_label_alone_does_not_assign_a_pod_to_a_job(
    namespace: str | None, is_known: bool, places: tuple[str, ...], namespaces: tuple[str, ...], expected: list[bool]
) -> None:
    """Its namespace must be the job's, or the job known there, or no other job claim the same."""
    is_own = own_pod_test(namespace, is_known, places, namespaces)
    assert [is_own("team-a", "llm-7-worker-0", "gpu-11"), is_own("evil", "x", "gpu-99")] == expected


async def test_another_tenants_pod_with_the_jobs_name_makes_no_verdict_on_it() -> None:
    """This holds whether the job is connected or only its pods are known."""
    for is_connected in (True, False):
        cluster = Cluster()
        cluster.change(pod(START))
        if is_connected:
            details = {"step": 1, "instance": "i", "namespace": "team-a", "placement": []}
            cluster.present_jobs = [Presence("llm-7", cluster.clock.now(), details)]
        cluster.change(pod(START, namespace="evil", containerStatuses=[ended(AT, 137, "OOMKilled")]))
        await cluster.look(10)
        await cluster.look(200)
        assert await cluster.verdicts() == []


# --- with what else is known ------------------------------------------------------------------------


async def connected(cluster: Cluster, *nodes: str) -> None:
    """Two ranks of llm-7 are on each node, and it makes no steps."""
    placement = [{"rank": rank, "node": nodes[rank // 2]} for rank in range(2 * len(nodes))]
    details = {"instance": "i", "namespace": "team-a", "placement": placement, "world_size": len(placement)}
    cluster.present_jobs = [Presence("llm-7", cluster.clock.now(), details)]
    await cluster.look()


async def test_the_ranks_of_a_pod_are_those_of_its_node() -> None:
    """Where several pods of the job are on a node, they are those that name their pod."""
    cluster = Cluster()
    await connected(cluster, "gpu-10", "gpu-11")
    cluster.change(pod(START, name="llm-7-worker-9", node="gpu-10"))
    cluster.change(pod(START, containerStatuses=[ended(AT, 137, "OOMKilled")]))
    assert (await cluster.verdict())["ranks"] == [2, 3]
    cluster = Cluster()
    await connected(cluster, "gpu-10", "llm-7-worker-0")
    cluster.change(pod(START, name="llm-7-worker-1"))
    cluster.change(pod(START, containerStatuses=[ended(AT, 137, "OOMKilled")]))
    assert (await cluster.verdict())["ranks"] == [2, 3]


async def test_output_of_the_other_ranks_does_not_weaken_a_proof() -> None:
    """They lost their peer."""
    cluster = Cluster()
    await connected(cluster, "gpu-10", "gpu-11")
    cluster.change(pod(START, containerStatuses=[ended(AT, 137, "OOMKilled")]))
    at = AT + timedelta(seconds=1)
    line = "RuntimeError: Connection reset by peer"
    members = {"rule": "peer-lost", "role": Role.ROOT, "cause": CauseClass.NETWORK, "first_at": at, "last_at": at}
    origin = Origin("training", "gpu-10", "llm-7", 1, 0)
    await cluster.find(
        "f1", job="llm-7", origin=origin, line=line, target=Target(TargetKind.JOB, job="llm-7"), **members
    )
    verdict = await cluster.verdict()
    assert (verdict["cause"], verdict["confidence"], verdict["ranks"]) == ("host_memory", "high", [2, 3])


async def test_an_event_gives_medium_confidence_and_names_no_node() -> None:
    """An account of the namespace may be able to write it."""
    cluster = Cluster()
    await connected(cluster, "gpu-11")
    hung = pod(START)
    cluster.change(hung)
    cluster.happened(hung, event(AT, "NodeNotReady", "Node is not ready"))
    await cluster.time_out("t", frozenset({0, 1}), job="llm-7")
    verdict = await cluster.verdict(60)
    assert (verdict["cause"], verdict["confidence"], verdict["node"]) == ("node", "medium", None)


@pytest.mark.parametrize(("status", "confidence", "node"), [("Unknown", "high", "gpu-11"), ("False", "medium", None)])
async def test_a_node_that_kubernetes_has_lost_is_named(status: str, confidence: str, node: str | None) -> None:
    """It is known by its condition, which its kubelet or a cluster controller writes."""
    cluster = Cluster()
    await connected(cluster, "gpu-11")
    cluster.change(pod(START))
    ready = {"type": "Ready", "status": status, "reason": "NodeStatusUnknown", "lastTransitionTime": pods.written(AT)}
    cluster.pods.node_changed({"metadata": {"name": "gpu-11"}, "status": {"conditions": [ready]}})
    await cluster.time_out("t", frozenset({0, 1}), job="llm-7")
    verdict = await cluster.verdict(60)
    assert (verdict["cause"], verdict["confidence"], verdict["node"]) == ("node", confidence, node)


async def test_a_node_that_was_deleted_while_the_watch_was_down_is_not_blamed() -> None:
    """The list after the interruption does not contain it."""
    cluster = Cluster()
    await connected(cluster, "gpu-11")
    cluster.change(pod(START))
    ready = {"type": "Ready", "status": "Unknown", "lastTransitionTime": pods.written(AT)}
    cluster.pods.nodes_listed([{"metadata": {"name": "gpu-11"}, "status": {"conditions": [ready]}}])
    assert [each.node for each in (await cluster.pods.reading("llm-7", lambda *_: True)).not_ready] == ["gpu-11"]
    cluster.pods.nodes_listed([])
    assert not (await cluster.pods.reading("llm-7", lambda *_: True)).not_ready


async def test_pods_beyond_the_limit_are_named_as_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """This lasts until a list fits the limit again."""

    async def unread(job: str = "llm-7") -> Sequence[str]:
        return (await cluster.pods.reading(job, lambda *_: True)).unread

    monkeypatch.setattr(kubernetes_pods, "MOST_PODS", 1)
    cluster = Cluster()
    first, skipped = pod(START, labels={"job-name": "llm-8"}), pod(START, name="other")
    too_many = ("the status of some pods: those of 1 at most are kept",)
    cluster.pods.pods_listed([first, skipped], job_of)
    assert (await unread(), await unread("llm-8"), await unread("llm-9")) == (too_many, (), ())
    cluster.pods.pods_listed([first], job_of)
    assert await unread() == ()
    # A skipped pod is deleted, or is seen again below the limit.
    cluster.change(skipped)
    assert await unread() == too_many
    cluster.change(skipped, is_deleted=True)
    assert await unread() == ()
    cluster.change(skipped)
    cluster.change(first, is_deleted=True)
    assert await unread() == too_many
    cluster.change(skipped)
    assert await unread() == ()


async def test_an_earlier_failures_pods_are_not_blamed_again() -> None:
    """The next failure has a verdict of its own."""
    cluster = Cluster()
    cluster.change(pod(START, containerStatuses=[ended(AT, 137, "OOMKilled")]))
    assert (await cluster.verdict())["cause"] == "host_memory"
    at = AT + timedelta(minutes=8)
    cluster.clock.sleep(8 * 60)
    cluster.change(pod(START, name="llm-7-worker-1", containerStatuses=[ended(at, 1)]))
    await cluster.look(10)
    newest, _ = await cluster.verdicts()
    assert newest.cause == "unknown"


async def test_a_new_server_makes_no_second_verdict_on_the_same_failure() -> None:
    """It reads the same pods again."""
    cluster = Cluster()
    failed = pod(START, containerStatuses=[ended(AT, 137, "OOMKilled")])
    cluster.change(failed)
    await cluster.verdict()
    cluster.clock.sleep(20 * 60)
    cluster.pods = KubernetesPods(cluster.events, cluster.clock, Metrics())
    every = timedelta(minutes=1)
    again = JobDiagnoses(cluster.store, cluster, cluster, cluster.clock, Metrics(), every, pods=cluster.pods)  # type: ignore[arg-type]
    cluster.pods.pods_listed([failed], job_of)
    await again.look()
    assert len(await cluster.verdicts()) == 1


# --- what cannot be read, and bounds ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ClusterRefused('events is forbidden: cannot list resource "events"'), "cannot list resource"),
        (ClusterUnavailable("the Kubernetes API cannot be asked"), "cannot be asked"),
    ],
)
async def test_a_verdict_states_what_could_not_be_read(error: Exception, said: str) -> None:
    """It is made from the status all the same."""
    cluster = Cluster()
    cluster.events.error = error
    cluster.pods.answers = False
    cluster.change(pod(START, containerStatuses=[ended(AT, 137, "OOMKilled")]))
    verdict = await cluster.verdict()
    assert verdict["cause"] == "host_memory"
    assert any("the events of llm-7-worker-0: " in each and said in each for each in verdict["missing"])
    assert "the newest status of the pods: Kubernetes does not answer" in verdict["missing"]


async def test_requests_for_events_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are per job, over time, and over all jobs."""
    monkeypatch.setattr(kubernetes_pods, "MOST_REQUESTS", 10)
    cluster = Cluster()
    for number in range(30):
        cluster.change(pod(START, name=f"llm-7-worker-{number}", containerStatuses=[ended(AT, 137, "OOMKilled")]))
    for _ in range(5):
        reading = await cluster.pods.reading("llm-7", lambda *_: True)
    assert len(cluster.events.asked) == kubernetes_pods.MOST_READ
    assert "the events of 22 more pods: those of 8 at most are read" in reading.unread
    cluster.clock.sleep(20)
    reading = await cluster.pods.reading("llm-7", lambda *_: True)
    assert len(cluster.events.asked) == 10
    assert any("10 requests were sent within a minute" in each for each in reading.unread)


async def test_pods_and_faults_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay bounded whatever other users create."""
    monkeypatch.setattr(kubernetes_pods, "MOST_WITH_FAULTS", 5)
    cluster = Cluster()
    for number in range(20):
        for restart in range(20):
            at = AT + timedelta(seconds=restart)
            cluster.change(pod(START, name=f"p-{number}", containerStatuses=[ended(at, 1, message="x" * 9000)]))
    [faults] = cluster.pods.faults().values()
    assert len(faults) == 5 * kubernetes_pods.MOST_FAULTS
    assert max(len(fault.message) for fault in faults) == 500
    cluster.clock.sleep(kubernetes_pods.KEPT_FOR.total_seconds() + 60)
    assert cluster.pods.faults() == {}


async def test_unread_events_are_not_hidden() -> None:
    """The verdict states that there are more events than were read."""
    cluster = Cluster()
    cluster.events.has_more = True
    cluster.change(pod(START, containerStatuses=[ended(AT, 137, "OOMKilled")]))
    assert any("there are more than 200" in each for each in (await cluster.verdict())["missing"])
