"""A node is drained while the server is killed, and while the Kubernetes API is in trouble, again and again."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

from tests.kubernetes.api_server import ApiServer, Fault
from tests.kubernetes.living_node import LivingNode, evicted, is_cordoned
from tests.support.live import Server
from tests.support.messages import delivery, resolved

PODS = 8
PLAYBOOK = """
playbook: drain-node
on: {alert: NodeSick}
target: {node: '{{ labels.job_name }}'}
steps:
  - {id: drain, action: k8s.drain, timeout: 2m, retry: {attempts: 5, delay: 1s}, undo: on_resolve}
"""


def test_a_drain_ends_correctly_however_often_the_server_and_the_api_fail(
    stand_in: ApiServer, kubeconfig: Path, tmp_path: Path
) -> None:
    """Killed and cut off at random moments: every pod is evicted once, the history shows one step that
    succeeded, and when the alert resolves the node takes pods again."""
    chance = random.Random(7)
    with (
        LivingNode(kubeconfig, PODS) as node,
        Server(tmp_path / "s", PLAYBOOK, "--kubernetes", str(kubeconfig)) as server,
    ):
        assert node.ref is not None
        fired = delivery("NodeSick", node.ref.name)
        assert server.ask("/webhook", fired).status == 200
        for round_ in range(4):
            time.sleep(chance.uniform(0.1, 0.7))
            with contextlib.ExitStack() as trouble:
                if round_ == 1:
                    trouble.enter_context(stand_in.outage())
                    time.sleep(1)
                elif round_ == 2:
                    stand_in.faults.append(Fault(429, times=6, retry_after=1))
                elif round_ == 3:
                    stand_in.faults.append(Fault(500, times=6, is_done_first=True))
                server.kill()
                server.start()
        run = server.closed_run(60)
        assert run["status"] == "succeeded", run
        (step,) = run["steps"]
        assert step["output"]["left"] == []
        assert step["output"]["before"] == {"cordoned": False}
        assert sorted(node.ended) == [f"worker-{number}" for number in range(PODS)]
        assert evicted(stand_in) == {f"worker-{number}" for number in range(PODS)}
        assert is_cordoned(stand_in, node.ref)
        assert server.ask("/webhook", resolved(fired)).status == 200
        undone = server.undone_run()
        assert undone["steps"][0]["undo"]["status"] == "done"
        assert not is_cordoned(stand_in, node.ref)
        kinds = [event["kind"] for event in undone["events"]]
        assert kinds.count("step_succeeded") == 1, kinds
