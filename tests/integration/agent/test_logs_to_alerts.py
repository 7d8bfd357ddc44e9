"""From a line on a node to the run of a playbook: a real agent, a real server and a real Redis, with shipped rules."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

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


def test_an_xid_in_the_kernels_log_becomes_one_run_for_its_gpu(tmp_path: Path, redis_server: RedisServer) -> None:
    """Within seconds, also where agent, server and Redis are killed between the line and the run; what was in the log
    from yesterday has none."""
    kern = tmp_path / "logs" / "kern.log"
    kern.parent.mkdir()
    kern.write_text("2020-01-01T00:00:00.000000+00:00 n1 kernel: NVRM: Xid (PCI:0000:20:00): 79, pid=1, old\n")
    options = ("--redis", redis_server.url)
    with (
        Server(tmp_path / "server", PLAYBOOK, *options, environment={"TRAINMEDIC_SIGNING_KEY": KEY}) as server,
        LogNode(tmp_path / "node", redis_server.url, kernel=str(kern)) as node,
    ):
        eventually(lambda: 'rules_info{version=""}' not in node.metrics(), 30, "rules from the server")
        time.sleep(2)
        with kern.open("a") as file:
            file.write(kernel_line("NVRM: Xid (PCI:0000:18:00): 79, pid=1, name=python, GPU has fallen off the bus."))
        node.kill()
        redis_server.kill()
        server.kill()
        redis_server.start()
        server.start()
        node.start()
        (run,) = eventually(server.runs, 30, "a run")
        assert (run["node"], run["gpu"]) == ("n1", node.driver.cards[0].uuid)
        time.sleep(3)
        assert len(server.runs()) == 1
        findings = {item["gpu"]: item for item in server.ask("/findings").body["items"]}
        assert findings.keys() == {card.uuid for card in node.driver.cards}
        old = findings[node.driver.cards[1].uuid]
        assert "before the node was booted" in old["no_alert_because"]
