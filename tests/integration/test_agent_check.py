"""The commands of ``trainmedic agent`` beside the agent itself, on the stand-in for the GPU driver and a real Redis."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.driver.driver import Driver, cards
from tests.support.gpu_node import GpuNode
from tests.support.programs import PYTHON_PATH, eventually, inherited
from trainmedic.wire import envelope
from trainmedic.wire.signing import Signer

POLICY = """
allow: [gpu.power_limit, disk.clean]
cleaning:
  rules:
    scratch: {{roots: [{root}/scratch, {root}/missing], globs: ["*.tmp"], min_age: 1d}}
"""
NO_REDIS = "redis://127.0.0.1:1/0"


def agent(
    driver: Driver, *options: str | Path, launcher: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*launcher, sys.executable, "-m", "trainmedic_server", "agent", *map(str, options)],
        env={**inherited(), "PYTHONPATH": PYTHON_PATH, **driver.environment, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY.format(root=tmp_path))
    return file


def told(driver: Driver, *options: str | Path, status: int = 0, **more: Any) -> Mapping[str, Any]:
    done = agent(driver, "check", "--json", *options, **more)
    assert done.returncode == status, done.stderr
    report: Mapping[str, Any] = json.loads(done.stdout)
    return report


def test_it_warns_if_reads_do_not_update_access_times(tmp_path: Path, policy: Path, driver: Driver) -> None:
    """The root is on a filesystem mounted with noatime, but the rule's ages depend on access times."""
    launcher = (
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o noatime none "$0"; "$@"',
    )
    if subprocess.run([*launcher, str(tmp_path / "scratch"), "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount in a namespace of his own")
    options = ("--json", "--policy", policy, "--state-dir", tmp_path / "state", "--redis", NO_REDIS, "--node", "n1")
    done = agent(driver, "check", *options, launcher=(*launcher, str(tmp_path / "scratch")))
    warnings = [text for text in json.loads(done.stdout)["warnings"] if "leave no trace" in text]
    assert [text.partition(" (")[2].partition(")")[0] for text in warnings] == ["mounted noatime"]


@pytest.mark.skipif(os.geteuid() != 0, reason="who may not set power limits is told so, and ends with 1")
def test_it_shows_what_the_node_offers(tmp_path: Path, policy: Path, driver: Driver, redis_url: str) -> None:
    """It lists GPUs with limits, actions, and rules with roots; a missing root causes only a warning."""
    given = ("--policy", policy, "--state-dir", tmp_path / "state", "--redis", redis_url, "--node", "n1")
    report = told(driver, *given, TRAINMEDIC_SIGNING_KEY="a key of sixteen or more characters")
    assert report["actions"] == ["disk.clean", "gpu.power_limit", "logs.read", "node.facts", "node.health"]
    assert [gpu["uuid"] for gpu in report["gpus"]] == [card.uuid for card in driver.cards]
    assert report["gpus"][0]["max_limit_watts"] == 700
    assert report["power"] == {"is_allowed": True, "floor_percent": 50, "max_lease": "15m", "may_set": True}
    roots = report["rules"]["scratch"]["roots"]
    assert roots[str(tmp_path / "scratch")] is None
    assert "No such file" in roots[str(tmp_path / "missing")]
    assert report["redis"] == {"is_reachable": True, "agent": None}
    assert report["signing_key"] is True
    assert report["errors"] == []
    assert any("missing" in one for one in report["warnings"])
    assert driver.sets() == []
    assert not (tmp_path / "state").exists()
    shown = agent(driver, *given, "check")
    assert shown.returncode == 0
    assert f"{driver.cards[0].uuid}  NVIDIA H100 80GB HBM3  700 W of 200 to 700 W, default 700 W" in shown.stdout
    assert "Warning: no signing key is set" in shown.stdout


def test_it_names_missing_requirements_of_repairs(tmp_path: Path, driver: Driver) -> None:
    """These are programs and the engine's socket."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "allow: [node.restart_unit, node.restart_container, gpu.reset, node.reboot]\n"
        f"restart: {{units: [a.service], containers: [a], socket: {tmp_path}/none}}\n"
    )
    given = ("--policy", policy, "--redis", NO_REDIS, "--state-dir", tmp_path)
    errors = " ".join(told(driver, *given, status=1, PATH="/nonexistent")["errors"])
    for program in ("systemctl", "nvidia-smi", "shutdown"):
        assert f"there is no program {program} in PATH" in errors
    assert f"no container engine listens at {tmp_path}/none" in errors


def test_an_error_in_the_policy_is_shown_with_its_position(tmp_path: Path, policy: Path, driver: Driver) -> None:
    """The position is file, line and column; the rest is checked all the same."""
    policy.write_text(policy.read_text().replace("min_age", "min_ages"))
    report = told(driver, "--policy", policy, "--redis", NO_REDIS, "--state-dir", tmp_path, status=1)
    assert any(one.startswith(f"{policy}:5:") and "did you mean 'min_age'?" in one for one in report["errors"])
    assert len(report["gpus"]) == len(driver.cards)


def test_a_missing_slurm_command_is_an_error(tmp_path: Path, driver: Driver) -> None:
    """This holds even if scontrol, here a script, answers."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\n")
    scontrol.chmod(0o755)
    policy = tmp_path / "slurm.yaml"
    policy.write_text(f"allow: [slurm.cancel]\nslurm: {{commands: {tmp_path}}}\n")
    report = told(driver, "--policy", policy, "--redis", NO_REDIS, "--state-dir", tmp_path / "state", status=1)
    assert any(f"cannot run {tmp_path}/scancel" in each for each in report["errors"])


@pytest.mark.parametrize("is_genuine", [True, False])
def test_the_running_agent_is_reported_if_its_presence_is_genuine(
    tmp_path: Path, policy: Path, driver: Driver, redis_url: str, is_genuine: bool
) -> None:
    """A signing key is set. A presence written by another process is not an agent."""
    key = envelope.agent_presence("n1")
    now = envelope.write_time(datetime.now(UTC))
    raw = json.dumps({"node": "n1", "host": "here", "pid": 4242, "version": "0.1.0", "at": now}).encode()
    with redis.Redis.from_url(redis_url) as client:
        client.set(key, Signer.of(b"a key of sixteen or more characters").seal(raw, key) if is_genuine else raw)
    given = ("--node", "n1", "--policy", policy, "--redis", redis_url, "--state-dir", tmp_path / "state")
    report = told(driver, *given, TRAINMEDIC_SIGNING_KEY="a key of sixteen or more characters")
    assert (report["redis"]["agent"] is not None) == is_genuine


def healthy(driver: Driver, *options: str) -> subprocess.CompletedProcess[str]:
    return agent(driver, "health", *options)


def test_a_node_is_healthy_if_every_gpu_is_usable(driver: Driver) -> None:
    """Neither Redis nor a policy is needed: playbooks run it without them. Each GPU has its line."""
    done = healthy(driver, f"--gpus={len(driver.cards)}")
    assert (done.returncode, "Fault: " in done.stderr) == (0, False)
    listed = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("GPU ")]
    assert listed == [card.uuid for card in driver.cards]


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        ("lost", "Fault: "),
        ("ecc", "2 uncorrectable memory errors since the reset"),
        ("asked for", "the driver requests: drain_and_reset"),
        ("missing", "GPUs respond; expected: 3 or more"),
        ("hangs", "is stuck: a driver call has not returned"),
        ("unloaded", "Fault: "),
    ],
)
def test_a_node_with_a_broken_gpu_is_unhealthy(driver: Driver, trouble: str, told: str) -> None:
    """GPUs that are silent, missing or have broken memory are named, and the exit status is 1."""
    expected = len(driver.cards)
    match trouble:
        case "lost":
            driver.lose(0)
        case "ecc":
            driver.ecc(0, 0, 2)
        case "asked for":
            driver.ask_for(0, 4)
        case "missing":
            expected += 1
        case "hangs":
            driver.fail("nvmlDeviceGetUUID", gpu=0, hang=True)
        case "unloaded":
            driver.unload()
    done = healthy(driver, f"--gpus={expected}")
    assert done.returncode == 1
    assert told in done.stderr
    assert "this node is not healthy" in done.stderr


def test_unavailable_redis_has_a_status_of_its_own(tmp_path: Path, driver: Driver) -> None:
    """It is 3, as for every command that cannot reach a service. The password is not shown."""
    done = agent(driver, "check", "--redis", "redis://:secret@127.0.0.1:1/0", "--state-dir", tmp_path)
    assert done.returncode == 3
    assert "Redis cannot be used: ConnectionError: Error 111" in done.stderr
    assert "secret" not in done.stdout + done.stderr


def test_what_the_policy_allows_but_the_user_may_not_do_is_an_error(
    tmp_path: Path, policy: Path, driver: Driver, redis_url: str
) -> None:
    """Examples: a power limit without privilege, a root that is a link, a state directory that is a file."""
    (tmp_path / "missing").symlink_to(tmp_path / "scratch")
    launcher = ("setpriv", "--bounding-set", "-sys_admin,-lease") if os.geteuid() == 0 else ()
    given = ("--policy", policy, "--redis", redis_url, "--state-dir", policy)
    report = told(driver, *given, status=1, launcher=launcher)
    power, root, state = report["errors"]
    assert "needs CAP_SYS_ADMIN" in power
    assert "is a symbolic link" in root
    assert "cannot be used" in state
    assert any("CAP_LEASE" in one for one in report["warnings"])


def test_a_wrong_setting_ends_with_2(driver: Driver) -> None:
    """All commands use this status."""
    assert agent(driver, "check", "--redis", "http://x").returncode == 2


def test_a_running_agent_is_detected_and_left_alone(
    tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver]
) -> None:
    """The check identifies it and reports that its policy differs from the file. Releasing its caps is
    refused while it runs, and done when it is stopped."""
    with GpuNode(tmp_path / "node", redis_url, make_driver(2)) as node:
        given = ("--node", "n1", "--redis", redis_url, "--state-dir", node.state)
        cap = node.send(node.cap("1", percent=80))
        assert node.final(cap).status == envelope.APPLIED
        report = told(node.driver, *given)
        assert report["redis"]["agent"]["pid"] == node.agent.process.pid
        assert any("started with another policy: restart it" in one for one in report["warnings"])
        refused = agent(node.driver, "release", *given)
        assert (refused.returncode, node.driver.watts(1)) == (2, 560)
        assert "another agent is running" in refused.stderr
        node.agent.end()
        assert node.driver.watts(1) == 560
        released = agent(node.driver, "release", *given)
        assert (released.returncode, node.driver.watts(1)) == (0, 700)
        assert released.stdout == f"{cards(2)[1].uuid}: 700 W, was 560 W\n"
        assert agent(node.driver, "release", *given).stdout == "No GPU of this node is capped.\n"
        node.start()
        undone = node.final(node.send(node.cap("1", undo_of=cap.id)))
        assert undone.output["nothing_to_undo"] is True


def test_power_limits_that_cannot_be_restored_are_reported(
    tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver]
) -> None:
    """The driver is missing: status 1, and the next attempt succeeds."""
    with GpuNode(tmp_path / "node", redis_url, make_driver(1)) as node:
        node.final(node.send(node.cap("0", percent=80)))
        node.agent.end()
        node.driver.unload()
        failed = agent(node.driver, "release", "--state-dir", node.state)
        assert failed.returncode == 1
        assert "not loaded" in failed.stdout
        node.driver.reload()
        assert agent(node.driver, "release", "--state-dir", node.state).returncode == 0
        assert node.driver.watts(0) == 700


def test_a_root_in_the_agents_state_directory_is_an_error(tmp_path: Path, policy: Path, driver: Driver) -> None:
    """The check finds and names it; a cleanup rejects it too."""
    given = ("--policy", policy, "--state-dir", tmp_path, "--redis", NO_REDIS)
    done = agent(driver, "check", *given)
    assert done.returncode == 1
    assert f"{tmp_path} is the agent's state directory" in done.stderr


def test_a_removed_gpu_is_forgotten(tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver]) -> None:
    """Its record outlives the agent: it is missing, with its last error, until a user declares it removed.
    Not while the agent runs; and a name that is none says which there are."""
    with GpuNode(tmp_path / "node", redis_url, make_driver(2)) as node:
        gone, given = cards(2)[0], ("--state-dir", node.state)

        def shown(line: str) -> bool:
            with urllib.request.urlopen(node.exporter(), timeout=60) as reply:
                return line in reply.read().decode()

        labels = f'gpu_id="0",gpu_name="{gone.name}",uuid="{gone.uuid}"'
        error = f'gpu_xid_errors_total{{action="restart_node",{labels},xid="79"}} 1.0'
        assert shown(f"gpu_present{{{labels}}} 1.0")
        node.driver.xid(0, 79)
        assert eventually(lambda: shown(error), 60, "the error")
        refused = agent(node.driver, "forget", gone.uuid, *given)
        assert (refused.returncode, "another agent is running" in refused.stderr) == (2, True)
        node.agent.end()
        node.driver.remove(0)
        node.start()
        assert eventually(lambda: shown(f"gpu_present{{{labels}}} 0.0"), 60, "that it is missed")
        assert shown(error)
        node.agent.end()
        unknown = agent(node.driver, "forget", "GPU-none", *given)
        assert (unknown.returncode, gone.uuid in unknown.stderr) == (2, True)
        done = agent(node.driver, "forget", gone.uuid.upper(), *given)
        assert done.stdout == f"forgotten: GPU 0 {gone.uuid} {gone.name}\n"
        node.start()
        assert not shown(gone.uuid)
