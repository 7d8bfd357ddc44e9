"""The actions ``slurm.*`` on a real Slurm 26.05: their changes, their undos, and what they leave alone."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.conftest import RedisServer
from tests.support import slurm_cluster
from tests.support.programs import eventually
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_way import SlurmLogin, by_agent
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.actions import registry
from trainmedic_server.actions.registry import Registry
from trainmedic_server.actions.slurm import GONE
from trainmedic_server.actions.slurm_marks import marked, owners_of
from trainmedic_server.adapters import slurm_agent, slurm_rest
from trainmedic_server.adapters.httpx_caller import HttpxCaller
from trainmedic_server.adapters.slurm_rest import SlurmRest
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.errors import ObjectMissing, OutcomeUnknown, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.actions import Call, Services
from trainmedic_server.ports.outside import Presence
from trainmedic_server.ports.slurm import Slurm

ALERT = Alert("f" * 16, AlertStatus.FIRING, {"alertname": "GPUTemperatureHigh"}, {}, datetime.now(UTC))
TRAINING = "while :; do sleep 0.2; done"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    directory = tmp_path_factory.mktemp("slurm")
    (directory / "scripts").mkdir()
    reboot = directory / "scripts" / "reboot"
    reboot.write_text("#!/bin/sh\necho rebooted >>/mnt/reboots\n")
    reboot.chmod(0o755)
    settings = "RebootProgram=/mnt/scripts/reboot\nResumeTimeout=600\n"
    root = slurm_cluster.fetched("26.05")
    with SlurmCluster(root, directory / "cluster", settings, directory / "scripts") as started:
        yield started


@pytest.fixture(scope="module")
def login(
    shared_redis: RedisServer, cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmLogin]:
    with SlurmLogin(tmp_path_factory.mktemp("login") / "node", shared_redis.url, cluster) as started:
        yield started


class NoJobs:
    """A bus without connected jobs."""

    async def jobs(self) -> list[Presence]:
        return []


@pytest.fixture(params=["rest", "agent"])
async def slurm(
    request: pytest.FixtureRequest, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Slurm]:
    for way in (slurm_rest, slurm_agent):
        monkeypatch.setattr(way, "TIMEOUT", timedelta(seconds=120))  # the machine of the tests may be busy
    if request.param == "agent":
        async with by_agent(request.getfixturevalue("login").url) as client:
            yield client
        return
    rest = SlurmRest(cluster.rest_url, "root", cluster.token_file)
    yield rest
    await rest.close()


@pytest.fixture
async def actions(cluster: SlurmCluster, slurm: Slurm) -> AsyncIterator[Registry]:
    services = Services(SystemClock(), NoJobs(), HttpxCaller(), slurm=slurm)  # type: ignore[arg-type]
    yield registry.build(services)
    cluster.clear()


def call(actions: Registry, name: str, target: Target, given: Mapping[str, Any], **other: Any) -> Call:
    action = actions.action_class(name)
    assert action is not None
    now = datetime.now(UTC)
    return Call(
        **{
            "command_id": str(uuid.uuid4()),
            "run_id": "0192f0c1-aaaa",
            "playbook": "hot-gpu",
            "target": target,
            "params": action.Params.model_validate(given),
            "reason": "GPU 3 is too hot",
            "issued_at": now,
            "deadline": now + timedelta(seconds=120),
            "alert": ALERT,
            **other,
        }
    )


async def do(actions: Registry, name: str, target: Target, given: Mapping[str, Any], **other: Any) -> Mapping[str, Any]:
    return await actions.get(name).perform(call(actions, name, target, given, **other))


async def undo(
    actions: Registry, name: str, target: Target, given: Mapping[str, Any], **other: Any
) -> Mapping[str, Any]:
    """Perform the inverse of an action."""
    action = actions.action_class(name)
    assert action is not None
    inverse = action.inverse(action.Params.model_validate(given), None)
    assert inverse is not None
    return await do(actions, inverse.action, target, inverse.params, undo_of=str(uuid.uuid4()), **other)


def node(name: str) -> Target:
    return Target(TargetKind.NODE, node=name)


def state_of(cluster: SlurmCluster, name: str) -> tuple[str, str]:
    """State and reason, as scontrol shows them. After a change a node is NOT_RESPONDING until it is pinged."""
    text = cluster.run("scontrol", "show", "node", name)
    state = next(part.removeprefix("State=") for part in text.split() if part.startswith("State="))
    state = state.replace("+NOT_RESPONDING", "")
    return state, text.partition("Reason=")[2].partition(" [")[0]


async def until_running(cluster: SlurmCluster, job_id: str) -> None:
    async with asyncio.timeout(120):
        while cluster.run("squeue", "-h", "-j", job_id, "-o", "%T").strip() != "RUNNING":
            await asyncio.sleep(0.5)


async def test_a_drain_and_its_undo(actions: Registry, cluster: SlurmCluster) -> None:
    """The reason names the run. After the undo the node takes jobs again."""
    output = await do(actions, "slurm.drain", node("n1"), {})
    assert state_of(cluster, "n1") == ("IDLE+DRAIN", "trainmedic:0192f0c1-aaaa GPU 3 is too hot")
    assert {"DRAIN", "IDLE"} <= set(output["state"].split("+"))  # it may not have responded yet
    await undo(actions, "slurm.drain", node("n1"), {})
    assert state_of(cluster, "n1") == ("IDLE", "")


async def test_a_node_drained_by_two_runs_returns_with_the_second_undo(
    actions: Registry, cluster: SlurmCluster
) -> None:
    """One reason holds both."""
    await do(actions, "slurm.drain", node("n1"), {})
    await do(actions, "slurm.drain", node("n1"), {}, run_id="0192f0c1-bbbb")
    assert owners_of(state_of(cluster, "n1")[1]) == ("0192f0c1-aaaa", "0192f0c1-bbbb")
    first = await undo(actions, "slurm.drain", node("n1"), {})
    assert first["note"] == "stays drained for other runs"
    assert owners_of(state_of(cluster, "n1")[1]) == ("0192f0c1-bbbb",)
    await undo(actions, "slurm.drain", node("n1"), {}, run_id="0192f0c1-bbbb")
    assert state_of(cluster, "n1") == ("IDLE", "")


@pytest.mark.parametrize("reason", ["NHC: check_hw", "slurm-operator: cordoned", "Mia: memory", "trainmedic: mine"])
async def test_the_drain_of_another_user_stays(actions: Registry, cluster: SlurmCluster, reason: str) -> None:
    """The step succeeds, since no job starts there; the undo, and ``slurm.resume``, leave it drained."""
    cluster.run("scontrol", "update", "nodename=n1", "state=drain", f"reason={reason}")
    output = await do(actions, "slurm.drain", node("n1"), {})
    assert (output["note"], output["changed"]) == ("drained by another already: the undo leaves it drained", False)
    await undo(actions, "slurm.drain", node("n1"), {})
    with pytest.raises(PermanentFailure, match="stays drained"):
        await do(actions, "slurm.resume", node("n1"), {})
    assert state_of(cluster, "n1") == ("IDLE+DRAIN", reason)


async def test_a_reason_changed_by_an_operator_is_not_ours(actions: Registry, cluster: SlurmCluster) -> None:
    """The undo leaves the node drained."""
    await do(actions, "slurm.drain", node("n1"), {})
    cluster.run("scontrol", "update", "nodename=n1", "reason=Mia: keep it out")
    output = await undo(actions, "slurm.drain", node("n1"), {})
    assert "stays drained" in output["note"]
    assert state_of(cluster, "n1") == ("IDLE+DRAIN", "Mia: keep it out")


async def test_a_node_that_is_down_keeps_its_reason(actions: Registry, cluster: SlurmCluster) -> None:
    """A drain would replace it, so the step fails."""
    cluster.run("scontrol", "update", "nodename=n2", "state=down", "reason=Mia: burnt")
    with pytest.raises(TemporaryFailure, match="Mia: burnt"):
        await do(actions, "slurm.drain", node("n2"), {})
    state, reason = state_of(cluster, "n2")
    assert (state.partition("+")[0], reason) == ("DOWN", "Mia: burnt")


async def test_a_node_is_found_by_its_short_name_and_refused_if_several_share_an_address(
    actions: Registry, cluster: SlurmCluster
) -> None:
    """Exporters name nodes by host name or address. All nodes of the test have one address."""
    await do(actions, "slurm.drain", node("n3.cluster.example"), {})
    assert state_of(cluster, "n3")[0] == "IDLE+DRAIN"
    with pytest.raises(PermanentFailure, match="may be any of the Slurm nodes n1, n2, n3"):
        await do(actions, "slurm.drain", node("127.0.0.1"), {})
    with pytest.raises(ObjectMissing):
        await do(actions, "slurm.drain", node("n9"), {})


async def test_a_drain_ends_by_itself_at_its_time(actions: Registry, cluster: SlurmCluster) -> None:
    """Slurm has the time, so it holds without Trainmedic."""
    await do(actions, "slurm.drain", node("n1"), {"resume_after": "10m"})
    assert "ResumeAfterTime=" in cluster.run("scontrol", "show", "node", "n1")


async def test_a_reboot_leaves_the_node_down_until_it_is_resumed(
    actions: Registry, cluster: SlurmCluster, slurm: Slurm
) -> None:
    """The reboot waits for running jobs, and a resumed attempt requests no second one. slurmrestd cannot reboot."""
    if not (await slurm.release()).can_reboot:
        with pytest.raises(PermanentFailure, match="--slurm-agent"):
            await do(actions, "slurm.reboot", node("n3"), {})
        assert state_of(cluster, "n3")[0] == "IDLE"
        return
    reboots = cluster.work / "reboots"
    job_id = cluster.submit(TRAINING, "-w", "n3")
    await until_running(cluster, job_id)
    for resumed in (False, True):
        output = await do(actions, "slurm.reboot", node("n3"), {}, command_id="0192f0c1-dddd", resumed=resumed)
        assert output["note"] == "Slurm reboots it as soon as no job runs on it"
        assert {"DRAIN", "REBOOT_REQUESTED"} <= set(output["state"].split("+"))
    assert "stays out of service" in (await undo(actions, "slurm.drain", node("n3"), {}))["note"]
    assert not reboots.exists()
    cluster.run("scancel", job_id)
    eventually(reboots.exists, 120, "slurmd has run the reboot program")
    cluster.programs["slurmd-n3"].end()
    cluster.start_node("n3", "-b")
    eventually(lambda: "DOWN" in state_of(cluster, "n3")[0], 120, "it is back, and down")
    output = await do(actions, "slurm.resume", node("n3"), {})
    assert "DOWN" not in output["state"]
    eventually(lambda: state_of(cluster, "n3")[0] == "IDLE", 120, "it takes jobs")
    assert reboots.read_text() == "rebooted\n"


async def test_the_drain_of_another_user_prevents_a_reboot(
    actions: Registry, cluster: SlurmCluster, slurm: Slurm
) -> None:
    """A reboot would replace the reason."""
    if not (await slurm.release()).can_reboot:
        pytest.skip("slurmrestd cannot reboot")
    cluster.run("scontrol", "update", "nodename=n1", "state=drain", "reason=Mia: memory")
    with pytest.raises(TemporaryFailure, match="Mia: memory"):
        await do(actions, "slurm.reboot", node("n1"), {})
    assert state_of(cluster, "n1") == ("IDLE+DRAIN", "Mia: memory")


async def test_a_hold_and_its_undo(actions: Registry, cluster: SlurmCluster) -> None:
    """A target may name the job; nothing remains in its admin comment."""
    job_id = cluster.submit(TRAINING, "-w", "n1", "--begin=now+1hour")
    target = Target(TargetKind.JOB, job=f"slurm:{job_id}")
    output = await do(actions, "slurm.hold", target, {})
    assert (output["job_id"], output["held"]) == (job_id, True)
    output = await undo(actions, "slurm.hold", target, {})
    assert output["held"] is False
    assert "trainmedic" not in cluster.run("scontrol", "show", "job", job_id)


async def test_a_reserved_node_runs_its_test_job_and_is_released(actions: Registry, cluster: SlurmCluster) -> None:
    """Another attempt finds the reservation. The undo ends only this run's one, and only if unchanged."""
    for resumed in (False, True):
        output = await do(actions, "slurm.reserve", node("n1"), {"users": ["root"]}, resumed=resumed)
    assert output["reservation"] == "trainmedic-0192f0c1-aaaa"
    waiting = cluster.submit(TRAINING, "-w", "n1")
    test = cluster.submit("true", "-w", "n1", "--reservation", output["reservation"])
    async with asyncio.timeout(120):
        while "JobState=COMPLETED" not in cluster.run("scontrol", "show", "job", test):
            await asyncio.sleep(0.5)
    assert cluster.run("squeue", "-h", "-j", waiting, "-o", "%T").strip() == "PENDING"
    await do(actions, "slurm.reserve", node("n1"), {}, run_id="0192f0c1-bbbb")
    await undo(actions, "slurm.reserve", node("n1"), {}, run_id="0192f0c1-bbbb")
    cluster.run("scontrol", "update", f"reservationname={output['reservation']}", "nodes=n1,n2")
    assert "another has changed it" in (await undo(actions, "slurm.reserve", node("n1"), {}))["note"]
    cluster.run("scontrol", "update", f"reservationname={output['reservation']}", "nodes=n1")
    await undo(actions, "slurm.reserve", node("n1"), {})
    assert (await undo(actions, "slurm.reserve", node("n1"), {}))["note"] == GONE
    await until_running(cluster, waiting)


async def test_the_reservation_of_another_user_is_left_alone(actions: Registry, cluster: SlurmCluster) -> None:
    """Its jobs would run on the node, so the step fails."""
    given = ("reservationname=maint", "starttime=now", "duration=60", "nodes=n[1-2]", "users=root")
    cluster.run("scontrol", "create", "reservation", *given)
    try:
        with pytest.raises(PermanentFailure, match="reservation maint of another"):
            await do(actions, "slurm.reserve", node("n2"), {})
    finally:
        cluster.run("scontrol", "delete", "reservationname=maint")


async def test_a_job_restarts_without_the_broken_node_and_drops_the_exclusion(
    actions: Registry, cluster: SlurmCluster
) -> None:
    """It is requeued held, kept off the node and released."""
    job_id = cluster.submit(TRAINING, "--requeue")
    await until_running(cluster, job_id)
    broken = cluster.run("squeue", "-h", "-j", job_id, "-o", "%N").strip()
    target, given = Target(TargetKind.JOB, job=f"slurm:{job_id}"), {"exclude_nodes": [broken], "time_limit": "2h"}
    await do(actions, "slurm.requeue", target, {"hold": True, "at_once": True})
    await do(actions, "slurm.update", target, given)
    assert f"ExcNodeList={broken}" in cluster.run("scontrol", "show", "job", job_id)
    await undo(actions, "slurm.update", target, given)
    shown = cluster.run("scontrol", "show", "job", job_id)
    assert "ExcNodeList= " in shown.replace("\n", " ") or "ExcNodeList=(null)" in shown
    assert "trainmedic:update" not in shown
    await do(actions, "slurm.update", target, given)
    await do(actions, "slurm.release", target, {})
    await until_running(cluster, job_id)
    assert "TimeLimit=02:00:00" in cluster.run("scontrol", "show", "job", job_id)


async def test_a_heterogeneous_job_is_held_changed_and_restored_as_one(
    actions: Registry, cluster: SlurmCluster
) -> None:
    """Every component is addressed by the leader's ID."""
    leader = cluster.run(
        *("sbatch", "--parsable", "-o", "/dev/null", "-n1", "--begin=now+1hour", ":", "-n1", "--begin=now+1hour"),
        *("--wrap", TRAINING),
    ).strip()

    def reasons() -> list[str]:
        return cluster.run("squeue", "-h", "-j", leader, "-o", "%r").split()

    target, given = Target(TargetKind.JOB, job=f"slurm:{leader}"), {"exclude_nodes": ["n1"], "time_limit": "2h"}
    output = await do(actions, "slurm.hold", target, {})
    assert (output["job_id"], output["held"]) == (leader, True)
    assert reasons() == ["JobHeldAdmin", "JobHeldAdmin"]
    assert (await undo(actions, "slurm.hold", target, {}))["held"] is False
    assert "JobHeldAdmin" not in reasons()
    await do(actions, "slurm.update", target, given)
    text = cluster.run("scontrol", "show", "job", leader)
    assert (text.count("ExcNodeList=n1"), text.count("TimeLimit=02:00:00")) == (2, 2)
    await undo(actions, "slurm.update", target, given)
    text = cluster.run("scontrol", "show", "job", leader)
    assert (text.count("ExcNodeList=n1"), text.count("TimeLimit=UNLIMITED"), "trainmedic:" in text) == (0, 2, False)
    second = {"job_id": f"{leader}+1"}
    await do(actions, "slurm.hold", node("n1"), second)
    assert reasons().count("JobHeldAdmin") == 1
    await undo(actions, "slurm.hold", node("n1"), second)
    assert "JobHeldAdmin" not in reasons()


async def test_the_hold_of_another_user_stays(actions: Registry, cluster: SlurmCluster) -> None:
    """This holds after a resumed attempt, too."""
    job_id = cluster.submit(TRAINING, "--hold")
    for resumed in (False, True):
        output = await do(actions, "slurm.hold", node("n1"), {"job_id": job_id}, resumed=resumed)
        assert output["note"] == "held by another already: the undo leaves it held"
    output = await undo(actions, "slurm.hold", node("n1"), {"job_id": job_id})
    assert output["held"] is True


async def test_an_attempt_after_a_crash_requeues_once(actions: Registry, cluster: SlurmCluster) -> None:
    """The admin comment holds the intent; the second attempt of the same command finds the restart."""
    job_id = cluster.submit(TRAINING, "--requeue")
    await until_running(cluster, job_id)
    target = Target(TargetKind.JOB, job=f"slurm:{job_id}")
    mark = "[trainmedic:requeue 0192f0c1-cccc 0]"
    cluster.run("scontrol", "update", f"jobid={job_id}", f"admincomment={mark}")
    cluster.run("scontrol", "requeue", job_id)
    output = await do(actions, "slurm.requeue", target, {}, command_id="0192f0c1-cccc", resumed=True)
    assert output["restarts"] == 1
    assert cluster.run("scontrol", "show", "job", job_id).count("trainmedic:requeue") == 1


async def test_a_requeue_over_a_restart_of_the_controller_requeues_once(
    actions: Registry, cluster: SlurmCluster
) -> None:
    """It retries while slurmctld is unavailable."""
    job_id = cluster.submit(TRAINING, "--requeue")
    await until_running(cluster, job_id)
    cluster.programs["slurmctld"].end()
    waits = asyncio.Event()

    async def report(_: str) -> None:
        waits.set()

    target = Target(TargetKind.JOB, job=f"slurm:{job_id}")
    requeueing = asyncio.create_task(do(actions, "slurm.requeue", target, {}, report_wait=report))
    await asyncio.wait({requeueing, asyncio.create_task(waits.wait())}, return_when=asyncio.FIRST_COMPLETED)
    cluster.start_controller()
    assert (await requeueing)["restarts"] == 1
    shown = cluster.run("scontrol", "show", "job", job_id)
    assert "Restarts=1 " in shown


async def test_a_requeue_over_a_frozen_program_requeues_once(
    actions: Registry, slurm: Slurm, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slurmrestd or slurmctld stops before it reads the request and reads it later; the answer is lost."""
    job_id = cluster.submit(TRAINING, "--requeue")
    await until_running(cluster, job_id)
    frozen = cluster.programs["slurmrestd" if isinstance(slurm, SlurmRest) else "slurmctld"].process
    requeue, waits = slurm.requeue, asyncio.Event()

    async def freezing(job_id: str, hold: bool = False) -> None:
        if not waits.is_set():
            frozen.send_signal(signal.SIGSTOP)
            monkeypatch.setattr(slurm_rest, "TIMEOUT", timedelta(seconds=3))
            monkeypatch.setattr(slurm_agent, "TIMEOUT", timedelta(seconds=5))
        try:
            await requeue(job_id, hold)
        finally:
            for way in (slurm_rest, slurm_agent):
                monkeypatch.setattr(way, "TIMEOUT", timedelta(seconds=60))
            frozen.send_signal(signal.SIGCONT)
            waits.set()

    monkeypatch.setattr(slurm, "requeue", freezing)
    target = Target(TargetKind.JOB, job=f"slurm:{job_id}")
    assert (await do(actions, "slurm.requeue", target, {}))["restarts"] == 1
    shown = cluster.run("scontrol", "show", "job", job_id)
    assert "Restarts=1 " in shown


async def test_a_requeue_is_bounded_and_visible(actions: Registry, cluster: SlurmCluster) -> None:
    """It waits if it is to be held; a job that was restarted often enough is rejected."""
    job_id = cluster.submit(TRAINING, "--requeue")
    await until_running(cluster, job_id)
    target = Target(TargetKind.JOB, job=f"slurm:{job_id}")
    output = await do(actions, "slurm.requeue", target, {"hold": True})
    assert (output["restarts"], output["held"]) == (1, True)
    with pytest.raises(PermanentFailure, match="max_restarts is 1"):
        await do(actions, "slurm.requeue", target, {"max_restarts": 1})


async def test_a_job_that_may_not_be_requeued_is_rejected(actions: Registry, cluster: SlurmCluster) -> None:
    job_id = cluster.submit(TRAINING, "--no-requeue")
    await until_running(cluster, job_id)
    with pytest.raises(PermanentFailure, match="may not be requeued"):
        await do(actions, "slurm.requeue", node("n1"), {"job_id": job_id})
    assert cluster.run("squeue", "-h", "-j", job_id, "-o", "%T").strip() == "RUNNING"


async def test_a_signal_is_never_sent_twice(actions: Registry, cluster: SlurmCluster) -> None:
    """A resumed attempt does not know whether it was sent."""
    job_id = cluster.submit(TRAINING)
    await until_running(cluster, job_id)
    await do(actions, "slurm.signal", node("n1"), {"job_id": job_id, "signal": "USR1"})
    with pytest.raises(OutcomeUnknown):
        await do(actions, "slurm.signal", node("n1"), {"job_id": job_id, "signal": "USR1"}, resumed=True)


async def test_a_job_is_cancelled(actions: Registry, cluster: SlurmCluster) -> None:
    """A job that has ended is not cancelled again, and nothing else is cancelled."""
    job_id = cluster.submit(TRAINING)
    await until_running(cluster, job_id)
    assert "CANCELLED" in (await do(actions, "slurm.cancel", node("n1"), {"job_id": job_id}))["state"]
    assert (await do(actions, "slurm.cancel", node("n1"), {"job_id": job_id}))["note"] == "it had ended already"
    for name, given in (("slurm.hold", {}), ("slurm.requeue", {}), ("slurm.signal", {"signal": "USR1"})):
        with pytest.raises(PermanentFailure, match="has ended"):
            await do(actions, name, node("n1"), {"job_id": job_id, **given})


@pytest.mark.parametrize("name", ["slurm.hold", "slurm.requeue", "slurm.cancel"])
async def test_a_target_that_names_no_slurm_job_is_rejected(actions: Registry, name: str) -> None:
    """The message says how to name one."""
    for target in (node("n1"), Target(TargetKind.JOB, job="llm-1"), Target(TargetKind.JOB, job="slurm:; rm")):
        with pytest.raises(PermanentFailure, match="give job_id, or a target such as job:slurm:4711"):
            await do(actions, name, target, {})


def test_only_our_own_reasons_are_recognized() -> None:
    """The runs are parsed from the written reason; another text with the same start is not ours."""
    assert owners_of(marked(["a-1", "b-2"], "hot\n GPU")) == ("a-1", "b-2")
    for other in ("", "trainmedic:", "trainmedic: by hand", "NHC: trainmedic:a-1", "Trainmedic:a-1"):
        assert owners_of(other) == ()
    assert len(marked(["r"], "x" * 1000)) < 250
