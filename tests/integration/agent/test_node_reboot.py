"""``node.reboot`` by a real server and a real agent. The machine is not restarted: a script in place of ``shutdown``
writes down what it was asked, and the test ends the agent, changes the boot ID's file and starts the agent again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agent_node import KEY, Node
from tests.support.live import Server
from tests.support.messages import delivery
from tests.support.programs import ROOT, eventually
from tests.support.repairs import program
from trainmedic.wire import envelope

POLICY = "allow: [node.reboot]\n"
PLAYBOOK = """\
playbook: restart
on: {alert: NodeStuck}
target: node
steps:
  - {id: restart, action: node.reboot, timeout: 5m}
"""
ASKED = "-r +1 Trainmedic repairs this node"


class RebootableNode(Node):
    ends_by = ""  # end of the script in place of ``shutdown``

    def boots(self, number: int) -> None:
        (self.directory / "boot").write_text(f"boot-{number}")

    def has_read_boot(self) -> bool:
        return (self.directory / f"read-{self.agent.process.pid}").exists()

    def asked(self) -> list[str]:
        path = self.directory / "asked"
        return path.read_text().splitlines() if path.exists() else []

    def start(self, *options: str, wait: bool = True, **environment: str) -> None:
        programs = self.directory / "programs"
        programs.mkdir(exist_ok=True)
        program(programs / "shutdown", f'echo "$@" >> {self.directory / "asked"}; {self.ends_by}')
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        super().start(*options, wait=wait, PATH=path, BOOT_ID=str(self.directory / "boot"), **environment)

    def _entry(self) -> tuple[str | Path, ...]:
        return (ROOT / "tests" / "support" / "agent_with_boot.py",)


@pytest.fixture
def node(tmp_path: Path, redis_url: str) -> Iterator[RebootableNode]:
    made = RebootableNode(tmp_path / "node", redis_url, POLICY)
    made.boots(1)
    with made:
        yield made


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_agent_of_the_next_boot_answers(node: RebootableNode, end: signal.Signals) -> None:
    """However the last boot's agent ended, the system was asked to reboot only once."""
    command = node.send(node.command("node.reboot", lasting=120))
    eventually(node.asked, 60, "shutdown was asked", every=0.02)
    node.agent.process.send_signal(end)
    node.agent.process.wait(30)
    assert [reply.status for reply in node.replies(command.id) if reply.is_final] == []
    node.boots(2)
    node.start()
    reply = node.final(command, within=60)
    assert reply.status == envelope.APPLIED, reply.output
    assert (reply.output["boot_id_before"], reply.output["boot_id"]) == ("boot-1", "boot-2")
    assert node.asked() == [ASKED]


def test_a_restart_of_the_agent_is_not_a_reboot(node: RebootableNode) -> None:
    """The agent keeps waiting, without asking again."""
    command = node.send(node.command("node.reboot", lasting=120))
    eventually(node.asked, 60, "shutdown was asked", every=0.02)
    node.kill()
    node.start()
    eventually(node.has_read_boot, 60, "the restarted agent has resumed", every=0.02)
    assert not any(reply.is_final for reply in node.replies(command.id))
    node.boots(2)
    assert node.final(command, within=60).status == envelope.APPLIED
    assert node.asked() == [ASKED]


def test_an_approved_run_succeeds_after_the_reboot(tmp_path: Path, redis_url: str, node: RebootableNode) -> None:
    """Also if the server is killed during the reboot."""
    options = ("--redis", redis_url)
    server = Server(tmp_path / "server", PLAYBOOK, *options, environment={"TRAINMEDIC_SIGNING_KEY": KEY})
    fired = delivery("NodeStuck", "any")
    fired["alerts"][0]["labels"] = {"alertname": "NodeStuck", "node": "n1"}
    with server:
        assert server.ask("/webhook", fired).status == 200
        eventually(lambda: server.only_run()["status"] == "awaiting_approval", 60, "the question", 0.1)
        assert node.asked() == []
        run_id = server.only_run()["run_id"]
        assert server.ask(f"/runs/{run_id}/approve", {"note": "go on"}).status == 200
        eventually(node.asked, 60, "shutdown was asked", every=0.02)
        node.kill()
        server.kill()
        node.boots(2)
        server.start()
        node.start()
        run = server.closed_run(60)
        assert run["status"] == "succeeded", run
        assert run["steps"][-1]["output"]["boot_id"] == "boot-2"
        assert node.asked() == [ASKED]


def test_a_reboot_that_may_still_come_has_an_unknown_outcome(tmp_path: Path, redis_url: str) -> None:
    """The program is killed after the request. The step does not ask again."""
    node = RebootableNode(tmp_path / "node", redis_url, POLICY)
    node.ends_by = "kill -9 $$"
    node.boots(1)
    playbook = PLAYBOOK.replace("playbook: restart", "playbook: restart\nmode: enforce")
    server = Server(tmp_path / "server", playbook, "--redis", redis_url, environment={"TRAINMEDIC_SIGNING_KEY": KEY})
    fired = delivery("NodeStuck", "any")
    fired["alerts"][0]["labels"] = {"alertname": "NodeStuck", "node": "n1"}
    with node, server:
        assert server.ask("/webhook", fired).status == 200
        run = server.closed_run(60)
    (attempt,) = run["steps"][-1]["attempts"]
    assert (run["status"], attempt["status"]) == ("failed", "unknown"), run
    assert "signal 9 ended it; it may have had an effect" in run["message"]
    assert node.asked() == [ASKED]
