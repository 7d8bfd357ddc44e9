"""From a line on a node to the run of a playbook: a real agent, a real server and a real Redis, with shipped rules."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.conftest import RedisServer
from tests.support.agent_node import KEY
from tests.support.live import Server
from tests.support.log_node import LogNode
from tests.support.programs import eventually

PLAYBOOK = """
playbook: look-at-gpu
on: {alert: GPUXidLogged}
mode: observe
target: gpu
steps: [{id: tell, action: notify, with: {message: "look at {{ target.gpu }}"}}]
"""


def kernel_line(text: str) -> str:
    return f"{datetime.now(UTC).isoformat(timespec='microseconds')} n1 kernel: {text}\n"


def test_an_xid_in_the_kernel_log_becomes_one_run_for_its_gpu(tmp_path: Path, redis_server: RedisServer) -> None:
    """Within seconds, also if agent, server and Redis are killed between the line and the run; what was in the log
    from yesterday has none."""
    kern = tmp_path / "logs" / "kern.log"
    kern.parent.mkdir()
    kern.write_text("2020-01-01T00:00:00.000000+00:00 n1 kernel: NVRM: Xid (PCI:0000:20:00): 79, pid=1, old\n")
    options = ("--redis", redis_server.url)
    with (
        Server(tmp_path / "server", PLAYBOOK, *options, environment={"TRAINMEDIC_SIGNING_KEY": KEY}) as server,
        LogNode(tmp_path / "node", redis_server.url, kernel=str(kern)) as node,
    ):
        eventually(lambda: 'rules_info{version=""}' not in node.metrics(), 90, "rules from the server")
        time.sleep(2)
        with kern.open("a") as file:
            file.write(kernel_line("NVRM: Xid (PCI:0000:18:00): 79, pid=1, name=python, GPU has fallen off the bus."))
        node.kill()
        redis_server.kill()
        server.kill()
        redis_server.start()
        server.start()
        node.start()
        (run,) = eventually(server.runs, 90, "a run")
        assert (run["node"], run["gpu"]) == ("n1", node.driver.cards[0].uuid)
        time.sleep(3)
        assert len(server.runs()) == 1
        findings = {item["gpu"]: item for item in server.ask("/findings").body["items"]}
        assert findings.keys() == {card.uuid for card in node.driver.cards}
        old = findings[node.driver.cards[1].uuid]
        assert "before the node was booted" in old["no_alert_because"]


def test_steps_that_wait_for_data_are_one_finding_that_ends(tmp_path: Path, redis_server: RedisServer) -> None:
    """It needs only the trainer's own figures, without the SDK; its alert fires while it lasts."""
    log = tmp_path / "logs" / "train.log"
    log.parent.mkdir()
    step = "Epoch: [1][{0}/5005]\tTime  {1:.2f} ( 8.1)\tData  {2:.2f} ( 8.0)\tLoss 1.2e+00 (1.0e+00)\n"
    options = ("--redis", redis_server.url)
    with (
        Server(tmp_path / "server", PLAYBOOK, *options, environment={"TRAINMEDIC_SIGNING_KEY": KEY}) as server,
        LogNode(tmp_path / "node", redis_server.url, files=[str(log)]) as node,
    ):
        eventually(lambda: 'rules_info{version=""}' not in node.metrics(), 90, "rules from the server")
        log.write_text("".join(step.format(at, 8.7, 8.6) for at in range(60)))

        def waits() -> list[dict[str, Any]]:
            items = server.ask("/findings").body["items"]
            return [item for item in items if item["rule"] == "waits-for-data"]

        (item,) = eventually(waits, 90, "a finding")
        assert (item["cause"], item["role"], item["ended_at"]) == ("data", "confirmation", None)
        assert item["alert"]["labels"]["alertname"] == "TrainingWaitsForData"
        assert item["alert"]["labels"]["needs"] == "people"
        with log.open("a") as file:
            file.write("".join(step.format(60 + at, 0.5, 0.01) for at in range(60)))
        eventually(lambda: [item for item in waits() if item["ended_at"]], 90, "the end of the finding")
        assert len(waits()) == 1
