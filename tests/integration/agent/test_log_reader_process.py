"""The process that reads logs, apart from the agent that acts: killed, stopped, and hostile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.agent_idle import memory
from tests.integration.agent.test_log_reading import append
from tests.support.log_node import LogNode
from tests.support.programs import PYTHON_PATH, Program, eventually
from trainmedic.wire.log_layout import AttemptLogs
from trainmedic_agent.log_link import link_socket, reader_process
from trainmedic_agent.log_link.messages import LARGEST_OF_READER
from trainmedic_logs.diagnosis.flight_recorder import digest

_HOSTILE = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
try:
    connection.sendall(sys.stdin.buffer.read())
    while connection.recv(65536):
        pass
except OSError:
    pass
"""
PUBLISHED = Path(__file__).parents[2] / "unit" / "diagnosis" / "nvidia_dumps" / "lock_gil_1st"
_NOBODY = 65534
_AGENT, _READER, _TENANT = 20_001, 20_002, 20_003
"""Users that no machine has."""
LONG = 90.0
"""Seconds within which something must happen, however busy the machine is."""
CAP = {"watts": 500.0, "lease_seconds": 600}


class ActingNode(LogNode):
    """A node that reads logs, and whose agent may cap its GPUs."""

    def __init__(self, directory: Path, url: str, **logs: object) -> None:
        super().__init__(directory, url, **logs)
        policy = self._policy.read_text().replace("allow: []", "allow: [gpu.power_limit]")
        self._policy.write_text(policy)

    def reader_pid(self) -> int | None:
        """The process id of the agent's reader, which the opener has started; None while there is none."""
        found = self.reader_pids()
        return found[-1] if found else None

    def a_reader(self, other_than: int | None = None) -> int:
        """Wait for a reader that answers the agent."""

        def ask() -> int | None:
            pid = self.reader_pid()
            return pid if pid != other_than and "trainmedic_agent_reader_up 1.0" in self.metrics() else None

        return eventually(ask, LONG, "a reader that answers", every=0.1)

    def restarts(self) -> float:
        lines = self.metrics().splitlines()
        return next(
            float(line.split()[1]) for line in lines if line.startswith("trainmedic_agent_reader_restarts_total")
        )

    def caps_a_gpu(self) -> None:
        """A power command is carried out."""
        command = self.send(self.cap("0", lasting=120.0, **CAP))
        assert self.final(command, within=LONG).status == "applied"


@pytest.fixture
def node(tmp_path: Path, redis_url: str) -> Iterator[ActingNode]:
    (tmp_path / "logs").mkdir()
    with ActingNode(tmp_path / "node", redis_url, files=[f"{tmp_path}/logs/{{job}}.log"]) as node:
        node.hand_out()
        node.has_rules()
        yield node


def _searched(node: ActingNode) -> str:
    command = node.command("logs.read", lasting=120.0, job="a", since="2020-01-01T00:00:00.000000Z")
    return node.final(node.send(command), within=LONG).status


@pytest.mark.parametrize(
    ("who", "how"),
    [
        ("reader", signal.SIGKILL),
        ("reader", signal.SIGSTOP),
        ("opener", signal.SIGSTOP),
        ("parsers", signal.SIGKILL),
    ],
)
def test_commands_are_not_affected_by_the_loss_of_the_reader(
    node: ActingNode, tmp_path: Path, who: str, how: signal.Signals
) -> None:
    """The reader restarts by itself, loses and repeats no line, and answers searches again."""
    path = tmp_path / "logs" / "a.log"
    append(path, "MARK 1\n")
    node.found(1, within=LONG)
    reader = node.a_reader()
    killed = {"reader": reader, "opener": node.reader_pids()[0], "parsers": node.parser_pids()[0]}
    os.kill(killed[who], how)
    node.caps_a_gpu()
    append(path, "MARK 2\n")
    node.caps_a_gpu()
    # Until the agent has noticed, the opener alone is there, and the reader counts as up.
    eventually(lambda: node.restarts() >= 1, LONG, "a start of another reader", every=0.1)
    assert node.a_reader(other_than=reader) != reader
    found = node.found(1, 2, within=LONG)
    assert [found[mark].finding.count for mark in ("1", "2")] == [1, 1]
    assert len({update.finding.id for update in node.updates()}) == 2
    assert _searched(node) == "applied"


def test_the_reader_has_no_secret_and_no_privileges(node: ActingNode) -> None:
    """It holds and can gain no capability; its environment has neither the key nor Redis's address."""
    reader = node.a_reader()
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{reader}/status").read_text().splitlines() if ":\t" in line
    )
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert int(status[name], 16) == 0, name
    assert status["NoNewPrivs"] == "1"
    environment = Path(f"/proc/{reader}/environ").read_bytes()
    assert b"TRAINMEDIC_" not in environment
    assert b"redis" not in environment


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process under another user")
@pytest.mark.parametrize("named", [None, str(_NOBODY)])
def test_logs_are_read_by_a_separate_user(redis_url: str, named: str | None) -> None:
    """A root agent lets them be read by a user without rights, also if none is named; the opener passes the files.

    A metric says so.
    """
    uid = reader_process.reader_user(named).uid
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        top.chmod(0o755)
        (top / "logs").mkdir(mode=0o700)
        append(top / "logs" / "a.log", "MARK 1\n")
        (top / "logs" / "a.log").chmod(0o600)
        node = ActingNode(top / "node", redis_url, files=[f"{top}/logs/{{job}}.log"])
        node.start(*(("--reader-user", named) if named is not None else ()))
        try:
            if "reading logs as the agent's own user" in node.agent.log.read_text():
                pytest.skip("root may not change the user here")
            node.hand_out()
            node.found(1, within=LONG)
            reader = node.a_reader()
            assert Path(f"/proc/{reader}").stat().st_uid == uid
            assert "trainmedic_agent_reader_own_user 1.0" in node.metrics()
            assert _searched(node) == "applied"
            assert {path.stat().st_uid for path in (node.state / "reader").iterdir()} == {uid}
        finally:
            node.agent.end()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process under another user")
def test_dumps_are_read_wherever_python_is_installed(redis_url: str) -> None:
    """The reader may be unable to execute Python. The parsing process is forked, without any rights."""
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        top.chmod(0o755)
        attempt = AttemptLogs.of(top / "logs", "llm-1", 1)
        for path in (attempt.launcher("n1"), attempt.dump(0)):
            path.parent.mkdir(parents=True, exist_ok=True)
        attempt.launcher("n1").write_text("started\n")
        attempt.dump(0).write_bytes((PUBLISHED / "_dump_0").read_bytes())
        node = ActingNode(top / "node", redis_url, roots=[str(top / "logs")])
        node.start("--reader-user", str(_NOBODY))
        try:
            node.hand_out()

            def excerpts() -> list[str]:
                told = [update for update in node.updates() if update.finding.rule == digest.RULE]
                return [line for update in told if update.excerpt is not None for line in update.excerpt.lines]

            dumps, refused = digest.read(eventually(excerpts, LONG, "a finding of the dump", every=0.2), None)
            assert ([each.rank for each in dumps], refused) == ([0], {})
            (parsers,) = node.parser_pids()[:1]
            status = Path(f"/proc/{parsers}/status").read_text()
            assert "CapEff:\t0000000000000000" in status
            assert Path(f"/proc/{parsers}").stat().st_uid == Path(f"/proc/{node.a_reader()}").stat().st_uid
        finally:
            node.agent.end()


@pytest.fixture
def waiting_agent(tmp_path: Path, redis_url: str) -> Iterator[ActingNode]:
    """An agent whose reader something else starts: here nothing does."""
    node = ActingNode(tmp_path / "node", redis_url, files=[f"{tmp_path}/logs/{{job}}.log"])
    node.start("--reader", "external")
    try:
        yield node
    finally:
        node.agent.end()


def test_hostile_readers_cost_the_agent_neither_memory_nor_commands(waiting_agent: ActingNode) -> None:
    """Repeated frames that are huge, endless or of wrong types: the agent's memory stays within 10 MB."""
    node = waiting_agent
    hostile = [
        struct.pack(">I", LARGEST_OF_READER + 1),
        struct.pack(">I", 2**32 - 1) + b"x" * 65536,
        struct.pack(">I", LARGEST_OF_READER) + b"\x91" * LARGEST_OF_READER,
        struct.pack(">I", LARGEST_OF_READER) + b"\xc6\xff\xff\xff\xff" + b"x" * (LARGEST_OF_READER - 5),
        struct.pack(">I", 100) + b"\x80" * 100,
    ]
    before = 0.0
    for turn in range(20):
        for frames in hostile:
            _play(node, frames)
        if turn == 4:
            node.caps_a_gpu()
            before = memory(node.agent.process.pid)["VmRSS"]
    node.caps_a_gpu()
    assert memory(node.agent.process.pid)["VmRSS"] - before < 10
    events = [json.loads(line)["event"] for line in node.agent.log.read_text().splitlines() if line.startswith("{")]
    assert "ending log reader: protocol violation" in events
    assert "link to the log reader continues after an unexpected error" not in events


def _play(node: ActingNode, frames: bytes) -> None:
    """Be a reader that sends these bytes, in a process of its own, because the agent ends it."""
    # The directory's own path may be too long for the name of a socket.
    command = [sys.executable, "-S", "-c", _HOSTILE, link_socket.NAME]
    subprocess.run(command, input=frames, cwd=node.state, check=False, timeout=LONG)


_OPENERS = "+setuid,+setgid,+dac_read_search"
_BOUND = f"--bounding-set=-all,{_OPENERS}"
PLACES = {
    "chart": (
        ("--bounding-set=-all", "--inh-caps=-all", f"--groups={_READER}"),
        (_BOUND, "--inh-caps=-all", "--clear-groups"),
    ),
    "unit": (
        (f"--reuid={_AGENT}", f"--regid={_AGENT}", f"--groups={_READER}", "--bounding-set=-all", "--inh-caps=-all"),
        (
            *(f"--reuid={_READER}", f"--regid={_READER}", "--clear-groups", _BOUND),
            *(f"--inh-caps=-all,{_OPENERS}", f"--ambient-caps=-all,{_OPENERS}"),
        ),
    ),
}
"""What agent and reader have in the chart's containers, and by the units of systemd: options of setpriv(1)."""


class PlacedNode(ActingNode):
    """Its agent has no more rights than `options` leave."""

    options: tuple[str, ...] = ()

    def _launcher(self) -> tuple[str | Path, ...]:
        return "setpriv", "--no-new-privs", *self.options


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give processes these users and rights")
@pytest.mark.parametrize("place", PLACES)
def test_an_externally_started_reader(redis_url: str, place: str) -> None:
    """With the rights of chart and units, another user's log is read, also by the next agent."""
    for_agent, for_reader = PLACES[place]
    for options in (for_agent, for_reader):
        command = ["setpriv", *options, sys.executable, "-c", "import trainmedic_server, redis"]
        environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
        if shutil.which("setpriv") is None or subprocess.run(command, env=environment, check=False).returncode:
            pytest.skip("these users and rights cannot be had here")
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        top.chmod(0o755)
        (top / "logs").mkdir(mode=0o700)
        append(top / "logs" / "a.log", "MARK 1\n")
        (top / "logs" / "a.log").chmod(0o600)
        for path in (top / "logs", top / "logs" / "a.log"):
            os.chown(path, _TENANT, _TENANT)
        node = PlacedNode(top / "node", redis_url, files=[f"{top}/logs/{{job}}.log"])
        node.options = for_agent
        if place == "unit":
            os.chown(node.directory, _AGENT, _AGENT)
        external = ("--reader", "external", "--reader-user", str(_READER))
        node.start(*external)
        command = ["setpriv", "--no-new-privs", *for_reader, sys.executable, "-m", "trainmedic_server", "agent-reader"]
        command += ["--state-dir", str(node.state), "--reader-user", str(_READER)]
        try:
            with Program(command, top / "reader.log", {"PYTHONPATH": PYTHON_PATH}):
                node.hand_out()
                node.found(1, within=LONG)
                node.agent.end()
                append(top / "logs" / "a.log", "MARK 2\n")
                node.start(*external)
                assert node.found(2, within=LONG).keys() == {"1", "2"}
                assert _searched(node) == "applied"
        finally:
            node.agent.end()
