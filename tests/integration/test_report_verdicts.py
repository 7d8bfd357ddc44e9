"""From findings in Redis to the verdict in a job's report, and in that over all jobs: a real server and Redis."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tests.integration.test_findings import KEY, FindingSender, cli, serve, xid
from tests.support.findings import of_training, told
from tests.support.live import Job
from tests.support.programs import eventually


def test_a_failure_is_reported_with_its_verdict(tmp_path: Path, redis_url: str) -> None:
    """A GPU falls off the bus under a job that only hangs: no source reports its failure, but its report does."""
    sender = FindingSender(redis_url)
    with serve(tmp_path, redis_url) as server, Job("llm-1", redis_url, KEY) as job:
        (item,) = eventually(lambda: server.ask("/jobs").body["items"], 60, "the job is known")
        node = item["nodes"][0]
        time.sleep(6)  # the presences are read every five seconds
        job.hold()
        sender.tell(xid(node))
        line = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE)"
        sender.tell(told(of_training("nccl-timeout", node, "llm-1", 0, datetime.now(UTC), line=line)))

        def failures() -> Any:
            answer = server.ask("/jobs/llm-1/report")
            return answer.body["failures"] if answer.status == 200 else None

        (failure,) = eventually(failures, 60, "a failure in the report")
        verdict = failure["verdict"]
        assert (failure["kind"], verdict["cause"], verdict["node"]) == ("diagnosed", "gpu", node)
        assert "gpu (high): A GPU failed" in cli(server, "report", "llm-1")
        fleet = server.ask("/report").body
        assert [(cause["cause"], cause["failures"]) for cause in fleet["causes"]] == [("gpu", 1)]
        assert fleet["unknown"] == {}

        # Ten lines of two ranks about one allocation that failed: once.
        later = datetime.now(UTC) + timedelta(seconds=1)
        for rank, number in ((0, 10), (5, 11)):
            sender.tell(told(of_training("cuda-oom", node, "llm-1", rank, later, count=5), number))

        def memory() -> Any:
            errors = server.ask("/jobs/llm-1/report").body["oom_events"]
            return errors if errors["count"] and errors["events"][0]["rank_count"] == 2 else None

        errors = eventually(memory, 60, "both ranks in one event")
        assert (errors["count"], errors["events"][0]["ranks"], errors["events"][0]["lines"]) == (1, [0, 5], 10)
        assert "out of memory:" in cli(server, "report", "llm-1")
        assert "rank(s) 0, 5, 10 line(s)" in cli(server, "report", "llm-1")
    sender.client.close()
