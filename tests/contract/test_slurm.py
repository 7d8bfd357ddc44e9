"""Promises of ``ports.slurm.Slurm``, kept by each way into each release of a real Slurm."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.conftest import RedisServer
from tests.support import slurm_cluster
from tests.support.programs import Program
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_way import WITHOUT_RIGHTS, SlurmLogin, by_agent
from trainmedic_server import telemetry
from trainmedic_server.adapters import slurm_agent, slurm_rest, slurm_topology
from trainmedic_server.adapters.slurm_agent import SlurmAgent
from trainmedic_server.adapters.slurm_rest import SlurmRest
from trainmedic_server.adapters.slurm_topology import SlurmWatch
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.domain import host_lists
from trainmedic_server.errors import ClusterRefused, ClusterUnavailable, ConfigurationError, ObjectMissing
from trainmedic_server.ports.slurm import UNLIMITED, JobChange, Slurm, SlurmJob

REASON = "trainmedic:0192f0c1 GPU 3 is too hot"
TASK_RUNS = "trap 'touch /mnt/caught' USR1; touch /mnt/ready; while :; do sleep 0.2; done"


@pytest.fixture(scope="module", params=slurm_cluster.RELEASES)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    root = slurm_cluster.fetched(request.param)
    with SlurmCluster(
        root, tmp_path_factory.mktemp("slurm") / "cluster", "NodeSet=pair Nodes=n1,n2\n", gpus=2
    ) as started:
        yield started


@pytest.fixture(scope="module")
def login(
    shared_redis: RedisServer, cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmLogin]:
    with SlurmLogin(tmp_path_factory.mktemp("login") / "node", shared_redis.url, cluster) as started:
        yield started


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for way in (slurm_rest, slurm_agent):
        monkeypatch.setattr(way, "TIMEOUT", timedelta(seconds=120))  # the machine of the tests may be busy


@pytest.fixture
async def rest(cluster: SlurmCluster) -> AsyncIterator[SlurmRest]:
    client = SlurmRest(cluster.rest_url, "root", cluster.token_file)
    yield client
    await client.close()


@pytest.fixture(params=["rest", "agent"])
async def slurm(request: pytest.FixtureRequest, cluster: SlurmCluster, rest: SlurmRest) -> AsyncIterator[Slurm]:
    if request.param == "rest":
        yield rest
    else:
        async with by_agent(request.getfixturevalue("login").url) as client:
            yield client
    cluster.clear()  # a job that completes still has its GPUs


def stand_in_the_way(slurm: Slurm, cluster: SlurmCluster) -> Program:
    """The program that answers this way's calls."""
    return cluster.programs["slurmrestd" if isinstance(slurm, SlurmRest) else "slurmctld"]


async def until(ask: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait until `ask` returns True, at most 120 s."""
    async with asyncio.timeout(120):
        for _ in itertools.count():
            if await ask():
                return
            await asyncio.sleep(0.5)
    raise AssertionError(what)


async def running(slurm: Slurm, cluster: SlurmCluster, *options: str, script: str = TASK_RUNS) -> SlurmJob:
    """Submit a job; return it once it runs."""
    job_id = cluster.submit(script, *options)

    async def is_running() -> bool:
        job = await slurm.job(job_id)
        return "RUNNING" in job.states and "CONFIGURING" not in job.states

    await until(is_running, f"job {job_id} runs")
    return await slurm.job(job_id)


def excluded(job: SlurmJob) -> set[str]:
    return set(host_lists.expand(",".join(job.excluded_nodes)))


async def test_the_release_and_its_capabilities_are_known(slurm: Slurm, cluster: SlurmCluster) -> None:
    """Requeue over REST works from 26.05, and reboots only through an agent."""
    release = await slurm.release()
    assert release.version == cluster.run("scontrol", "--version").split()[-1]
    is_by_agent = isinstance(slurm, SlurmAgent)
    assert release.can_requeue == (is_by_agent or release.version.startswith("26.05"))
    assert release.can_reserve == (is_by_agent or not release.version.startswith("24.11"))
    assert release.can_reboot == is_by_agent


async def test_the_topology_has_nodes_jobs_and_gpus(slurm: Slurm, cluster: SlurmCluster) -> None:
    """A task counts by its own id, a component by its leader's. Only running jobs are on nodes."""
    watch = SlurmWatch(slurm, SystemClock(), telemetry.Metrics())
    assert not watch.topology().answers
    array = cluster.submit(TASK_RUNS, "--array=0-1", "--gres=gpu:1", "--mem=10", "-w", "n1")
    leader = cluster.run(
        *("sbatch", "--parsable", "-o", "/dev/null", "-n1", "-w", "n2", "--gres=gpu:2", ":", "-n1", "-w", "n3"),
        *("--wrap", TASK_RUNS),
    ).strip()
    cluster.submit(TASK_RUNS, "--hold", "-w", "n3")

    async def all_run() -> bool:
        await watch.refresh()
        return [len(watch.topology().jobs_by_node.get(node, ())) for node in ("n1", "n2", "n3")] == [2, 1, 1]

    await until(all_run, "the jobs run")
    found = watch.topology()
    tasks = [f"slurm:{found.whole_by_id[f'{array}_{number}']}" for number in (0, 1)]
    assert found.answers
    assert len(set(tasks)) == 2
    whole = frozenset({f"slurm:{leader}"})
    assert found.jobs_by_node == {"n1": frozenset(tasks), "n2": whole, "n3": whole}
    assert {key: sorted(jobs) for key, jobs in found.jobs_by_gpu.items()} == {
        **{f"n1/{index}": [job] for index, job in enumerate(tasks)},
        **{f"n2/{index}": [f"slurm:{leader}"] for index in (0, 1)},
    }
    assert found.nodes_by_job[f"slurm:{leader}"] == {"n2", "n3"}
    assert found.whole_by_id[f"{leader}+1"] == leader
    assert {node.name: (dict(node.attributes), node.pools) for node in found.nodes}["n1"] == (
        *({"partition": "main", "feature": "h100,ib"}, ("main",)),
    )
    assert not any("DRAIN" in node.unavailable for node in found.nodes)
    await slurm.drain("n1", REASON)
    await watch.refresh()
    changed = watch.topology()
    assert {node.name for node in changed.nodes if "DRAIN" in node.unavailable.split("+")} == {"n1"}
    assert changed.names is found.names


async def test_a_topology_that_slurm_no_longer_provides_stays_and_reports_it(
    slurm: Slurm, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed reading never means that the cluster is empty. The data are outdated before the reading fails."""
    started = SystemClock().now()
    watch = SlurmWatch(slurm, SystemClock(), telemetry.Metrics())
    assert (watch.topology().answers, watch.topology().silent_since) == (False, None)
    await watch.refresh()
    before, read_at = watch.topology(), SystemClock().now()
    assert before.silent_since is None
    frozen = stand_in_the_way(slurm, cluster).process
    frozen.send_signal(signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            for way in (slurm_rest, slurm_agent):
                patch.setattr(way, "TIMEOUT", timedelta(seconds=5))
            patch.setattr(slurm_topology, "_PATIENCE", timedelta(milliseconds=100))
            reading = asyncio.create_task(watch.refresh())

            async def is_outdated() -> bool:
                return not watch.topology().answers

            await until(is_outdated, "the reading takes too long")
            since = watch.topology().silent_since
            assert since is not None
            assert started <= since <= read_at
            with pytest.raises(ClusterUnavailable):
                await reading
        assert (watch.topology().answers, watch.topology().nodes) == (False, before.nodes)
    finally:
        frozen.send_signal(signal.SIGCONT)
    await until(lambda: _answers(slurm), "Slurm answers again")
    await watch.refresh()
    assert watch.topology().answers


async def test_slurmrestd_is_reachable_by_a_unix_socket(cluster: SlurmCluster) -> None:
    client = SlurmRest(cluster.socket_url, "root", cluster.token_file)
    assert [node.name for node in await client.nodes()] == list(slurm_cluster.NODES)
    await client.close()


async def test_a_drain_has_its_reason_until_it_ends(slurm: Slurm) -> None:
    """A second drain changes nothing. The end of a drain removes the reason, but not on 24.11."""
    for _ in range(2):
        await slurm.drain("n1", REASON)
    node = await slurm.node("n1")
    assert node.is_drained
    assert (node.reason, node.reason_set_by, node.resume_after) == (REASON, "root", None)
    await slurm.undrain("n1")
    node = await slurm.node("n1")
    assert not node.is_drained
    assert node.reason == (REASON if (await slurm.release()).version.startswith("24.11") else "")


async def test_a_drained_node_is_out_of_service(slurm: Slurm) -> None:
    """Another user may have drained it. Slurm may also report that it has not responded yet."""
    assert "DRAIN" not in (await slurm.node("n1")).why_unavailable
    await slurm.drain("n1", REASON)
    assert "DRAIN" in {node.name: node.why_unavailable for node in await slurm.nodes()}["n1"].split("+")


async def test_a_drain_with_an_end_is_renewed_by_another_drain(slurm: Slurm) -> None:
    """The time counts from the last call."""
    await slurm.drain("n1", REASON, timedelta(minutes=10))
    first = (await slurm.node("n1")).resume_after
    assert first is not None
    assert timedelta(minutes=8) < first - datetime.now(UTC) <= timedelta(minutes=10)
    await slurm.drain("n1", REASON, timedelta(minutes=20))
    second = (await slurm.node("n1")).resume_after
    assert second is not None
    assert second - first >= timedelta(minutes=9)


async def test_the_end_of_a_drain_can_be_removed(slurm: Slurm) -> None:
    """A second drain without an end removes it."""
    await slurm.drain("n1", REASON, timedelta(minutes=10))
    await slurm.drain("n1", REASON)
    assert (await slurm.node("n1")).resume_after is not None
    await slurm.drain("n1", REASON, UNLIMITED)
    node = await slurm.node("n1")
    assert (node.is_drained, node.resume_after) == (True, None)


async def test_a_reservation_keeps_other_users_jobs_away(slurm: Slurm, cluster: SlurmCluster) -> None:
    """A second one with the same name is refused, and changes nothing. One that has ended is missing."""
    if not (await slurm.release()).can_reserve:
        with pytest.raises(ClusterRefused, match=r"needs Slurm 25\.05"):
            await slurm.reserve("trainmedic-1", "n1", ["daemon"], timedelta(hours=1))
        assert not await slurm.reservations()
        return
    await slurm.reserve("trainmedic-1", "n1", ["daemon"], timedelta(hours=1))
    with pytest.raises(ClusterRefused):
        await slurm.reserve("trainmedic-1", "n2", ["daemon"], timedelta(hours=1))
    await slurm.reserve("trainmedic-2", "n1", ["daemon"], timedelta(hours=2))
    first, second = sorted(await slurm.reservations(), key=lambda each: each.name)
    assert (first.name, first.nodes, first.users) == ("trainmedic-1", "n1", ("daemon",))
    assert first.starts_at is not None
    assert first.ends_at == first.starts_at + timedelta(hours=1)
    job_id = cluster.submit(TASK_RUNS, "-w", "n1")
    other = await running(slurm, cluster, "-w", "n2")
    assert "PENDING" in (await slurm.job(job_id)).states
    for each in (first, second):
        await slurm.end_reservation(each.name)
    await until(lambda: _has_state(slurm, job_id, "RUNNING"), "it runs on the node that is free again")
    assert "RUNNING" in (await slurm.job(other.job_id)).states
    with pytest.raises(ObjectMissing):
        await slurm.end_reservation("trainmedic-1")


async def test_a_reason_can_be_replaced_alone(slurm: Slurm) -> None:
    """The drain and its end stay."""
    await slurm.drain("n1", REASON, timedelta(minutes=10))
    before = await slurm.node("n1")
    await slurm.set_reason("n1", "trainmedic:0192f0c1,0192f0c2 two runs")
    after = await slurm.node("n1")
    assert after.is_drained
    assert (after.reason, after.resume_after) == ("trainmedic:0192f0c1,0192f0c2 two runs", before.resume_after)


async def test_nodes_are_listed_with_their_names_and_changes(slurm: Slurm) -> None:
    """Slurm 26.05 answers 304 without a list if nothing has changed since the last one."""
    await slurm.nodes()
    await asyncio.sleep(2)  # slurmctld counts whole seconds
    nodes = await slurm.nodes()
    assert [node.name for node in nodes] == list(slurm_cluster.NODES)
    assert {(node.address, node.partitions) for node in nodes} == {("127.0.0.1", ("main",))}
    await slurm.drain("n3", REASON)
    assert [node.name for node in await slurm.nodes() if node.is_drained] == ["n3"]


@pytest.mark.parametrize("change", [lambda slurm: slurm.drain("n9", REASON), lambda slurm: slurm.undrain("n9")])
async def test_a_node_that_does_not_exist_is_missing(slurm: Slurm, change: Callable[[Slurm], Awaitable[None]]) -> None:
    """slurmrestd answers 200 to a query for such a node."""
    with pytest.raises(ObjectMissing):
        await slurm.node("n9")
    with pytest.raises(ObjectMissing):
        await change(slurm)


@pytest.mark.parametrize(
    "change",
    [
        lambda slurm: slurm.job("999999"),
        lambda slurm: slurm.hold("999999"),
        lambda slurm: slurm.signal("999999", "USR1"),
        lambda slurm: slurm.cancel("999999"),
        lambda slurm: slurm.update("999999", JobChange(excluded_nodes=("n1",))),
        lambda slurm: slurm.update("999999", JobChange()),
        lambda slurm: slurm.update("999999_3", JobChange()),
    ],
    ids=["read", "hold", "signal", "cancel", "update", "empty update", "task"],
)
async def test_a_job_that_does_not_exist_is_missing(slurm: Slurm, change: Callable[[Slurm], Awaitable[None]]) -> None:
    """This includes cases in which slurmrestd answers 200."""
    with pytest.raises(ObjectMissing):
        await change(slurm)


async def test_a_held_job_waits_until_it_is_released(slurm: Slurm, cluster: SlurmCluster) -> None:
    job_id = cluster.submit(TASK_RUNS, "--hold")
    assert (await slurm.job(job_id)).is_held
    await slurm.unhold(job_id)
    assert not (await slurm.job(job_id)).is_held
    await until(lambda: _has_state(slurm, job_id, "RUNNING"), "it runs")


async def test_a_running_job_that_is_held_continues(slurm: Slurm, cluster: SlurmCluster) -> None:
    job = await running(slurm, cluster)
    for _ in range(2):
        await slurm.hold(job.job_id)
    held = await slurm.job(job.job_id)
    assert held.is_held
    assert "RUNNING" in held.states


@pytest.mark.parametrize(("script", "with_batch"), [(TASK_RUNS, True), (f'srun sh -c "{TASK_RUNS}"', False)])
async def test_a_signal_reaches_the_job(slurm: Slurm, cluster: SlurmCluster, script: str, with_batch: bool) -> None:
    """It reaches the steps, and the batch script only on request: a shell that does not trap the signal would end."""
    for name in ("ready", "caught"):
        (cluster.work / name).unlink(missing_ok=True)
    job = await running(slurm, cluster, script=script)
    await until(lambda: _exists(cluster.work / "ready"), "the job traps the signal")
    if with_batch:
        await slurm.signal(job.job_id, "USR1")
        await asyncio.sleep(2)
        assert not (cluster.work / "caught").exists()
    await slurm.signal(job.job_id, "USR1", with_batch)
    await until(lambda: _exists(cluster.work / "caught"), "the job has caught the signal")
    assert "RUNNING" in (await slurm.job(job.job_id)).states


async def test_arrays_are_rejected_and_their_tasks_are_jobs(slurm: Slurm, cluster: SlurmCluster) -> None:
    """Reading one task back would prove nothing about the others."""
    array = cluster.submit(TASK_RUNS, "--array=0-1")
    await until(lambda: _has_state(slurm, f"{array}_0", "RUNNING"), "the first task runs")
    await until(lambda: _has_state(slurm, f"{array}_1", "RUNNING"), "the second task runs")
    with pytest.raises(ClusterRefused, match="has 2 parts"):
        await slurm.job(array)
    await slurm.cancel(f"{array}_1")
    await until(lambda: _has_state(slurm, f"{array}_1", "CANCELLED"), "the second task is cancelled")
    assert "RUNNING" in (await slurm.job(f"{array}_0")).states


async def test_one_task_of_an_array_is_changed_and_no_other(slurm: Slurm, cluster: SlurmCluster) -> None:
    """slurmrestd cannot change a task that has no ID of its own, such as a waiting one."""
    array = cluster.submit(TASK_RUNS, "--array=0-2", "--hold")
    with pytest.raises(ClusterRefused, match="has 3 parts"):
        await slurm.job(array)
    with pytest.raises(ObjectMissing):
        await slurm.job(f"{array}_7")
    task = await slurm.job(f"{array}_1")
    assert (task.job_id, task.parts, task.is_held) == (f"{array}_1", (f"{array}_1",), True)
    if isinstance(slurm, SlurmRest):
        with pytest.raises(ClusterRefused, match=r"cannot change task .* alone"):
            await slurm.unhold(f"{array}_1")
        assert (await slurm.job(f"{array}_1")).is_held
        cluster.run("scontrol", "release", f"{array}_1")
    else:
        await slurm.unhold(f"{array}_1")
    await until(lambda: _has_state(slurm, f"{array}_1", "RUNNING"), "the task runs")
    await slurm.hold(f"{array}_1")
    await slurm.set_admin_comment(f"{array}_1", "trainmedic:one")
    tasks = [await slurm.job(f"{array}_{number}") for number in range(3)]
    assert [(job.is_held, job.admin_comment, "RUNNING" in job.states) for job in tasks] == [
        (True, "", False),
        (True, "trainmedic:one", True),
        (True, "", False),
    ]


async def test_an_empty_update_changes_nothing(slurm: Slurm, cluster: SlurmCluster) -> None:
    """It only proves that the job exists."""
    job_id = cluster.submit(TASK_RUNS, "--hold", "--time=30")
    before = await slurm.job(job_id)
    await slurm.update(job_id, JobChange())
    assert await slurm.job(job_id) == before


async def test_the_leader_stands_for_a_heterogeneous_job(slurm: Slurm, cluster: SlurmCluster) -> None:
    """Its components have ids and offsets, and are held and changed one by one. Signals, requeues and cancels reach all
    of them.
    """
    for file in (*cluster.work.glob("ready-*"), *cluster.work.glob("caught-*")):
        file.unlink()
    parts = "#SBATCH -n1 --hold --requeue\n#SBATCH hetjob\n#SBATCH -n1\n"
    (cluster.work / "heterogeneous.sh").write_text(f"#!/bin/sh\n{parts}srun --het-group=0,1 sh /mnt/task.sh\n")
    (cluster.work / "task.sh").write_text(
        "trap 'touch /mnt/caught-$SLURM_PROCID' USR1; touch /mnt/ready-$SLURM_PROCID; while :; do sleep 0.2; done\n"
    )
    leader = cluster.run("sbatch", "--parsable", "-o", "/dev/null", "/mnt/heterogeneous.sh").strip()
    job = await slurm.job(leader)
    _, second = job.components
    assert (job.is_held, job.parts) == (True, (leader, second))
    for name in (second, f"{leader}+1"):
        component = await slurm.job(name)
        assert (component.job_id, component.parts) == (second, (second,))
    assert (await slurm.job(f"{leader}+0")).parts == (leader,)
    await slurm.update(f"{leader}+1", JobChange(excluded_nodes=("n1",)))
    assert excluded(await slurm.job(second)) == {"n1"}
    assert excluded(await slurm.job(leader)) == set()
    for part in job.parts:
        await slurm.unhold(part)
    await until(lambda: _has_state(slurm, leader, "RUNNING"), "it runs")
    job = await slurm.job(leader)
    assert len(host_lists.expand(job.nodes)) == 2
    for part in (0, 1):
        await until(lambda part=part: _exists(cluster.work / f"ready-{part}"), "all components run their tasks")
    await slurm.signal(leader, "USR1")
    for part in (0, 1):
        await until(lambda part=part: _exists(cluster.work / f"caught-{part}"), "the signal has reached all components")
    if (await slurm.release()).can_requeue:
        await slurm.requeue(leader, hold=True)
        for part in job.parts:
            await until(lambda part=part: _has_state(slurm, part, "PENDING"), "all components are queued again")
            assert (await slurm.job(part)).is_held
        with pytest.raises(ClusterRefused):
            await slurm.requeue(second)
    await slurm.cancel(leader)
    for part in job.parts:
        await until(lambda part=part: _has_state(slurm, part, "CANCELLED"), "all components are cancelled")


async def test_a_job_is_cancelled_once(slurm: Slurm, cluster: SlurmCluster) -> None:
    """A job that has already ended is not an error."""
    job = await running(slurm, cluster)
    await slurm.cancel(job.job_id)
    await until(lambda: _has_state(slurm, job.job_id, "CANCELLED"), "it is cancelled")
    await slurm.cancel(job.job_id)
    assert "CANCELLED" in (await slurm.job(job.job_id)).states


async def test_a_requeue_ends_the_job_and_queues_it_again(slurm: Slurm, cluster: SlurmCluster) -> None:
    """With `hold` the job waits. A release without requeue over REST refuses, and the job continues."""
    job = await running(slurm, cluster, "--requeue")
    if not (await slurm.release()).can_requeue:
        with pytest.raises(ClusterRefused, match=r"needs Slurm 26\.05"):
            await slurm.requeue(job.job_id, hold=True)
        after = await slurm.job(job.job_id)
        assert (after.restarts, "RUNNING" in after.states) == (0, True)
        return
    await slurm.requeue(job.job_id, hold=True)
    await until(lambda: _has_state(slurm, job.job_id, "PENDING"), "it is queued again")
    after = await slurm.job(job.job_id)
    assert (after.restarts, after.is_held) == (1, True)
    with pytest.raises(ClusterRefused):
        await slurm.requeue(job.job_id)  # it is pending
    await slurm.update(job.job_id, JobChange(excluded_nodes=("n1", "n2")))
    assert excluded(await slurm.job(job.job_id)) == {"n1", "n2"}
    await slurm.unhold(job.job_id)


async def test_nodes_are_excluded_only_while_the_job_waits(slurm: Slurm, cluster: SlurmCluster) -> None:
    job_id = cluster.submit(TASK_RUNS, "--hold")
    await slurm.update(job_id, JobChange(excluded_nodes=("n1", "n3")))
    assert excluded(await slurm.job(job_id)) == {"n1", "n3"}
    await slurm.update(job_id, JobChange(excluded_nodes=()))
    assert excluded(await slurm.job(job_id)) == set()
    await slurm.update(job_id, JobChange(excluded_nodes=("n1", "n3")))
    await slurm.unhold(job_id)
    await until(lambda: _has_state(slurm, job_id, "RUNNING"), "it runs")
    assert (await slurm.job(job_id)).nodes == "n2"
    with pytest.raises(ClusterRefused):
        await slurm.update(job_id, JobChange(excluded_nodes=("n1",)))


async def test_priority_and_time_limit_are_changed(slurm: Slurm, cluster: SlurmCluster) -> None:
    """Fields that are not named stay."""
    job = await running(slurm, cluster, "--time=30")
    assert job.time_limit == timedelta(minutes=30)
    await slurm.update(job.job_id, JobChange(priority=4711, time_limit=timedelta(hours=2)))
    after = await slurm.job(job.job_id)
    assert (after.priority, after.time_limit) == (4711, timedelta(hours=2))
    await slurm.update(job.job_id, JobChange(time_limit=UNLIMITED))
    after = await slurm.job(job.job_id)
    assert (after.priority, after.time_limit) == (4711, None)


async def test_the_admin_comment_is_replaced_in_every_state(slurm: Slurm, cluster: SlurmCluster) -> None:
    """The job may be waiting or running. An empty text removes the comment."""
    job_id = cluster.submit(TASK_RUNS, "--hold")
    await slurm.set_admin_comment(job_id, "trainmedic:one")
    assert (await slurm.job(job_id)).admin_comment == "trainmedic:one"
    await slurm.unhold(job_id)
    await until(lambda: _has_state(slurm, job_id, "RUNNING"), "it runs")
    await slurm.set_admin_comment(job_id, "")
    assert (await slurm.job(job_id)).admin_comment == ""


async def test_an_expired_token_is_refused_until_the_file_has_a_new_one(rest: SlurmRest, cluster: SlurmCluster) -> None:
    """Nothing is changed, and the refusal counts as temporary."""
    slurm = rest
    cluster.renew_token(lifespan=1)
    await asyncio.sleep(3)
    try:
        with pytest.raises((ClusterRefused, ClusterUnavailable)):
            await slurm.drain("n1", REASON)
        with pytest.raises((ClusterRefused, ClusterUnavailable)):
            await slurm.node("n1")
    finally:
        cluster.renew_token()
    assert not (await slurm.node("n1")).is_drained


async def test_a_frozen_program_leaves_the_outcome_of_a_change_unknown(
    slurm: Slurm, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been made; a query changes nothing. An agent queries a node's name before it changes a node."""
    job_id = cluster.submit(TASK_RUNS, "--hold")
    await slurm.node("n1")
    monkeypatch.setattr(slurm_rest, "TIMEOUT", timedelta(seconds=2))
    monkeypatch.setattr(slurm_agent, "TIMEOUT", timedelta(seconds=5))
    frozen = stand_in_the_way(slurm, cluster).process
    frozen.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(ClusterUnavailable) as caught:
            await slurm.unhold(job_id)
        assert caught.value.may_be_done
        with pytest.raises(ClusterUnavailable) as caught:
            await slurm.drain("n1", REASON)
        assert caught.value.may_be_done is isinstance(slurm, SlurmRest)
        with pytest.raises(ClusterUnavailable) as caught:
            await slurm.node("n1")
        assert not caught.value.may_be_done
    finally:
        frozen.send_signal(signal.SIGCONT)
    for way in (slurm_rest, slurm_agent):
        monkeypatch.setattr(way, "TIMEOUT", timedelta(seconds=120))
    await until(lambda: _answers(slurm), "Slurm answers again")


async def test_nothing_is_known_or_done_without_a_controller(slurm: Slurm, cluster: SlurmCluster) -> None:
    """An unreachable slurmctld is not an empty cluster. After its restart everything continues."""
    cluster.programs["slurmctld"].end()
    try:
        asked = (slurm.node("n1"), slurm.nodes(), slurm.jobs(), slurm.release(), slurm.drain("n1", REASON))
        # At once: slurmrestd tries to reach slurmctld for a while.
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(answer, ClusterUnavailable) for answer in answers), answers
    finally:
        cluster.start_controller()
    await until(lambda: _answers(slurm), "slurmctld answers again")
    assert not (await slurm.node("n1")).is_drained


async def test_a_missing_server_is_unavailable(cluster: SlurmCluster) -> None:
    """A change that did not reach it had no effect."""
    client = SlurmRest("http://127.0.0.1:1", "root", cluster.token_file)
    with pytest.raises(ClusterUnavailable) as caught:
        await client.drain("n1", REASON)
    assert not caught.value.may_be_done
    await client.close()


@pytest.mark.parametrize("url", ["", "slurm:6820", "ftp://slurm:6820", "unix://"])
def test_an_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(ConfigurationError, match="URL of slurmrestd"):
        SlurmRest(url)


async def test_a_user_without_rights_is_refused(
    cluster: SlurmCluster, own_redis: type[RedisServer], tmp_path: Path
) -> None:
    """The agent's user needs them; nothing is changed."""
    redis = own_redis(tmp_path)
    redis.start()
    job_id = cluster.submit(TASK_RUNS, "--hold")
    with SlurmLogin(tmp_path / "login", redis.url, cluster, user=WITHOUT_RIGHTS):
        async with by_agent(redis.url) as slurm:
            for change in (
                slurm.drain("n1", REASON),
                slurm.unhold(job_id),
                slurm.cancel(job_id),
                slurm.set_admin_comment(job_id, "mine"),
                slurm.reserve("trainmedic-1", "n1", ["root"], timedelta(hours=1)),
                slurm.reboot("n1", REASON),
            ):
                with pytest.raises(ClusterRefused):
                    await change
            assert not (await slurm.node("n1")).is_drained
    assert "JobHeld" in cluster.run("squeue", "-h", "-j", job_id, "-o", "%r")
    cluster.run("scancel", job_id)


async def test_an_agent_does_what_its_policy_allows(
    cluster: SlurmCluster, own_redis: type[RedisServer], tmp_path: Path
) -> None:
    """A drain includes its end, so that an undo works."""
    redis = own_redis(tmp_path)
    redis.start()
    job_id = cluster.submit(TASK_RUNS, "--hold")
    with SlurmLogin(tmp_path / "login", redis.url, cluster, allow=("slurm.drain",)) as login:
        async with by_agent(redis.url) as slurm:
            await slurm.drain("n1", REASON)
            await slurm.undrain("n1")
            with pytest.raises(ClusterRefused, match=r"slurm\.cancel is not allowed by this node's policy"):
                await slurm.cancel(job_id)
            assert not login.changes("scancel")
            for name in ("ALL", "n[1-3]", "n1,n2"):
                with pytest.raises(ClusterRefused, match="not one name"):
                    await slurm.drain(name, REASON)
    assert login.changes("scontrol update nodename=") == 2
    cluster.run("scancel", job_id)


async def test_an_agent_does_not_change_nodes_by_the_name_of_a_set(login: SlurmLogin, cluster: SlurmCluster) -> None:
    """Slurm would drain all of the set's nodes."""
    async with by_agent(login.url) as slurm:
        for change in (
            slurm.drain("pair", REASON),
            slurm.reboot("pair", REASON),
            slurm.reserve("trainmedic-1", "pair", ["root"], timedelta(hours=1)),
        ):
            with pytest.raises(ObjectMissing, match="slurmctld lists no node pair"):
                await change
        assert not any(node.is_drained for node in await slurm.nodes())
        assert not await slurm.reservations()


async def test_readings_are_not_recorded_in_the_agents_journal(login: SlurmLogin) -> None:
    """One comes every few seconds. An unchanged list is not sent again."""

    def entries() -> int:
        with contextlib.closing(sqlite3.connect(f"file:{login.state / 'agent.db'}?mode=ro", uri=True)) as journal:
            return int(journal.execute("SELECT count(*) FROM commands").fetchone()[0])

    async with by_agent(login.url) as slurm:

        async def are_unchanged() -> bool:  # a node that was just resumed does not respond until it is pinged
            return await slurm.nodes() is await slurm.nodes()

        before = entries()
        await until(are_unchanged, "an unchanged list is not sent again")
        await slurm.jobs()
        assert entries() == before
        await slurm.drain("n1", REASON)
        assert entries() == before + 1
        assert [node.name for node in await slurm.nodes() if node.is_drained] == ["n1"]
        await slurm.undrain("n1")


async def test_a_missing_agent_is_unavailable(own_redis: type[RedisServer], tmp_path: Path) -> None:
    """Nothing is known, and a query had no effect."""
    redis = own_redis(tmp_path)
    redis.start()
    async with by_agent(redis.url) as slurm:
        with pytest.raises(ClusterUnavailable, match="the agent on node 'login' did not answer") as caught:
            await slurm.node("n1")
        assert not caught.value.may_be_done


async def _answers(slurm: Slurm) -> bool:
    try:
        await slurm.release()
    except (ClusterUnavailable, ClusterRefused):
        return False
    return True


async def _has_state(slurm: Slurm, job_id: str, state: str) -> bool:
    return state in (await slurm.job(job_id)).states


async def _exists(path: Path) -> bool:
    return path.exists()
