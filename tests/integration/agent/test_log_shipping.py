"""An agent that pushes lines to a store, as a real process over real HTTP; and a server that finds them there."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.live import Server
from tests.support.log_node import LogNode
from tests.support.log_stores.loki_stand_in import LokiStandIn
from tests.support.log_stores.served import Served, certificate
from tests.support.programs import PYTHON_PATH, eventually
from trainmedic.wire.log_layout import AttemptLogs

JOB = f"llm-{random.randrange(10**9)}"  # a real store may have the lines of an earlier time
NONE = "playbook: none\non: {alert: Nothing}\ntarget: job\nsteps: [{id: a, action: job.checkpoint}]\n"


def searched(server: Server, *options: str) -> list[dict[str, Any]]:
    """What ``trainmedic logs`` shows of the job."""
    url = f"http://127.0.0.1:{server.port}"
    command = [sys.executable, "-m", "trainmedic_server", "logs", "--server", url, "--job", JOB, *options]
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    answer = subprocess.run(
        [*command, "--output", "json"], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return [json.loads(line) for line in answer.stdout.splitlines()]


class WrittenLogs:
    """Two files of a job, one of rank 7, that are written in turn: each line has a number."""

    def __init__(self, directory: Path) -> None:
        attempt = AttemptLogs.of(directory, JOB, 1)
        attempt.path.mkdir(parents=True)
        said = {"version": 1, "job": JOB, "attempt": 1, "rank": 7, "local_rank": 0, "node_rank": 1, "node": "n1"}
        attempt.sources("n1", 0).write_text(json.dumps(said))
        self.files = [attempt.launcher("n1"), attempt.ranks("n1") / "x_1" / "attempt_0" / "0" / "stderr.log"]
        self.files[1].parent.mkdir(parents=True)
        self.written = 0

    def write(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for file in self.files:
                with file.open("a") as opened:
                    level = "ERROR" if self.written % 5 == 0 else "step"
                    opened.write(f"{datetime.now(UTC).isoformat()} {level} {self.written}\n")
                self.written += 1
            time.sleep(0.01)


def numbers(lines: list[dict[str, Any]]) -> list[int]:
    return [int(line["line"].rpartition(" ")[2]) for line in lines]


def test_a_server_finds_each_line_once_despite_kills(tmp_path: Path, redis_url: str) -> None:
    """The agent is killed three times and the store is away in between, while two files are written and
    one is rotated. Then the server's search has every line, once, in order; and some by rank and level."""
    rng = random.Random(11)
    store = LokiStandIn(has_tenants=True)
    logs = WrittenLogs(tmp_path / "logs")
    token = tmp_path / "token"
    token.write_text("s3cr3t\n")
    with Served(store.app) as served:
        ship = {"url": served.url, "tenant": "training", "token_file": str(token)}
        with LogNode(tmp_path / "node", redis_url, roots=[str(tmp_path / "logs")], ship=ship) as node:
            logs.write(1.2)
            # A file that is renamed before the agent has ever seen it is none of the job's.
            eventually(lambda: {int(line.split()[-1]) % 2 for line in store.lines()} == {0, 1}, 60, "both files")
            for turn in range(3):
                logs.write(rng.uniform(0.2, 0.8))
                if turn == 1:
                    served.stop()
                logs.write(rng.uniform(0.0, 0.4))
                node.kill()
                logs.write(0.1)
                if turn == 2:
                    logs.files[1].rename(logs.files[1].with_name("stderr.log.1"))
                node.start(wait=False)
                logs.write(0.8)
                if turn == 1:
                    served.start()
            eventually(lambda: len(store.lines()) >= logs.written, 60, f"{logs.written} lines in the store")
            metrics = node.metrics()
            assert "trainmedic_agent_log_shipped_lines_total" in metrics
            lost = [line for line in metrics.splitlines() if line.startswith("trainmedic_agent_log_ship_lost_")]
            assert len(lost) > 8
            assert [line for line in lost if not line.endswith(" 0.0")] == []
        assert {push["x-scope-orgid"] for push in store.pushes} == {"training"}
        assert {push["authorization"] for push in store.pushes} == {"Bearer s3cr3t"}
        address = f"loki+{served.url}?tenant=training"
        environment = {"TRAINMEDIC_REDIS_URL": redis_url, "TRAINMEDIC_LOG_STORE": address}
        with Server(tmp_path / "server", NONE, environment=environment) as server:
            lines = searched(server)
            errors = searched(server, "--level", "error", "--rank", "7")
    assert numbers(lines) == list(range(logs.written))
    assert numbers(errors) == list(range(5, logs.written, 10))
    assert {line["source"] for line in errors} == {"training"}


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["loki", *(["victorialogs"] if "TRAINMEDIC_TEST_VICTORIALOGS_URL" in os.environ else [])]
)
def test_the_agent_and_the_server_agree_on_a_store(tmp_path: Path, redis_url: str, kind: str) -> None:
    """The server finds there what the agent pushes despite kills: each line once, in order, by rank and level.
    The store is the real one that the environment names, else Loki's stand-in."""
    logs = WrittenLogs(tmp_path / "logs")
    with Served(LokiStandIn().app) as served:
        address = os.environ.get(f"TRAINMEDIC_TEST_{kind.upper()}_URL", served.url)
        ship = {"url": address, "kind": kind}
        with LogNode(tmp_path / "node", redis_url, roots=[str(tmp_path / "logs")], ship=ship) as node:
            logs.write(0.5)
            node.kill()
            logs.write(0.3)
            node.start()
            logs.write(0.2)
            environment = {"TRAINMEDIC_REDIS_URL": redis_url, "TRAINMEDIC_LOG_STORE": f"{kind}+{address}"}
            with Server(tmp_path / "server", NONE, environment=environment) as server:
                eventually(lambda: len(searched(server)) >= logs.written, 90, "all lines")
                assert numbers(searched(server)) == list(range(logs.written))
                errors = searched(server, "--level", "error", "--rank", "7")
    assert numbers(errors) == list(range(5, logs.written, 10))


def test_a_tls_store_is_verified_by_the_policys_certificate(tmp_path: Path, redis_url: str) -> None:
    """User and password come from the environment; without the certificate the agent sends nothing and reports why."""
    signed = certificate(tmp_path)
    store = LokiStandIn()
    (tmp_path / "a.log").write_text("one\n")
    variables = {"TRAINMEDIC_LOG_STORE_TOKEN": "reader:pass"}
    with Served(store.app, signed) as served:
        ship = {"url": served.url}
        with LogNode(tmp_path / "n1", redis_url, files=[f"{tmp_path}/{{job}}.log"], ship=ship) as node:
            eventually(lambda: "CERTIFICATE_VERIFY_FAILED" in node.agent.log.read_text(), 90, "the reason")
        assert store.pushes == []
        ship = {"url": served.url, "ca_file": str(signed[0])}
        with LogNode(tmp_path / "n2", redis_url, files=[f"{tmp_path}/{{job}}.log"], ship=ship) as node:
            node.kill()
            node.start(**variables)
            eventually(lambda: store.lines(job="a")[:1] == ["one"], 90, "the line")
            with (tmp_path / "a.log").open("a") as file:
                file.write("two\n")
            eventually(lambda: store.lines(job="a")[-1] == "two", 90, "the next line")
    assert store.pushes[-1]["authorization"] == "Basic cmVhZGVyOnBhc3M="
