"""Searching the logs of a job, end to end: a real server, a real agent, the SDK's own files, and the command."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent_node import KEY
from tests.support.live import Server
from tests.support.log_node import LogNode
from tests.support.programs import PYTHON_PATH, eventually
from trainmedic.wire.log_layout import AttemptLogs

NONE = "playbook: none\non: {alert: Nothing}\ntarget: job\nsteps: [{id: a, action: job.checkpoint}]\n"


class Searched:
    """A job that has left its logs on a node whose agent reads them, and a server to ask."""

    def __init__(self, directory: Path, redis_url: str) -> None:
        self.logs = directory / "logs"
        self.attempt = AttemptLogs.of(self.logs, "llm-1", 1)
        self.attempt.path.mkdir(parents=True)
        self.kernel = directory / "kern.log"
        self.kernel.touch()
        self.node = LogNode(directory / "node", redis_url, roots=[str(self.logs)], kernel=str(self.kernel))
        environment = {"TRAINMEDIC_REDIS_URL": redis_url, "TRAINMEDIC_SIGNING_KEY": KEY}
        self.server = Server(directory / "server", NONE, environment=environment)

    def print(self, text: str) -> None:
        with self.attempt.launcher("n1").open("a") as file:
            file.write(f"{datetime.now(UTC).isoformat()} {text}\n")

    def train(self) -> None:
        """A process of the job, whose records the SDK writes."""
        program = "import trainmedic\nwith trainmedic.connect(job='llm-1') as medic: medic.report(1, loss=float('nan'))"
        variables = {"TRAINMEDIC_LOG_DIR": str(self.logs), "TRAINMEDIC_NODE": "n1", "PYTHONPATH": PYTHON_PATH}
        variables["TRAINMEDIC_REDIS_URL"] = "redis://127.0.0.1:1"
        subprocess.run([sys.executable, "-c", program], env={**os.environ, **variables}, check=True, timeout=60)

    def command(self, *options: str, job: str = "llm-1") -> list[str]:
        url = f"http://127.0.0.1:{self.server.port}"
        return [sys.executable, "-m", "trainmedic_server", "logs", "--server", url, "--job", job, *options]

    def asked(self, *options: str, job: str = "llm-1") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
        command = self.command(*options, job=job)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    def lines(self, *options: str) -> list[dict[str, Any]]:
        answer = self.asked("--output", "json", *options)
        assert answer.returncode == 0, answer.stderr
        return [json.loads(line) for line in answer.stdout.splitlines()]

    def accepted(self) -> int:
        """How many commands the agent has accepted and not answered."""
        return self._count("status = 'accepted'")

    def withdrawn(self) -> int:
        """How many commands ended because the server withdrew them."""
        return self._count("output LIKE '%the server withdrew it%'")

    def arrived(self, log: Path) -> int:
        """Up to where the reader's database has the times at which `log` grew."""
        (file,) = self.node.state.glob("*/agent.db")
        with contextlib.closing(sqlite3.connect(file, timeout=60)) as database:
            of_file = "SELECT MAX(size) FROM log_arrivals WHERE inode = ?"
            ((size,),) = database.execute(of_file, (log.stat().st_ino,))
        return int(size or 0)

    def _count(self, condition: str) -> int:
        with contextlib.closing(sqlite3.connect(self.node.state / "agent.db", timeout=60)) as journal:
            ((count,),) = journal.execute(f"SELECT COUNT(*) FROM commands WHERE {condition}")
        return int(count)


@pytest.fixture
def searched(tmp_path: Path, redis_url: str) -> Iterator[Searched]:
    made = Searched(tmp_path, redis_url)
    with made.server, made.node:
        yield made


def test_the_lines_of_a_job_are_found_on_its_node(searched: Searched) -> None:
    """They are found by job, rank, level, pattern and kernel, with the SDK's records; a token is masked before."""
    searched.train()
    searched.print("ERROR the loader died")
    searched.print("logged in with hf_" + "a" * 34)
    searched.kernel.write_text(f"{datetime.now(UTC).isoformat()} n1 kernel: NVRM: Xid (PCI:0000:9b:00): 79, GPU lost\n")
    node = ("--node", "n1")
    lines = searched.lines(*node)
    assert [line["node"] for line in lines] == ["n1"] * 4
    assert json.loads(lines[0]["line"])["loss"] == "NaN"
    assert [(line.get("rank"), line["source"]) for line in lines] == [
        (0, "training"),
        (0, "training"),
        (None, "launcher"),
        (None, "launcher"),
    ]
    assert "hf_aaa" not in json.dumps(lines)
    assert [line["line"][-15:] for line in searched.lines(*node, "--level", "error")] == ["the loader died"]
    assert len(searched.lines(*node, "--rank", "0")) == 2
    assert searched.lines(*node, "--rank", "1") == []
    kernel = searched.lines("--node", "n1", "--kernel", "--grep", "Xid")
    assert [(line["source"], line["line"][:9]) for line in kernel] == [("kernel", "NVRM: Xid")]


def test_text_is_for_people_and_raw_for_other_programs(searched: Searched) -> None:
    """An empty answer gives the reason."""
    searched.print("step 1 of 10")
    text = searched.asked("--node", "n1")
    assert text.stdout.rstrip().endswith("step 1 of 10")
    assert " n1 launcher " in text.stdout
    third = searched.asked("--node", "n1", "--node_rank", "3")
    assert (third.stdout, third.returncode) == ("", 0)
    assert "1 file states no node rank and is left out" in third.stderr
    raw = searched.asked("--node", "n1", "--output", "raw")
    assert raw.stdout.endswith(" step 1 of 10\n")
    nobody = searched.asked("--node", "n2")
    assert nobody.returncode == 3
    assert "n2: did not answer" in nobody.stderr
    nowhere = searched.asked(job="llm-2")
    assert nowhere.returncode == 5
    assert "job 'llm-2' is unknown: it is not connected and has no runs or findings" in nowhere.stderr
    assert "the nodes of llm-2 are unknown" in nowhere.stderr
    assert "none of the 1 node whose agents were asked has files of it" in nowhere.stderr
    assert "ry again" not in nowhere.stderr
    wrong = searched.asked("--node", "n1", "--grep", "(")
    assert wrong.returncode == 1
    assert "grep" in wrong.stderr


def test_follow_shows_what_is_printed_next(searched: Searched) -> None:
    """It runs until it is interrupted."""
    searched.print("before")
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH, "PYTHONUNBUFFERED": "1"}
    command = searched.command("--node", "n1", "--follow", "--output", "raw")
    shown = searched.logs.parent / "followed"
    with shown.open("wb") as out, subprocess.Popen(command, env=environment, stdout=out) as following:
        try:
            eventually(lambda: "before" in shown.read_text(), 60, "the first line")
            searched.print("after")
            eventually(lambda: "after" in shown.read_text(), 60, "the next line")
        finally:
            following.send_signal(signal.SIGINT)
    assert [line.partition(" ")[2] for line in shown.read_text().splitlines()] == ["before", "after"]


PRINTS = """
import logging, sys, time
from datetime import datetime

def say(number):
    now = datetime.now()
    whole, millis = f"{now:%Y-%m-%d %H:%M:%S}", f"{now.microsecond // 1000:03d}"
    mark = f"{time.time():.3f} {number}"
    print(f"{whole},{millis} - trainer - INFO - python {mark}")
    print(f"[{whole},{millis}] [INFO] [logging.py:128:log_dist] [Rank 0] deepspeed {mark}")
    print(f" [{whole}] iteration {number}/ 9 | megatron {mark}")
    print(f"W{now:%m%d %H:%M:%S}.{now.microsecond:06d} 4711 run.py:793] torchrun {mark}")
    print(f"[INFO|trainer.py:2414] {whole},{millis} >> factory {mark}")
    print(f"bare {mark}", flush=True)

for number in range(int(sys.argv[1])):
    say(number)
    time.sleep(float(sys.argv[2]))
"""
FORMATS = {"python", "deepspeed", "megatron", "torchrun", "factory", "bare"}


def test_lines_of_six_formats_have_their_time_while_a_process_prints_them(searched: Searched) -> None:
    """It is within 2 s, also in a past window; no node name is needed for a job known only by its files."""
    log = searched.attempt.ranks("n1") / "x" / "attempt_0" / "0" / "stdout.log"
    log.parent.mkdir(parents=True)
    with log.open("wb") as out:
        subprocess.run([sys.executable, "-c", PRINTS, "6", "2.6"], stdout=out, check=True, timeout=60)
    lines = searched.lines("--since", "10m")
    written = [(line["line"].split()[-3], float(line["line"].split()[-2]), line) for line in lines]
    assert len(written) == 36
    assert {form for form, _, _ in written} == FORMATS
    late = {form: abs(datetime.fromisoformat(line["at"]).timestamp() - at) for form, at, line in written}
    assert max(late.values()) < 2, late
    by_form = {form: line.get("time_source") for form, _, line in written}
    assert by_form["python"] == by_form["torchrun"] == "node_zone"
    assert by_form["bare"] in ("arrival", "neighbours")
    third = [at for _, at, line in written if line["line"].endswith(" 3")]
    since, until = (datetime.fromtimestamp(at, UTC).isoformat() for at in (min(third) - 1.3, max(third) + 1.3))
    window = searched.lines("--since", since, "--until", until)
    assert {line["line"].split()[-1] for line in window} == {"3"}
    assert searched.lines("--since", "10m", "--until", since, "--grep", " 3$") == []


def test_lines_dated_only_by_arrival_survive_a_restart_of_the_agent(searched: Searched) -> None:
    """Standard output has no time; the agent that answers is not the one that received it."""
    log = searched.attempt.launcher("n1")
    spans = []

    def sources() -> list[str]:
        return [line["time_source"] for line in searched.lines("--since", "10m")]

    for number in range(4):
        time.sleep(1.5)
        written_at = time.time()
        with log.open("a") as file:
            file.write(f"a bare line {number}\n")
        eventually(lambda: sources() == ["arrival"] * (number + 1), 60, "the line's arrival")  # noqa: B023
        spans.append((written_at - 0.1, time.time()))
    eventually(lambda: searched.arrived(log) == log.stat().st_size, 60, "the arrivals on disk")
    searched.node.agent.end()
    searched.node.start()
    lines = searched.lines("--since", "10m")
    assert [line["line"][-1] for line in lines] == ["0", "1", "2", "3"]
    for line, (earliest, latest) in zip(lines, spans, strict=True):
        assert earliest <= datetime.fromisoformat(line["at"]).timestamp() <= latest
    assert {line["time_source"] for line in lines} == {"arrival"}
    since = datetime.fromtimestamp(spans[2][0] - 0.7, UTC).isoformat()
    assert [line["line"][-1] for line in searched.lines("--since", since)] == ["2", "3"]
    assert [line["line"][-1] for line in searched.lines("--since", "10m", "--until", since)] == ["0", "1"]


def test_a_search_whose_client_disconnected_ends_on_the_node(searched: Searched) -> None:
    """An agent searches for one client at a time, and each of these searches would take it seconds."""
    line = "epoch 3 batch 17 loss 2.1234 grad norm 0.2512 tokens 8123.4 a second, of which some are padding\n"
    with searched.attempt.launcher("n1").open("w") as file:
        file.writelines(line * 10_000 for _ in range(40))
    clients = []
    for _ in range(15):
        client = http.client.HTTPConnection("127.0.0.1", searched.server.port, timeout=120)
        client.request("GET", "/jobs/llm-1/logs?node=n1&level=error&since=1h")
        clients.append(client)
    eventually(lambda: searched.accepted() >= 5, 60, "the searches on the node")
    for client in clients:
        client.close()
    searched.print("ERROR the last line")
    eventually(lambda: not searched.accepted(), 120, "the end of all searches")
    assert searched.withdrawn(), "every search went on until it was done, or too late"
    assert [line["line"][-13:] for line in searched.lines("--node", "n1", "--grep", "last line")] == ["the last line"]
