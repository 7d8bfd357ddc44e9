"""The whole way of a failure: a real torchrun job, the agent that reads its logs, Redis, and the server's verdict."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RedisServer
from tests.integration.launch.launched import Launched
from tests.support.agent_node import KEY
from tests.support.live import Server
from tests.support.log_node import LogNode
from tests.support.long_tests import some_of
from tests.support.programs import eventually
from trainmedic.wire.signing import identity_key, job_identity

_JOB = Path(__file__).with_name("failing_job.py")
_PLAYBOOK = """
playbook: failed
on: {alert: TrainingFailed, matchers: ['source="diagnosis"']}
mode: observe
target: job
steps: [{id: tell, action: notify, with: {message: "{{ labels.cause }}"}}]
"""


def _verdict(server: Server) -> Any:
    answer = server.ask("/jobs/llm-1/diagnosis")
    return answer.body if answer.status == 200 else None


@pytest.mark.parametrize(
    ("accident", "cause", "ranks"),
    some_of(
        [
            ("raise", "code", [2]),
            ("kill", "unknown", [2]),
            # Who did not come prints nothing, and a job without the SDK does not say how many ranks it has.
            ("leave", "hang", []),
        ]
    ),
)
def test_the_rank_that_failed_is_named_by_one_alert(
    accident: str, cause: str, ranks: list[int], tmp_path: Path, redis_server: RedisServer
) -> None:
    """Within seconds of the job's end, and with the server killed meanwhile; by one run of a playbook."""
    logs = tmp_path / "job" / "logs"
    logs.mkdir(parents=True)
    with (
        Server(
            tmp_path / "server",
            _PLAYBOOK,
            *("--redis", redis_server.url),
            environment={"TRAINMEDIC_SIGNING_KEY": KEY},
        ) as server,
        LogNode(tmp_path / "node", redis_server.url, roots=[str(logs)]) as node,
    ):
        eventually(lambda: 'rules_info{version=""}' not in node.metrics(), 30, "rules from the server")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        job = Launched(
            tmp_path / "job",
            [*torchrun, str(_JOB), accident],
            *("--retries=0", "--job=llm-1"),
            TRAINMEDIC_NODE=node.name,
            TRAINMEDIC_REDIS_URL=redis_server.url,
            TRAINMEDIC_SIGNING_KEY=identity_key(KEY.encode(), job_identity("llm-1")).decode(),
        )
        try:
            job.wait()
        finally:
            job.close()
        ended = time.monotonic()
        server.kill()
        server.start()
        (run,) = eventually(server.runs, 30, "a run")
        took = time.monotonic() - ended
        said = _verdict(server)
        assert (said["cause"], said["ranks"], said["node"]) == (cause, ranks, None), said
        assert run["alert_labels"]["cause"] == cause
        assert took < 15, took
        time.sleep(5)
        assert len(server.runs()) == 1
