"""An agent that reads logs, as a real process over a real Redis: what reaches the server, and what a kill changes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis

from tests.conftest import RedisServer
from tests.support.log_node import RULE_SET, LogNode
from tests.support.long_tests import some_of
from tests.support.programs import eventually
from trainmedic.wire import log_layout
from trainmedic.wire.findings import FINDINGS
from trainmedic.wire.signing import Signer
from trainmedic_logs.domain.finding import Role
from trainmedic_logs.lines.rule import RuleSet


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


def job_directory(logs: Path, node: str = "n1") -> log_layout.AttemptLogs:
    """The first attempt of a job, with one rank on the node that has said where it is."""
    attempt = log_layout.AttemptLogs.of(logs, "llm-1", 1)
    attempt.path.mkdir(parents=True)
    said = {"version": 1, "job": "llm-1", "attempt": 1, "rank": 7, "local_rank": 0, "node_rank": 1, "node": node}
    attempt.sources(node, 0).write_text(json.dumps(said))
    return attempt


def append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def test_a_line_becomes_a_finding_of_its_job_and_rank(tmp_path: Path, redis_url: str, logs: Path) -> None:
    """It is signed by the node, with the clock's error, and gets the lines around it a moment later."""
    attempt = job_directory(logs)
    with LogNode(tmp_path / "node", redis_url, roots=[str(logs)]) as node:
        node.hand_out()
        node.has_rules()
        append(attempt.records(7), '{"event": "step", "step": 1}\n')
        append(attempt.ranks("n1") / "x_1" / "attempt_0" / "0" / "stderr.log", "one\nMARK 1\ntwo\n")
        append(attempt.launcher("n1"), "MARK 2\n")
        found = node.found(1, 2)
        finding = found["1"].finding
        origin = finding.origin
        assert (origin.source, origin.job, origin.attempt, origin.rank) == ("training", "llm-1", 1, 7)
        assert (finding.rule, finding.role, finding.count) == ("marked", Role.ROOT, 1)
        assert 0 < finding.clock_error < 1
        assert found["2"].finding.origin.source == "launcher"
        eventually(lambda: node.last_words()["1"].excerpt is not None, 90, "the lines around it")
        excerpt = node.last_words()["1"].excerpt
        assert excerpt is not None
        assert (excerpt.lines, excerpt.at) == (("one", "MARK 1", "two"), 1)
        eventually(lambda: (node.presence() or {})["logs"]["files"] == 3, 90, "a presence with three files")
        assert (node.presence() or {})["logs"]["clock_error"] < 1
        metrics = node.metrics()
        assert 'trainmedic_agent_log_findings_total{rule="marked"} 2.0' in metrics
        assert 'trainmedic_agent_log_files{source="training"} 2.0' in metrics


def test_files_of_other_nodes_in_a_shared_directory_are_left_to_them(
    tmp_path: Path, redis_url: str, logs: Path
) -> None:
    """Each line is read on one node: the node of the rank that wrote it."""
    attempt = job_directory(logs, node="n2")
    with LogNode(tmp_path / "node", redis_url, roots=[str(logs)]) as node:
        node.hand_out()
        node.has_rules()
        append(attempt.records(7), "MARK 1\n")
        append(attempt.launcher("n2"), "MARK 2\n")
        append(attempt.ranks("n2") / "x_1" / "attempt_0" / "0" / "stderr.log", "MARK 3\n")
        append(attempt.launcher("n1"), "MARK 4\n")
        node.found(4)
        time.sleep(2.5)
        assert node.last_words().keys() == {"4"}


class _Writer:
    """Writes marks into two files, and keeps what came of them."""

    def __init__(self, node: LogNode, logs: Path) -> None:
        self._node = node
        self.files = [logs / "a.log", logs / "b.log"]
        self.mark = 0
        self.ids: dict[int, set[str]] = {}
        self.counts: dict[int, int] = {}

    def write(self) -> int:
        for path in self.files:
            self.mark += 1
            append(path, f"line\nMARK {self.mark}\n")
        return self.mark

    def has_come(self, *marks: int) -> bool:
        for update in self._node.take_all():
            mark = int(update.finding.fields["n"])
            self.ids.setdefault(mark, set()).add(update.finding.id)
            self.counts[mark] = update.finding.count
        return set(marks) <= self.ids.keys()


def test_an_agent_killed_at_random_loses_and_repeats_no_line(tmp_path: Path, redis_url: str, logs: Path) -> None:
    """Six kills while two files are written and rotated; each mark has one finding with one id, counted once."""
    rng = random.Random(7)
    with LogNode(tmp_path / "node", redis_url, files=[f"{logs}/*.log"]) as node:
        node.hand_out()
        writer = _Writer(node, logs)
        for kill in range(6):
            # A file must have been met by its name before it loses that.
            last = writer.write()
            eventually(lambda marks=(last - 1, last): writer.has_come(*marks), 90, "the first lines", every=0.05)
            until = time.monotonic() + rng.uniform(0.0, 0.8)
            while time.monotonic() < until:
                writer.write()
                time.sleep(0.01)
            node.kill()
            writer.write()
            for path in writer.files:
                path.rename(path.with_name(f"{path.name}.{kill + 1}"))
            writer.write()
            node.start(wait=False)
        everything = range(1, writer.mark + 1)
        eventually(lambda: writer.has_come(*everything), 90, f"{writer.mark} findings", every=0.1)
    assert {mark: found for mark, found in writer.ids.items() if len(found) > 1} == {}
    assert set(writer.counts.values()) == {1}


def test_findings_wait_while_redis_is_unavailable(tmp_path: Path, redis_server: RedisServer, logs: Path) -> None:
    """They arrive in order when it recovers, also if the agent was killed in between."""
    with LogNode(tmp_path / "node", redis_server.url, files=[f"{logs}/*.log"]) as node:
        node.hand_out()
        node.has_rules()
        redis_server.kill()
        for mark in range(1, 4):
            append(logs / "a.log", f"MARK {mark}\n")
            time.sleep(0.6)
        node.kill()
        redis_server.start()
        node.start()
        node.found(1, 2, 3, within=90)
        first = {}
        for update in node.updates():
            first.setdefault(update.finding.fields["n"], update.number)
        assert list(first) == ["1", "2", "3"]
        assert sorted(first.values()) == list(first.values())


def test_nothing_more_is_added_while_the_server_accepts_nothing(tmp_path: Path, redis_url: str, logs: Path) -> None:
    """At most a thousand entries wait in Redis; the rest waits on the node's disk."""
    with LogNode(tmp_path / "node", redis_url, files=[f"{logs}/*.log"]) as node:
        node.hand_out()
        node.has_rules()
        append(logs / "a.log", "".join(f"MARK {mark}\n" for mark in range(1500)))
        with redis.Redis.from_url(redis_url) as client:
            eventually(lambda: client.xlen(FINDINGS) == 1000, 90, "a full stream")
            time.sleep(1.5)
            assert client.xlen(FINDINGS) == 1000
        marks = {update.finding.fields["n"] for update in node.take_all()}

        def rest() -> bool:
            marks.update(update.finding.fields["n"] for update in node.take_all())
            return len(marks) == 1500

        eventually(rest, 90, "the rest")


def test_the_last_good_rules_are_applied_without_a_server(tmp_path: Path, redis_url: str, logs: Path) -> None:
    """Without any rules nothing is read, so that nothing is missed when they arrive."""
    with LogNode(tmp_path / "node", redis_url, files=[f"{logs}/*.log"]) as node:
        append(logs / "a.log", "MARK 1\n")
        time.sleep(2)
        assert node.updates() == []
        node.hand_out()
        node.found(1)
        node.kill()
        with redis.Redis.from_url(redis_url) as client:
            client.flushall()
        append(logs / "a.log", "MARK 2\n")
        node.start()
        node.found(2)


def test_forged_older_or_unreadable_rules_are_rejected(tmp_path: Path, redis_url: str, logs: Path) -> None:
    """The previous rules stay active, and the log states the reason."""
    with LogNode(tmp_path / "node", redis_url, files=[f"{logs}/*.log"]) as node:
        node.hand_out()
        node.has_rules()
        node.hand_out(RuleSet(), signer=Signer.of(b"somebody else's key"))
        eventually(lambda: "rejecting new log rules" in node.agent.log.read_text(), 60, "the forgery is refused")
        node.hand_out(RuleSet(), at=datetime.now(UTC) - timedelta(hours=1))
        time.sleep(6)  # nothing tells that they were passed over
        append(logs / "a.log", "MARK 1\n")
        node.found(1)
        assert (node.presence() or {})["logs"]["rules"] == RULE_SET.version


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK | os.W_OK), reason="/dev/kmsg may not be read and written here")
def test_the_kernel_log_is_read_from_the_start_of_the_boot(tmp_path: Path, redis_url: str) -> None:
    """Earlier messages are found too, once, and a GPU is identified by its address."""
    mark = time.time_ns()  # one that is in the kernel's log from an earlier run would be a finding of its own
    with open("/dev/kmsg", "w") as kmsg:  # noqa: PTH123
        kmsg.write(f"MARK {mark}\n")
        kmsg.flush()
        with LogNode(tmp_path / "node", redis_url, kernel="kmsg") as node:
            node.hand_out()
            first = node.found(mark)[str(mark)].finding
            assert abs((datetime.now(UTC) - first.first_at).total_seconds()) < 120
            node.kill()
            for line in (f"MARK {mark + 1}", "NVRM: Xid (PCI:0000:18:00): 79, pid=1, GPU has fallen off the bus."):
                kmsg.write(f"{line}\n")
                kmsg.flush()
            node.start()
            found = node.found(mark + 1)
            assert {update.finding.id for update in node.updates() if update.finding.fields.get("n") == str(mark)} == {
                first.id
            }
            assert found[str(mark + 1)].boot
            eventually(lambda: "gpu-xid" in node.last_words(), 90, "the XID")
            assert node.last_words()["gpu-xid"].finding.target.gpu == node.driver.cards[0].uuid


@pytest.mark.parametrize("way", some_of(["copytruncate", "create", "nocreate", "delaycompress\ncompress"]))
def test_logrotate_loses_no_line(tmp_path: Path, redis_url: str, logs: Path, way: str) -> None:
    """The real program runs five times while a process writes in between."""
    conf = tmp_path / "rotate.conf"
    conf.write_text(f'"{logs}/a.log" {{\nrotate 9\nmissingok\nsu root root\n{way}\n}}\n')
    conf.chmod(0o600)
    with LogNode(tmp_path / "node", redis_url, files=[f"{logs}/*.log"]) as node:
        node.hand_out()
        node.has_rules()
        for turn in range(5):
            append(logs / "a.log", f"MARK {2 * turn}\nMARK {2 * turn + 1}\n")
            if way == "copytruncate":  # what nobody has read is lost with it
                node.found(2 * turn + 1)
            time.sleep(1.3)
            rotate = ["logrotate", "--force", "--state", str(tmp_path / "state"), str(conf)]
            subprocess.run(rotate, check=True, timeout=30)
        found = node.found(*range(10))
        assert {update.finding.count for update in found.values()} == {1}
        ids = {update.finding.id for update in node.updates()}
        assert len(ids) == 10
