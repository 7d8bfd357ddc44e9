"""Each end of a job under ``trainmedic-run``, and what becomes of it: the attempts that are kept, the verdict of the
server and of the folder, and the alerts.

One server, one agent and one Redis serve all jobs, which run at the same time and are the shipped rules' and
playbooks' to judge.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import RedisServer
from tests.integration.launch.launched import Launched
from tests.support.agent_node import KEY
from tests.support.live import Server
from tests.support.log_node import LogNode
from tests.support.programs import ROOT, eventually
from tests.unit.diagnosis.test_folder import diagnosed
from trainmedic.wire.signing import identity_key, job_identity

_JOB = Path(__file__).with_name("outcome_job.py")
_CASCADE_SECONDS = 45.0
_AT_ONCE = 5
"""Jobs that run while one of torchrun begins: each of these imports PyTorch for itself."""
_SAYS_FAILED = {"TrainingFailed", "TrainingGone", "TrainingCrashing"}


class Failed(NamedTuple):
    """One attempt that failed."""

    cause: str
    """As ``attempts.jsonl`` has it."""
    verdict: tuple[str, str, list[int]]
    """Cause, confidence and ranks."""


MEMORY = Failed("the job ended with exit code 1 (MemoryError)", ("host_memory", "high", []))
KILL = Failed("the job was ended by SIGKILL", ("unknown", "low", []))
HANG = Failed("the job hung", ("hang", "low", []))
PLAIN = {
    "memory": ["--retries=3", [MEMORY, MEMORY, MEMORY]],
    "kill": ["--retries=1", [KILL, KILL]],
    "segv": ["--retries=0", [Failed("the job was ended by SIGSEGV", ("code", "medium", []))]],
    "exit": ["--retries=0", [Failed("the job ended with exit code 7", ("unknown", "low", []))]],
    "raise": ["--retries=0", [Failed("the job ended with exit code 1 (KeyError)", ("code", "high", []))]],
    "hang": ["--retries=0", [HANG]],
    "other": ["--retries=3", [MEMORY, KILL]],
    "nan": ["--retries=0", []],
    "well": ["--retries=0", []],
    "cascade": ["--retries=0", []],
    "cascade-sdk": ["--retries=0", []],
}
TORCHRUN = {
    "memory": (2, [Failed("rank 1 ended with exit code 1 (MemoryError)", ("host_memory", "high", [1]))]),
    "kill": (3, [Failed("rank 2 was ended by SIGKILL", ("unknown", "low", [2]))]),
    "exit": (2, [Failed("rank 1 ended with exit code 7", ("unknown", "low", [1]))]),
    "hang": (1, [HANG]),
    "nan": (1, []),
    "well": (2, []),
    # The ranks that lose the last one raise errors of their own, before torchrun sees that one end.
    "gloo-exit": (3, [Failed("rank 2 ended with exit code 7", ("unknown", "low", [2]))]),
    "gloo-segv": (2, [Failed("rank 1 was ended by SIGSEGV", ("code", "medium", [1]))]),
    "gloo-raise": (2, [Failed("rank 1 ended with exit code 1 (KeyError)", ("code", "high", [1]))]),
}
EXPECTED: dict[str, list[Failed]] = {f"plain-{end}": failed for end, (_, failed) in PLAIN.items()}  # type: ignore[misc]
EXPECTED |= {f"torchrun-{end}": failed for end, (_, failed) in TORCHRUN.items()}


class World:
    """The server and the jobs, all of which have ended."""

    def __init__(self, server: Server, jobs: dict[str, Launched]) -> None:
        self.server = server
        self.jobs = jobs

    def verdict(self, job: str, attempt: int) -> Any:
        answer = self.server.ask(f"/jobs/{job}/diagnosis?attempt={attempt}")
        return answer.body if answer.status == 200 else None

    def alerts(self, job: str) -> list[Any]:
        """Those about the job, whatever became of them."""
        items = self.server.ask("/alerts?limit=500").body["items"]
        return [each for each in items if job in (each["labels"].get("job_name"), each["labels"].get("claimed_job"))]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """All jobs have ended, and every loop of the server had its turn."""
    directory = tmp_path_factory.mktemp("outcomes")
    redis = RedisServer(tmp_path_factory.mktemp("redis"))
    redis.start()
    logs = directory / "jobs" / "logs"
    logs.mkdir(parents=True)
    server = Server(directory / "server", "{}", "--redis", redis.url, environment={"TRAINMEDIC_SIGNING_KEY": KEY})
    shutil.rmtree(directory / "server" / "playbooks")
    shutil.copytree(ROOT / "playbooks", directory / "server" / "playbooks")
    jobs: dict[str, Launched] = {}
    try:
        with server, LogNode(directory / "node", redis.url, roots=[str(logs)]) as node:
            eventually(lambda: 'rules_info{version=""}' not in node.metrics(), 60, "rules from the server")

            def start(job: str, command: list[str], *options: str) -> None:
                jobs[job] = Launched(
                    directory / "jobs",
                    command,
                    *(f"--job={job}", "--delay=1s", "--grace=3s", "--hang-after=3s", *options),
                    TRAINMEDIC_NODE=node.name,
                    TRAINMEDIC_REDIS_URL=redis.url,
                    TRAINMEDIC_SIGNING_KEY=identity_key(KEY.encode(), job_identity(job)).decode(),
                    CASCADE_SECONDS=str(_CASCADE_SECONDS),
                )
                # Each launcher names these two alike; what is open stays open.
                for output in (jobs[job].out, jobs[job].err):
                    output.rename(directory / f"{job}-{output.name}")

            for end, (options, _) in reversed(PLAIN.items()):
                start(f"plain-{end}", [sys.executable, str(_JOB), end], str(options))
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            for end, (ranks, _) in reversed(TORCHRUN.items()):
                eventually(lambda: sum(job.process.poll() is None for job in jobs.values()) < _AT_ONCE, 90, "room")
                command = [*torchrun, f"--nproc-per-node={ranks}", str(_JOB), end]
                start(f"torchrun-{end}", command, "--retries=0")
            for job in jobs.values():
                job.wait()
            made = World(server, jobs)
            last = [(job, len(failed)) for job, failed in EXPECTED.items() if failed]
            eventually(lambda: all(made.verdict(*each) for each in last), 60, "a verdict on each failure")
            time.sleep(12)  # what comes late changes a verdict, and a false one would come now
            yield made
    finally:
        for launched in jobs.values():
            launched.close()
        redis.kill()


@pytest.mark.parametrize("job", EXPECTED)
def test_each_failed_attempt_is_stored_with_its_cause(world: World, job: str) -> None:
    """A rank that lost another one is never the cause, and a signal has no exception."""
    kept = world.jobs[job].attempts()
    assert [each["cause"] for each in kept] == [failed.cause for failed in EXPECTED[job]]
    assert {each["node"] for each in kept} <= {"n1"}


@pytest.mark.parametrize("job", EXPECTED)
def test_every_failure_and_nothing_else_has_a_verdict_and_an_alert(world: World, job: str) -> None:
    """It does not matter whether the job is restarted."""
    failures = EXPECTED[job]
    said = [world.verdict(job, number) for number in range(1, len(failures) + 2)]
    assert said[-1] is None  # no attempt but these
    shown = [(each["cause"], each["confidence"], each["ranks"]) for each in said[:-1]]
    assert shown == [failed.verdict for failed in failures]
    told = [each["labels"]["cause"] for each in world.alerts(job) if each["alert_name"] == "TrainingFailed"]
    assert set(told) == {failed.verdict[0] for failed in failures}
    restarted = [each for each in world.alerts(job) if each["labels"].get("restarted_by") == "launcher"]
    # Failures of one cause have one alert, which has the label of the first.
    assert bool(restarted) is (len(failures) > 1), world.alerts(job)


@pytest.mark.parametrize("job", EXPECTED)
def test_a_directory_gives_the_same_diagnosis_as_the_server(world: World, job: str) -> None:
    """This covers each attempt; one that ended well has no failure, whatever ended the ones before it."""
    failures = EXPECTED[job]
    attempts = diagnosed(world.jobs[job].logs).attempts
    for each, failed in zip(attempts, failures, strict=False):
        verdict = each.verdict
        assert (verdict.cause, verdict.confidence, list(verdict.ranks)) == failed.verdict, verdict.summary
    if world.jobs[job].process.returncode == 0:
        assert len(attempts) == len(failures) + 1
        last = attempts[-1].verdict
        if job.endswith("nan"):
            assert (last.cause, last.advice) == ("numerics", "ask")
            assert last.summary.startswith("The job ended without an error, but its numbers were wrong until its end")
        else:
            assert (last.cause, last.advice) == ("unknown", "none")
            assert "Nothing failed" in last.summary


@pytest.mark.parametrize("job", ["plain-cascade", "plain-cascade-sdk"])
def test_no_alert_reports_a_continuing_job_as_failed(world: World, job: str) -> None:
    """The job printed every line of a job that lost its peers, and completed its steps."""
    alerts = world.alerts(job)
    assert not _SAYS_FAILED & {each["alert_name"] for each in alerts}
    assert {each["alert_name"] for each in alerts} >= {"TrainingCUDAError"}  # which was read, and is about a call
    assert world.server.ask(f"/jobs/{job}/diagnosis").status == 404
    report = world.server.ask(f"/jobs/{job}/report").body
    assert report["failure_count"] == 0, report["failures"]


def test_a_nan_loss_is_reported_and_is_not_a_failure(world: World) -> None:
    """The job ended well."""
    for job in ("plain-nan", "torchrun-nan"):
        assert "TrainingLossNaN" in {each["alert_name"] for each in world.alerts(job)}, os.fspath(world.jobs[job].logs)
