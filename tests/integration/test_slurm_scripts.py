"""The scripts of ``packaging/slurm`` on real Slurm: what they drain, and what Slurm does with the jobs there.

The node's health is a stand-in for ``trainmedic agent health`` with its output and exit codes; a broken GPU is a file.
One test runs the real command.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.test_slurm_actions import do, node, state_of, undo
from tests.support import slurm_cluster
from tests.support.programs import PYTHON_PATH, ROOT, alertmanagers, eventually, start_alertmanager
from tests.support.slurm_cluster import SlurmCluster
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.actions import registry
from trainmedic_server.actions.registry import Registry
from trainmedic_server.actions.slurm_marks import owners_of
from trainmedic_server.adapters import slurm_rest
from trainmedic_server.adapters.httpx_caller import HttpxCaller
from trainmedic_server.adapters.slurm_rest import SlurmRest
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.ports.actions import Services

SCRIPTS = ROOT / "packaging" / "slurm"
SETTINGS = """
SlurmctldParameters=enable_expedited_requeue,health_check_report
SchedulerParameters=sched_interval=1,bf_interval=1,nohold_on_prolog_fail
Prolog=/mnt/scripts/prolog
Epilog=/mnt/scripts/epilog
HealthCheckProgram=/mnt/scripts/health-check
HealthCheckInterval=3600
HealthCheckTimeout=300
"""
FAULT = "GPU 3 (GPU-3) has no spare memory rows left: replace it"
HEALTH = f"""#!/bin/sh
[ "$*" = "agent health --gpus 8" ] || exit 2
[ -e "/mnt/broken-$SLURMD_NODENAME" ] || exit 0
echo "GPU 0 GPU-0 NVIDIA H100"
echo "Fault: {FAULT}" >&2
exit 1
"""
TRAINING = "trap 'exit 3' TERM; touch /mnt/begun-$SLURM_JOB_ID; while :; do sleep 0.2; done"


@pytest.fixture(scope="module", params=slurm_cluster.RELEASES)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    root = slurm_cluster.fetched(request.param)
    directory = tmp_path_factory.mktemp("slurm")
    given = {
        "SLURM_CONF": "${SLURM_CONF:-/mnt/slurm.conf}",  # slurmd does not pass it to the health check
        "GPUS": "8",
        "CHECK_SECONDS": "100",
        "ASK_SECONDS": "100",
        "STATE_DIR": "/mnt/of-$SLURMD_NODENAME",
        "PATH": "/mnt/scripts/bin:$PATH",
    }
    scripts = installed(directory / "scripts", "/mnt/scripts/bin/trainmedic", **given)
    (scripts / "bin").mkdir()
    program(scripts / "bin" / "trainmedic", HEALTH)
    program(scripts / "bin" / "logger", '#!/bin/sh\nshift 3\necho "$*" >>/mnt/log\n')
    settings = SETTINGS
    if request.param == "24.11":  # it knows none of them
        settings = re.sub("SlurmctldParameters=.*|HealthCheckTimeout=.*", "", settings)
    with SlurmCluster(root, directory / "cluster", settings, scripts) as started:
        yield started


@pytest.fixture
async def actions(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Registry]:
    monkeypatch.setattr(slurm_rest, "TIMEOUT", timedelta(seconds=120))  # the machine of the tests may be busy
    slurm = SlurmRest(cluster.rest_url, "root", cluster.token_file)
    services = Services(SystemClock(), None, HttpxCaller(), slurm=slurm)  # type: ignore[arg-type]  # no bus is used
    yield registry.build(services)
    for file in cluster.work.glob("broken-*"):
        file.unlink()
    for job in await slurm.jobs():
        await slurm.cancel(job.job_id)
    eventually(lambda: not cluster.run("squeue", "-h", "-o", "%i"), 120, "no job is left", every=0.5)
    for each in await slurm.nodes():
        if each.is_out_of_service:
            cluster.run("scontrol", "update", f"nodename={each.name}", "state=resume")
    await slurm.close()


def installed(directory: Path, trainmedic: str, **settings: str) -> Path:
    """Install the scripts into the directory, as docs/how-to/slurm.md says."""
    directory.mkdir()
    for script in SCRIPTS.iterdir():
        program(directory / script.name, script.read_text())
    lines = {"TRAINMEDIC": trainmedic, **settings}
    (directory / "settings").write_text("".join(f"{name}={value}\n" for name, value in lines.items()))
    return directory


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def break_gpu(cluster: SlurmCluster, name: str) -> None:
    (cluster.work / f"broken-{name}").touch()


def mend_gpu(cluster: SlurmCluster, name: str) -> None:
    (cluster.work / f"broken-{name}").unlink()


def check_health(cluster: SlurmCluster, name: str, is_healthy: str | None = None) -> None:
    """Run the health check as slurmd does."""
    told = [] if is_healthy is None else [f"SLURM_NODE_IS_HEALTHY={is_healthy}"]
    cluster.run("env", f"SLURMD_NODENAME={name}", *told, "/mnt/scripts/health-check")


def shown(cluster: SlurmCluster, job_id: str) -> dict[str, str]:
    text = cluster.run("scontrol", "show", "job", job_id)
    return dict(re.findall(r"(\w+)=(\S*)", text))


def until_state(cluster: SlurmCluster, job_id: str, state: str, restarts: int = 0) -> dict[str, str]:
    """Wait until the job has the state; return what Slurm shows of it."""

    def ask() -> dict[str, str] | None:
        job = shown(cluster, job_id)
        return job if (job["JobState"], job["Restarts"]) == (state, str(restarts)) else None

    return eventually(ask, 120, f"job {job_id} is {state}", every=0.5)


def expedites(cluster: SlurmCluster) -> bool:
    return not cluster.run("scontrol", "--version").split()[-1].startswith("24.")


def submit(cluster: SlurmCluster, *options: str) -> str:
    requeue = "--requeue=expedite" if expedites(cluster) else "--requeue"
    return cluster.submit(TRAINING, requeue, *options)


async def test_an_expedited_job_restarts_without_the_node_that_a_run_has_drained(
    actions: Registry, cluster: SlurmCluster
) -> None:
    """The epilog fails there, and the reason stays the run's: its undo returns the node. 24.11 does not restart it."""
    job_id = submit(cluster)
    eventually((cluster.work / f"begun-{job_id}").exists, 120, "the job traps the signal")
    bad = shown(cluster, job_id)["NodeList"]
    await do(actions, "slurm.drain", node(bad), {})
    target = Target(TargetKind.JOB, job=f"slurm:{job_id}")
    await do(actions, "slurm.signal", target, {"signal": "TERM", "batch": True})
    if expedites(cluster):
        after = until_state(cluster, job_id, "RUNNING", restarts=1)
        assert after["NodeList"] != bad
    else:
        until_state(cluster, job_id, "FAILED")
    eventually(lambda: "COMPLETING" not in state_of(cluster, bad)[0], 120, "the epilog has ended", every=0.5)
    assert f"job {job_id} of root on {bad} ended with exit code 3, signal 0\n" in (cluster.work / "log").read_text()
    state, reason = state_of(cluster, bad)
    assert ("DRAIN" in state, owners_of(reason)) == (True, ("0192f0c1-aaaa",))
    await undo(actions, "slurm.drain", node(bad), {})
    assert "DRAIN" not in state_of(cluster, bad)[0]


async def test_a_node_whose_gpu_breaks_during_a_job_is_drained_until_fixed(
    actions: Registry, cluster: SlurmCluster
) -> None:
    """Our reason replaces Slurm's "Epilog error". If a run drains the node too, the check ends the drain."""
    job_id = submit(cluster)
    eventually((cluster.work / f"begun-{job_id}").exists, 120, "the prolog is over")
    bad = shown(cluster, job_id)["NodeList"]
    break_gpu(cluster, bad)
    target = Target(TargetKind.JOB, job=f"slurm:{job_id}")
    await do(actions, "slurm.signal", target, {"signal": "TERM", "batch": True})
    if expedites(cluster):
        assert until_state(cluster, job_id, "RUNNING", restarts=1)["NodeList"] != bad
    eventually(lambda: "DRAIN" in state_of(cluster, bad)[0], 120, "the node is drained", every=0.5)
    eventually(lambda: "COMPLETING" not in state_of(cluster, bad)[0], 120, "the epilog has ended", every=0.5)
    assert state_of(cluster, bad)[1] == f"trainmedic:health {FAULT}"
    await do(actions, "slurm.drain", node(bad), {})
    assert owners_of(state_of(cluster, bad)[1]) == ("health", "0192f0c1-aaaa")
    mend_gpu(cluster, bad)
    check_health(cluster, bad)
    assert "DRAIN" in state_of(cluster, bad)[0]  # the run has not ended
    await undo(actions, "slurm.drain", node(bad), {})
    check_health(cluster, bad)
    assert "DRAIN" not in state_of(cluster, bad)[0]


async def test_the_prolog_keeps_a_job_from_a_broken_node(actions: Registry, cluster: SlurmCluster) -> None:
    """Its script does not start, and it waits for another node without being held."""
    for name in ("n2", "n3"):
        cluster.run("scontrol", "update", f"nodename={name}", "state=drain", "reason=Mia: later")
    break_gpu(cluster, "n1")
    job_id = submit(cluster)
    eventually(lambda: "DRAIN" in state_of(cluster, "n1")[0], 120, "n1 is drained", every=0.5)
    assert state_of(cluster, "n1")[1] == f"trainmedic:health {FAULT}"
    states = ("PENDING", "EXPEDITING")
    eventually(lambda: shown(cluster, job_id)["JobState"] in states, 120, "the job waits", every=0.5)
    assert "held" not in shown(cluster, job_id)["Reason"].lower()
    assert not (cluster.work / f"begun-{job_id}").exists()


async def test_slurmd_checks_the_node_at_its_start(actions: Registry, cluster: SlurmCluster) -> None:
    """It registers although the GPU is broken, since Slurm knows of the fault by the drain."""
    break_gpu(cluster, "n3")
    for is_broken in (True, False):
        cluster.programs["slurmd-n3"].end()
        cluster.start_node("n3")
        eventually(lambda is_broken=is_broken: ("DRAIN" in state_of(cluster, "n3")[0]) == is_broken, 120, "the check")
        if is_broken:
            assert state_of(cluster, "n3")[1] == f"trainmedic:health {FAULT}"
            mend_gpu(cluster, "n3")


@pytest.mark.parametrize("reason", ["NHC: check_hw", "Epilog error"])
async def test_the_drain_of_another_user_stays(actions: Registry, cluster: SlurmCluster, reason: str) -> None:
    """This holds with a broken GPU and without."""
    cluster.run("scontrol", "update", "nodename=n1", "state=drain", f"reason={reason}")
    break_gpu(cluster, "n1")
    check_health(cluster, "n1", "no")
    mend_gpu(cluster, "n1")
    check_health(cluster, "n1", "no")
    assert state_of(cluster, "n1") == ("IDLE+DRAIN", reason)


@pytest.mark.parametrize("script", ["epilog", "prolog"])
async def test_a_script_that_could_not_reach_slurmctld_is_recorded_later(
    actions: Registry, cluster: SlurmCluster, script: str
) -> None:
    """Slurm's drain has its own reason. The health check replaces it by ours, and ends the drain."""
    break_gpu(cluster, "n1")
    elsewhere = re.sub("SlurmctldPort=.*", "SlurmctldPort=1", (cluster.work / "slurm.conf").read_text())
    (cluster.work / "elsewhere.conf").write_text(elsewhere.replace("MessageTimeout=20", "MessageTimeout=1"))
    unreachable = ("env", "SLURMD_NODENAME=n1", "SLURM_JOB_EXIT_CODE2=0:0", "SLURM_CONF=/mnt/elsewhere.conf")
    with pytest.raises(AssertionError):
        cluster.run(*unreachable, f"/mnt/scripts/{script}")
    cluster.run("scontrol", "update", "nodename=n1", "state=drain", f"reason={script.capitalize()} error")
    check_health(cluster, "n1", "no")
    assert state_of(cluster, "n1") == ("IDLE+DRAIN", f"trainmedic:health {FAULT}")
    mend_gpu(cluster, "n1")
    check_health(cluster, "n1", "no")
    assert state_of(cluster, "n1")[0] == "IDLE"


SAVES = """
import pathlib, signal, time
signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path("saved").touch())
pathlib.Path("ready").touch()
while True:
    time.sleep(0.2)
"""


@pytest.mark.parametrize("launch", ["exec", "srun"])
async def test_signals_pass_through_trainmedic_run(
    actions: Registry, cluster: SlurmCluster, tmp_path: Path, launch: str
) -> None:
    """Trainmedic-run is the batch script or a step. USR1 reaches the training; TERM fails the batch script."""
    # Slurm's root directory has no Python: the command runs in that of the tests.
    training = shlex.join([sys.executable, "-c", SAVES])
    command = f"cd {tmp_path} && exec env PYTHONPATH={PYTHON_PATH} {sys.executable} -m trainmedic.launch --retries 0"
    outside = f"chroot /proc/{os.getpid()}/root sh -c {shlex.quote(f'{command} --job slurm-1 -- {training}')}"
    job_id = cluster.submit(f"{launch} {outside}")
    target = Target(TargetKind.JOB, job=f"slurm:{job_id}")
    eventually((tmp_path / "ready").exists, 120, "the training runs")
    await do(actions, "slurm.signal", target, {"signal": "USR1", "batch": launch == "exec"})
    eventually((tmp_path / "saved").exists, 120, "the training has saved a checkpoint")
    assert shown(cluster, job_id)["JobState"] == "RUNNING"
    await do(actions, "slurm.signal", target, {"signal": "TERM", "batch": True})
    job = until_state(cluster, job_id, "FAILED")
    assert job["ExitCode"] != "0:0"


# --- without a cluster ------------------------------------------------------------------------------------


def ran(script: Path, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script with the programs in `path` before those of the system."""
    given = {"PATH": f"{path}:/usr/bin:/bin", "SLURMD_NODENAME": "n1", **environment}
    return subprocess.run([script], env=given, capture_output=True, text=True)


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """A directory with a stand-in for scontrol: one idle node n1; updates are written to the file "asked"."""
    directory = tmp_path / "bin"
    directory.mkdir()
    asked = shlex.quote(str(tmp_path / "asked"))
    program(
        directory / "scontrol",
        f'#!/bin/sh\ncase "$*" in "show hostnames"*) echo n1 ;; "show node n1") echo "   State=IDLE" ;; esac\n'
        f'echo "$*" >>{asked}\n',
    )
    program(directory / "logger", "#!/bin/sh\n")
    return directory


def asked(slurm: Path) -> list[str]:
    file = slurm.parent / "asked"
    return file.read_text().splitlines() if file.exists() else []


def test_the_real_health_command_is_understood(slurm: Path, tmp_path: Path) -> None:
    """The command requires more GPUs than any node has."""
    command = tmp_path / "trainmedic"
    python = shlex.quote(sys.executable)
    program(command, f'#!/bin/sh\nPYTHONPATH={shlex.quote(PYTHON_PATH)} exec {python} -m trainmedic_server "$@"\n')
    scripts = installed(tmp_path / "scripts", str(command), GPUS="10000", CHECK_SECONDS="300")
    done = ran(scripts / "health-check", slurm)
    assert done.returncode == 0, done
    drained = [line for line in asked(slurm) if line.startswith("update")]
    assert len(drained) == 1
    assert drained[0].startswith("update nodename=n1 state=drain reason=trainmedic:health ")
    assert not drained[0].endswith("health ")


@pytest.mark.parametrize(
    ("health", "reason"),
    [
        ("exit 127", None),  # not installed
        ("echo 'Traceback: no module' >&2; exit 1", None),
        ("exit 2", None),
        ("sleep 60", "the health check did not end in 1 s"),
        ("echo 'Fault: one' >&2; echo 'Fault: two' >&2; exit 1", "one"),
    ],
)
def test_only_a_fault_drains_a_node(slurm: Path, tmp_path: Path, health: str, reason: str | None) -> None:
    """A check that cannot run proves nothing; one that hangs does, since the driver hangs."""
    program(tmp_path / "trainmedic", f"#!/bin/sh\n{health}\n")
    scripts = installed(tmp_path / "scripts", str(tmp_path / "trainmedic"), CHECK_SECONDS="1")
    assert ran(scripts / "health-check", slurm).returncode == 0
    drained = [line for line in asked(slurm) if line.startswith("update")]
    assert drained == ([] if reason is None else [f"update nodename=n1 state=drain reason=trainmedic:health {reason}"])


@pytest.mark.parametrize(
    ("health", "ends"), [("exit 0", True), ("echo 'Degraded: eth0' >&2; exit 0", True), ("exit 127", False)]
)
def test_only_a_passed_check_ends_our_drain(slurm: Path, tmp_path: Path, health: str, ends: bool) -> None:
    """A check that cannot run proves nothing."""
    state = "   State=IDLE+DRAIN\\n   Reason=trainmedic:health one [root@2026-11-01T00:00:00]"
    program(slurm / "scontrol", f'#!/bin/sh\nprintf "{state}\\n"\necho "$*" >>{slurm.parent / "asked"}\n')
    program(tmp_path / "trainmedic", f"#!/bin/sh\n{health}\n")
    scripts = installed(tmp_path / "scripts", str(tmp_path / "trainmedic"))
    assert ran(scripts / "health-check", slurm).returncode == 0
    assert ("update nodename=n1 state=undrain" in asked(slurm)) == ends


def test_the_check_compares_with_the_record_of_the_agent(slurm: Path, tmp_path: Path) -> None:
    """The settings must name its state directory."""
    program(tmp_path / "trainmedic", f'#!/bin/sh\nprintf "%s\\n" "$@" >>{tmp_path / "given"}\n')
    scripts = installed(tmp_path / "scripts", str(tmp_path / "trainmedic"), AGENT_STATE="'/var/lib/trainmedic agent'")
    ran(scripts / "health-check", slurm)
    given = (tmp_path / "given").read_text().splitlines()
    assert given == ["agent", "health", "--gpus", "1", "--state-dir", "/var/lib/trainmedic agent"]


@pytest.mark.parametrize(("is_healthy", "questions"), [("yes", []), ("no", ["show node n1"]), ("", ["show node n1"])])
def test_a_healthy_node_asks_slurmctld_only_if_it_must(
    slurm: Path, tmp_path: Path, is_healthy: str, questions: list[str]
) -> None:
    """Every node would ask at the same moment."""
    scripts = installed(tmp_path / "scripts", "true")
    assert ran(scripts / "health-check", slurm, SLURM_NODE_IS_HEALTHY=is_healthy).returncode == 0
    assert asked(slurm) == questions


def test_a_failed_job_is_reported_once_to_a_real_alertmanager(slurm: Path, tmp_path: Path) -> None:
    """Only its first node reports it, and only if it failed. A name cannot break the JSON."""
    config = tmp_path / "alertmanager.yaml"
    config.write_text("route: {receiver: none}\nreceivers: [{name: none}]\n")
    program_, url = start_alertmanager(next(iter(alertmanagers().values())), config, tmp_path)
    scripts = installed(tmp_path / "scripts", "true", ALERTMANAGER_URL=url)
    job = {"SLURM_JOB_USER": 'mi"a', "SLURM_JOB_PARTITION": "main", "SLURM_JOB_NODELIST": "n[1-2]"}
    with program_:
        for number, code, where in (("7", "93:0", "n1"), ("7", "93:0", "n2"), ("8", "0:0", "n1")):
            given = {**job, "SLURM_JOB_ID": number, "SLURM_JOB_EXIT_CODE2": code, "SLURMD_NODENAME": where}
            assert ran(scripts / "epilog", slurm, **given).returncode == 0
        (alert,) = eventually(lambda: alerts_of(url), 60, "Alertmanager has the alert")
    assert alert["labels"] == {
        "alertname": "SlurmJobEnded",
        "slurm_job_id": "7",
        "user": "mia",
        "partition": "main",
        "exit_code": "93",
        "signal": "0",
    }
    assert alert["annotations"]["nodes"] == "n[1-2]"


def alerts_of(url: str) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = httpx.get(f"{url}/api/v2/alerts").raise_for_status().json()
    return found
