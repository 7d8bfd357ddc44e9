"""Clients that try to take the agent's open files by its exporter, while it carries out a command."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import urllib.request
from pathlib import Path

from tests.attack.effort import trials
from tests.attack.siege import allow_many_files
from tests.support.agent_node import Node
from tests.support.programs import eventually

SLOW_CLIENTS = trials(400, 1500)
ROUNDS = trials(1, 30)
OPEN_FILES = 128
"""Fewer than the clients: the agent must not need one for each."""

POLICY = """\
allow: [disk.clean]
cleaning:
  rules:
    old:
      roots: [{root}]
      globs: ["**"]
      min_age: 1h
      age_by: modified
"""


class LimitedNode(Node):
    """A node whose agent, with its real executors, may open few files."""

    def _launcher(self) -> tuple[str | Path, ...]:
        return "/bin/sh", "-c", f'ulimit -n {OPEN_FILES} && exec "$@"', "sh"

    def _entry(self) -> tuple[str | Path, ...]:
        return "-m", "trainmedic_server"

    def exporter_port(self) -> int:
        lines = (json.loads(line) for line in self.agent.log.read_text().splitlines())
        return int(next(line["port"] for line in lines if line["event"] == "metrics"))


def test_many_slow_clients_take_no_descriptor_from_a_command(tmp_path: Path, redis_url: str) -> None:
    """A cleaning completes, Prometheus is answered, every log line is JSON, and no file stays open."""
    allow_many_files()
    root = tmp_path / "scratch"
    root.mkdir()
    with LimitedNode(tmp_path / "node", redis_url, POLICY.format(root=root)) as node:
        pid, port = node.agent.process.pid, node.exporter_port()
        assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] == OPEN_FILES
        for _ in range(ROUNDS):
            for number in range(200):
                file = root / f"{number}.tmp"
                file.write_text("old")
                os.utime(file, (1e9, 1e9))
            with contextlib.ExitStack() as stack:
                for number in range(SLOW_CLIENTS):
                    with contextlib.suppress(OSError):
                        client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
                        client.sendall((b"", b"G", b"GET /metrics HTTP/1.1\r\nHost: ")[number % 3])
                    if number == SLOW_CLIENTS // 2:
                        command = node.send(node.command("disk.clean", rules=["old"]))
                reply = node.final(command, within=60)
                assert (reply.status, list(root.iterdir())) == ("applied", []), reply.output
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as scrape:
                    assert b"trainmedic_agent_commands_total" in scrape.read()
                assert len(list(Path(f"/proc/{pid}/fd").iterdir())) < OPEN_FILES // 2
            eventually(lambda: _threads(pid) < 30, 60, "the crowd's threads ended")
        for line in node.agent.log.read_text().splitlines():
            assert json.loads(line)["event"], line


def _threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))
