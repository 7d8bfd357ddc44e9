"""Health of a node: the real agent and server over a real Redis, on a simulated driver and a `NodeTree`."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.driver.driver import Driver, cards
from tests.support.agent_node import KEY
from tests.support.gpu_node import GpuNode
from tests.support.live import Server
from tests.support.messages import delivery
from tests.support.node_tree import PORT, NodeTree
from tests.support.programs import PYTHON_PATH, ROOT, eventually, inherited
from trainmedic.wire import envelope
from trainmedic.wire.steady_time import utc_now
from trainmedic_agent.adapters.nvml_gpus import NvmlGpus
from trainmedic_agent.health.baseline import LEAST_SAMPLES
from trainmedic_agent.health.checker import Examination, HealthChecker, RecordedHealth
from trainmedic_agent.health.record import HealthRecord
from trainmedic_agent.health.sysfs import NodeRoots
from trainmedic_agent.journal import Journal

AGENT = ROOT / "tests" / "support" / "agent_on_tree.py"
FIRST, SECOND = (card.uuid for card in cards(2))
PROBE = [sys.executable, "-m", "trainmedic.probe", "--backend", "gloo", "--sizes", "0.1,1", "--barriers", "2"]


class HealthNode(GpuNode):
    def __init__(self, directory: Path, url: str, driver: Driver, probe: list[str] | None = None) -> None:
        policy = json.dumps({"allow": [], **({"health": {"probe": probe}} if probe else {})})
        super().__init__(directory, url, driver, policy)
        self.tree = NodeTree(directory / "tree")

    def _entry(self) -> tuple[str | Path, ...]:
        return (AGENT,)

    def start(self, *options: str, wait: bool = True, **environment: str) -> None:
        super().start(*options, wait=wait, **{"NODE_TREE": str(self.tree.root), **environment})

    def health(self, **params: Any) -> Mapping[str, Any]:
        status, output = self.do("node.health", **params)
        assert status == envelope.APPLIED, output
        return output

    def verdicts(self, level: str = "quick") -> dict[tuple[str, str], str]:
        """What the exporter shows, by check and part."""
        with urllib.request.urlopen(self.exporter(), timeout=60) as reply:
            families = text_string_to_metric_families(reply.read().decode())
        labels = [one.labels for each in families if each.name == "trainmedic_agent_health" for one in each.samples]
        return {(each["check"], each["part"]): each["verdict"] for each in labels if each["level"] == level}

    def learn(self) -> None:
        """Record healthy results of some hours, as an agent would have."""
        with closing(Journal(self.state)) as journal, closing(NvmlGpus()) as gpus:
            roots = NodeRoots(self.tree.sys, self.tree.proc)
            hours = iter(range(2 * LEAST_SAMPLES, 0, -1))
            checker = HealthChecker(gpus, roots, lambda: utc_now() - timedelta(hours=next(hours)))
            recorded = RecordedHealth(checker, HealthRecord(journal))
            for _ in range(2 * LEAST_SAMPLES):
                assert recorded.examine(Examination(gpus=2)).verdict == "ok"

    def cli(self, *options: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, AGENT, "agent", "health", *map(str, options)],
            env={
                **inherited(),
                "PYTHONPATH": PYTHON_PATH,
                "NODE_TREE": str(self.tree.root),
                **self.driver.environment,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )


@pytest.fixture
def idle(tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver]) -> Iterator[HealthNode]:
    """A node whose agent has not been started."""
    node = HealthNode(tmp_path / "node", redis_url, make_driver(2), PROBE)
    yield node
    if node.program is not None:
        node.agent.end()


def test_a_degrading_part_is_found_before_an_error(idle: HealthNode) -> None:
    """It is found by the node's own record, which outlives a SIGKILL; the metric shows it without a command."""
    idle.learn()
    idle.start()
    output = idle.health(gpus=2)
    assert (output["verdict"], output["faults"], output["learning"]) == ("ok", [], [])
    idle.kill()
    idle.driver.pcie(1, replays=700)
    idle.tree.port(rate="200 Gb/sec (4X HDR)")
    idle.start()
    bad = eventually(
        lambda: {key: verdict for key, verdict in idle.verdicts().items() if verdict != "ok"}, 60, "the regular check"
    )
    assert bad == {("pcie_replays", SECOND): "degraded", ("port_rate", PORT): "degraded"}
    output = idle.health()
    assert output["verdict"] == "degraded"
    assert f"{PORT}: port_rate: 200 Gb/s; expected: 400 Gb/s or more, usually 400 Gb/s" in output["faults"]
    idle.tree.port(state="1: DOWN", phys_state="2: Polling")
    idle.tree.remount_read_only()
    output = idle.health()
    failed = [(each["name"], each["part"]) for each in output["checks"] if each["verdict"] == "failed"]
    assert (output["verdict"], failed) == ("failed", [("port_rate", PORT), ("mount_writable", "/")])


def test_the_cli_compares_with_the_record_of_a_running_agent(idle: HealthNode) -> None:
    """It also forgets a part that was changed on purpose."""
    idle.learn()
    idle.start()
    idle.tree.port(rate="200 Gb/sec (4X HDR)")
    alone = idle.cli("--gpus", "2", "--output", "json")
    assert (alone.returncode, json.loads(alone.stdout)["verdict"]) == (0, "ok")
    wrong = idle.cli("--gpus", "2", "--state-dir", "/nonexistent")
    assert (wrong.returncode, wrong.stderr) == (0, "Not compared: /nonexistent has no record of an agent\n")
    done = idle.cli("--gpus", "2", "--state-dir", idle.state)
    assert (done.returncode, done.stderr.splitlines()) == (
        0,
        [f"Degraded: {PORT}: port_rate: 200 Gb/s; expected: 400 Gb/s or more, usually 400 Gb/s"],
    )
    assert f"degraded  {PORT}: port_rate" in done.stdout
    idle.agent.end()
    forgotten = subprocess.run(
        [sys.executable, AGENT, "agent", "forget", PORT, "--state-dir", idle.state],
        env={**inherited(), "PYTHONPATH": PYTHON_PATH, "NODE_TREE": str(idle.tree.root)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert forgotten.stdout == f"forgotten: values of {PORT}\n"
    assert idle.cli("--gpus", "2", "--state-dir", idle.state).stderr == ""


def test_a_load_test_measures_memory_and_links(idle: HealthNode) -> None:
    """It runs the real probe on this machine's CPUs. Its last result survives a restart."""
    idle.start()
    output = idle.final(idle.send(idle.command("node.health", lasting=300, level="burn", gpus=2)), within=300).output
    assert output["verdict"] == "ok", output
    checks = {(each["name"], each["part"]): each for each in output["checks"]}
    assert checks["memory", "gloo rank 1"]["observed"] == "0.256 GB read back correctly"
    assert checks["all_reduce", ""]["observed"].endswith("GB/s by 2 ranks of gloo")
    assert "memory_speed gloo rank 0" in output["learning"]
    assert ("gpus", "") in checks
    idle.kill()
    idle.start()
    assert idle.verdicts("burn") == {
        ("all_reduce", ""): "ok",
        ("memory", "gloo rank 0"): "ok",
        ("memory", "gloo rank 1"): "ok",
    }


def test_a_load_test_skips_gpus_in_use(idle: HealthNode) -> None:
    """It is refused if the policy names no probe."""
    idle.driver.occupy(1, 4711)
    idle.start()
    output = idle.health(level="burn")
    assert output["verdict"] == "unknown"
    assert output["faults"] == ["burn: not readable: not run: process 4711 uses GPU 1; expected: a reading"]
    idle.agent.end()
    (idle.directory / "policy.yaml").write_text("allow: []\n")
    idle.start()
    assert idle.do("node.health", level="burn")[0] == envelope.REJECTED
    assert idle.do("node.health", level="slow")[0] == envelope.REJECTED


def standin(directory: Path, text: str) -> list[str]:
    """A probe that does what the test says."""
    program = directory / "probe.py"
    program.write_text(f"import json, os, pathlib, sys, time\nhere = pathlib.Path({str(directory)!r})\n{text}\n")
    return [sys.executable, str(program)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_load_test_ends_with_the_agent_and_resumes_with_it(
    tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver]
) -> None:
    """The probe is ended on SIGTERM. The next agent carries the command out again. The probe gets no key
    and no capability."""
    result = {
        "backend": "nccl",
        "all": {"ranks": 1, "all_reduce": []},
        "memory": [{"rank": 0, "bytes": 10**9, "bytes_per_s": 1e12, "is_right": False}],
    }
    probe = standin(
        tmp_path,
        "(here / 'environment').write_text(json.dumps(dict(os.environ)))\n"
        "(here / 'status').write_text(pathlib.Path('/proc/self/status').read_text())\n"
        "(here / 'began').write_text(str(os.getpid()))\n"
        "while not (here / 'go').exists(): time.sleep(0.05)\n"
        f"print(json.dumps({result!r}))\n",
    )
    node = HealthNode(tmp_path / "node", redis_url, make_driver(2), probe)
    began = tmp_path / "began"
    with node:
        command = node.send(node.command("node.health", lasting=300, level="burn"))
        pid = int(eventually(lambda: began.exists() and began.read_text(), 60, "the probe", every=0.02))
        node.agent.end()
        assert not is_alive(pid)
        began.unlink()
        (tmp_path / "go").touch()
        node.start()
        output = node.final(command, within=60).output
    assert output["verdict"] == "failed"
    assert output["faults"] == ["nccl rank 0: memory: 1 GB read back wrong; expected: what was written"]
    names = json.loads((tmp_path / "environment").read_text()).keys()
    assert {"PATH", "PYTHONPATH"} <= names
    assert not [name for name in names if "KEY" in name or "REDIS" in name]
    sets = [line.split() for line in (tmp_path / "status").read_text().splitlines() if line.startswith("Cap")]
    assert {int(mask, 16) for name, mask in sets if name in ("CapEff:", "CapPrm:", "CapAmb:")} == {0}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sys.stderr.write('PyTorch is not installed here'); sys.exit(3)", "PyTorch is not installed here"),
        ("sys.stderr.write('2.5 GB of GPU 0 are in use'); sys.exit(4)", "not run: 2.5 GB of GPU 0 are in use"),
        ("print('[]')", "the probe ended with status 0"),
        (None, "{program} cannot be started: Permission denied"),
    ],
)
def test_a_load_test_without_a_result_is_unknown(
    tmp_path: Path, make_driver: Callable[..., Driver], text: str | None, reason: str
) -> None:
    """It is never ok, although everything else is."""
    node = HealthNode(tmp_path / "node", "redis://127.0.0.1:1", make_driver(2))
    program = tmp_path / "probe"
    program.write_text(f"#!{sys.executable}\nimport sys\n{text}\n")
    program.chmod(0o644 if text is None else 0o755)
    done = node.cli("--level", "burn", "--probe", program, "--output", "json")
    assert done.returncode == 1
    output = json.loads(done.stdout)
    assert (output["verdict"], output["faults"]) == (
        "unknown",
        [f"burn: not readable: {reason.format(program=program)}; expected: a reading"],
    )


PLAYBOOK = """
playbook: check-node
on: {alert: Suspect}
target: node
steps:
  - {id: check, action: node.health, with: {gpus: 2}, on_error: continue}
  - id: good
    when: steps.check.output.verdict == "ok"
    action: node.facts
  - id: faulty
    when: steps.check.status != "succeeded"
    action: node.facts
"""


def test_a_playbook_branches_on_the_verdict(tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver]) -> None:
    """A node with a fault is a failed step, whose error names the fault."""
    server = Server(tmp_path / "server", PLAYBOOK, "--redis", redis_url)

    def decided(number: int) -> dict[str, Any]:
        body = delivery("Suspect", str(number))
        body["alerts"][0]["labels"] = {"alertname": "Suspect", "node": "n1", "number": str(number)}
        (run,) = server.ask("/webhook", body).body["runs"]
        closed: dict[str, Any] = eventually(
            lambda: (each := server.run(run["run_id"]))["status"] == "succeeded" and each, 60, "closed", 0.05
        )
        return {step["id"]: step for step in closed["steps"]}

    try:
        with HealthNode(tmp_path / "node", redis_url, make_driver(2)) as node:
            server.start(TRAINMEDIC_SIGNING_KEY=KEY)
            eventually(lambda: server.ask("/agents").body["items"], 60, "the agent is known")
            steps = decided(1)
            assert [steps[name]["status"] for name in ("check", "good", "faulty")] == [
                "succeeded",
                "succeeded",
                "skipped",
            ]
            node.driver.ecc(1, 0, 3)
            steps = decided(2)
            assert [steps[name]["status"] for name in ("check", "good", "faulty")] == ["failed", "skipped", "succeeded"]
            assert f"{SECOND}: gpu_ecc: 3 uncorrectable memory errors" in steps["check"]["error"]
    finally:
        if server.program is not None:
            server.program.end()
