"""The whole way of a failure: a real torchrun job, the agent that reads its logs, Redis, and the server's verdict."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RedisServer
from tests.integration.diagnosis.accident_places import memory_group, small_tmpfs
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


_EXPECTED = {
    "raise": ("code", [2]),
    "kill": ("unknown", [2]),
    # Who did not come prints nothing, and a job without the SDK does not say how many ranks it has.
    "leave": ("hang", []),
    # Unless the ranks' flight recorders are written: then the one that did not come is named.
    "recorded": ("hang", [2]),
    "disk": ("storage", [2]),
    "memory": ("host_memory", [2]),
    "cgroup": ("host_memory", [2]),
    "full": ("storage", [2]),
    "segfault": ("code", [2]),
}


@pytest.mark.parametrize(
    ("accident", "killed"),
    some_of(
        [
            ("raise", "server"),
            ("disk", "agent"),
            ("memory", "redis"),
            ("kill", "agent"),
            ("segfault", "redis"),
            ("leave", "server"),
            ("recorded", "agent"),
            ("cgroup", "nobody"),
            ("cgroup", "server"),
            ("full", "nobody"),
            ("full", "agent"),
            ("raise", "nobody"),
            ("disk", "nobody"),
            ("kill", "nobody"),
            ("nan", "agent"),
            ("nan", "nobody"),
        ]
    ),
)
def test_one_alert_names_the_rank_that_failed(
    accident: str, killed: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    """A playbook then runs once, also if the server, the agent or Redis is killed just after the job ended."""
    playbook = _PLAYBOOK
    if accident == "nan":  # the job goes on, so there is no verdict: people are told by the alert of the finding
        playbook = playbook.replace("TrainingFailed", "TrainingLossNaN").replace("diagnosis", "log")
    with (
        _place(accident, tmp_path) as place,
        _world(tmp_path, redis_server, playbook, has_kernel=accident == "cgroup") as (server, node, logs),
    ):
        job = _job(logs.parent, node, redis_server, accident, place)
        try:
            job.wait()
        finally:
            job.close()
        _kill(killed, server, node, redis_server)
        (run,) = eventually(server.runs, 60, "a run")
        assert run["target"] == "job:llm-1"
        if accident != "nan":
            said = _verdict(server)
            cause, ranks = _EXPECTED[accident]
            assert (said["cause"], said["ranks"], said["node"]) == (cause, ranks, None), said
            assert run["alert_labels"]["cause"] == cause
        time.sleep(5)
        assert len(server.runs()) == 1


@contextlib.contextmanager
def _place(accident: str, tmp_path: Path) -> Iterator[str]:
    """Where the accident happens; empty where that is nowhere."""
    with contextlib.ExitStack() as stack:
        match accident:
            case "cgroup":
                yield str(stack.enter_context(memory_group(tmp_path.name)))
            case "full":
                yield str(stack.enter_context(small_tmpfs(tmp_path / "full")))
            case _:
                yield ""


@contextlib.contextmanager
def _world(
    tmp_path: Path, redis_server: RedisServer, playbook: str, *, has_kernel: bool
) -> Iterator[tuple[Server, LogNode, Path]]:
    """A server and a node whose agent has its rules; and the folder of logs that it reads, beside the kernel's log
    where that is asked for."""
    logs = tmp_path / "job" / "logs"
    logs.mkdir(parents=True)
    environment = {"TRAINMEDIC_SIGNING_KEY": KEY}
    kernel = {"kernel": "kmsg"} if has_kernel else {}
    with (
        Server(tmp_path / "server", playbook, *("--redis", redis_server.url), environment=environment) as server,
        LogNode(tmp_path / "node", redis_server.url, roots=[str(logs)], **kernel) as node,
    ):
        eventually(lambda: 'rules_info{version=""}' not in node.metrics(), 60, "rules from the server")
        yield server, node, logs


def _job(directory: Path, node: LogNode, redis_server: RedisServer, accident: str, place: str) -> Launched:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    return Launched(
        directory,
        [*torchrun, str(_JOB), accident, place],
        *("--retries=0", "--job=llm-1"),
        TRAINMEDIC_NODE=node.name,
        TRAINMEDIC_REDIS_URL=redis_server.url,
        TRAINMEDIC_SIGNING_KEY=identity_key(KEY.encode(), job_identity("llm-1")).decode(),
    )


def _kill(whom: str, server: Server, node: LogNode, redis_server: RedisServer) -> None:
    """Kill it where it stands, and start it again."""
    match whom:
        case "server":
            server.kill()
            server.start()
        case "agent":
            node.kill()
            node.start()
        case "redis":
            redis_server.kill()
            time.sleep(2)
            redis_server.start()
