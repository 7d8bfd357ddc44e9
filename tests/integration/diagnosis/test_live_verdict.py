"""From findings in Redis to a verdict: a real server, a real Redis, and a job that is there."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_findings import KEY, FindingSender, cli, serve, xid
from tests.support.findings import of_training, told
from tests.support.live import Job, Server
from tests.support.programs import eventually

_PLAYBOOK = """
playbook: failed
on: {alert: TrainingFailed, matchers: ['source="diagnosis"']}
mode: observe
target: job
steps: [{id: tell, action: notify, with: {message: "{{ labels.cause }}"}}]
"""


@pytest.fixture
def sender(redis_url: str) -> Iterator[FindingSender]:
    made = FindingSender(redis_url)
    yield made
    made.client.close()


def fail(sender: FindingSender, node: str) -> None:
    """The node's kernel loses a card, and the job's rank times out."""
    sender.tell(xid(node))
    line = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE)"
    sender.tell(told(of_training("nccl-timeout", node, "llm-1", 0, datetime.now(UTC), line=line)))


def verdict(server: Server) -> Any:
    answer = server.ask("/jobs/llm-1/diagnosis")
    return answer.body if answer.status == 200 else None


def test_a_hanging_job_gets_a_verdict_an_alert_and_a_run(tmp_path: Path, redis_url: str, sender: FindingSender) -> None:
    """Within a minute, by the API and the command line; a server that is killed and restarted still has it,
    and tells nothing twice."""
    with serve(tmp_path, redis_url) as server, Job("llm-1", redis_url, KEY) as job:
        (server.directory / "playbooks" / "failed.yaml").write_text(_PLAYBOOK)
        (item,) = eventually(lambda: server.ask("/jobs").body["items"], 60, "the job is known")
        node = item["nodes"][0]
        time.sleep(6)  # the presences are read every five seconds
        job.hold()
        fail(sender, node)
        said = eventually(lambda: verdict(server), 60, "a verdict")
        assert (said["cause"], said["node"], said["confidence"], said["attempt"]) == ("gpu", node, "high", 1)
        assert said["evidence"][0]["rule"] == "gpu-xid"
        runs = eventually(
            lambda: [run for run in server.runs() if run["alert_name"] == "TrainingFailed"], 60, "a run of the verdict"
        )
        (run,) = runs
        labels = run["alert_labels"]
        assert (run["target"], labels["cause"], labels["node"]) == ("job:llm-1", "gpu", node)
        assert "A GPU failed" in cli(server, "diagnose", "llm-1")
        shown = json.loads(cli(server, "diagnose", "llm-1", "--attempt", "1", "--output", "json"))
        assert shown["id"] == said["id"]
        server.kill()
        server.start()
        assert verdict(server)["id"] == said["id"]
        time.sleep(7)
        assert [each["run_id"] for each in server.runs() if each["alert_name"] == "TrainingFailed"] == [run["run_id"]]
