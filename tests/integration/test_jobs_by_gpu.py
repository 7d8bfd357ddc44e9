"""From a GPU to its job, and from a job to all of its GPUs: a real server, Redis, agent and job.

Stand-ins are the GPU driver, the Kubernetes API, and the node's processes that belong to pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.driver.driver import Driver, cards
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.world import World
from tests.support.agent_node import KEY
from tests.support.gpu_node import GpuNode
from tests.support.live import Server
from tests.support.messages import delivery, resolved
from tests.support.programs import PYTHON_PATH, ROOT, Program, eventually
from trainmedic.wire import envelope
from trainmedic_server.adapters.kubernetes_cluster import KubernetesCluster

FIRST, SECOND = (card.uuid for card in cards(2))
PLAYBOOK = """
playbook: job-on-gpu
on: {alert: GPUFailing}
target: {job: "gpu:alert"}
steps:
  - {id: save, action: job.checkpoint, timeout: 30s, when: "labels.save is defined"}
  - {id: cap, action: gpu.power_limit, with: {percent: 80}, undo: on_resolve}
"""


class SeeingNode(GpuNode):
    """A node whose agent sees the processes in `proc`."""

    def __init__(self, directory: Path, url: str, driver: Driver, name: str) -> None:
        super().__init__(directory, url, driver, name=name)
        self.proc = directory / "proc"

    def _entry(self) -> tuple[str | Path, ...]:
        return (ROOT / "tests" / "support" / "agent_with_proc.py",)

    def start(self, *options: str, wait: bool = True, **environment: str) -> None:
        super().start(*options, wait=wait, PROC=str(self.proc), **environment)

    def compute(self, gpu: int, pid: int, pod: str) -> None:
        """A process of the pod computes on that GPU."""
        (self.proc / str(pid)).mkdir(parents=True)
        scope = f"kubepods-burstable-pod{pod.replace('-', '_')}.slice/cri-containerd-{'5c' * 32}.scope"
        (self.proc / str(pid) / "cgroup").write_text(f"0::/../../../kubepods-burstable.slice/{scope}\n")
        self.driver.occupy(gpu, pid)


@pytest.fixture
def stand_in() -> Iterator[ApiServer]:
    with ApiServer().running() as server:
        yield server


def failing(name: str, **labels: str) -> dict[str, Any]:
    """An alert with these labels."""
    fired = delivery("GPUFailing", name)
    fired["alerts"][0]["labels"] = {"alertname": "GPUFailing", **labels}
    return fired


def decided(server: Server, fired: Mapping[str, Any]) -> tuple[str, str | None]:
    """What the server decided on the one alert, and on which target."""
    answer = server.ask("/webhook", fired)
    assert answer.status == 200, answer
    (run,) = answer.body["runs"]
    return run["decision"], run["target"]


@contextlib.contextmanager
def serving(directory: Path, redis_url: str, *options: str) -> Iterator[Server]:
    """A server that starts now: it knows at once what is in Redis now."""
    server = Server(directory, PLAYBOOK, "--redis", redis_url, *options)
    try:
        server.start(TRAINMEDIC_SIGNING_KEY=KEY)
        yield server
    finally:
        server.__exit__()


def present(url: str, key: str) -> dict[str, Any]:
    with redis.Redis.from_url(url) as client:
        found = client.get(key)
    assert found is None or isinstance(found, bytes)
    return dict(json.loads(found or b"{}"))


def test_the_job_on_a_broken_gpu_saves_and_its_gpus_are_capped(
    tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver]
) -> None:
    """The job's data on its ranks and the UUID in the alert suffice. The node's other GPU is left alone; a GPU
    of no job is refused; and the power comes back with the end of the alert."""
    driver = make_driver(2)
    job = {
        "PYTHONPATH": PYTHON_PATH,
        "TRAINMEDIC_REDIS_URL": redis_url,
        "TRAINMEDIC_SIGNING_KEY": KEY,
    }
    job |= {"TRAINMEDIC_JOB": "llm-1", "TRAINMEDIC_NODE": "n1", "GPU": SECOND}
    program = [sys.executable, Path(__file__).with_name("placed_job.py")]
    with GpuNode(tmp_path / "node", redis_url, driver), Program(program, tmp_path / "job.log", job) as training:
        placement = [{"rank": 0, "node": "n1", "gpu": SECOND}]
        key = envelope.job_presence("llm-1")
        eventually(lambda: present(redis_url, key).get("placement") == placement, 60, f"its GPU\n{training.tail()}")
        with serving(tmp_path / "server", redis_url) as server:
            (item,) = server.ask("/jobs").body["items"]
            assert (item["nodes"], item["gpus"]) == (["n1"], [{"node": "n1", "uuid": SECOND}])
            fired = failing("1", UUID=SECOND.lower(), save="yes")
            assert decided(server, fired) == ("started", "job:llm-1")
            run = server.closed_run()
            assert run["status"] == "succeeded", run
            assert run["steps"][1]["params"] == {"percent": 80, "nodes": {"n1": [SECOND]}}
            assert len((tmp_path / "checkpoints").read_text().splitlines()) == 1
            assert (driver.watts(0), driver.watts(1)) == (700, 560)
            assert decided(server, failing("2", UUID=FIRST))[0] == "target_unknown"
            server.ask("/webhook", resolved(fired))
            eventually(lambda: driver.watts(1) == 700, 60, "the power is back", 0.05)


async def make_pods(kubeconfig: Path) -> tuple[str, dict[str, str]]:
    """A node, and on it a job of two GPUs and another pod; the uids of the pods."""
    cluster = await KubernetesCluster.opened(kubeconfig)
    world = World(cluster)
    await world.start()
    node = await world.node()
    labels = {"jobset.sigs.k8s.io/jobset-name": "llm-2"}
    refs = [await world.pod("worker-0", node, labels, gpus=2), await world.pod("notebook", node)]
    uids = {ref.name: (await cluster.get(ref))["metadata"]["uid"] for ref in refs}
    await cluster.close()
    return node.name, uids


def test_all_gpus_of_a_job_without_the_sdk_are_capped(
    tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver], stand_in: ApiServer
) -> None:
    """The agent sees the pods on the node's GPUs, and the cluster knows whose they are."""
    kubeconfig = tmp_path / "kubeconfig.json"
    kubeconfig.write_text(json.dumps(stand_in.kubeconfig()))
    name, uids = asyncio.run(make_pods(kubeconfig))
    driver = make_driver(3)
    node = SeeingNode(tmp_path / "node", redis_url, driver, name)
    node.compute(0, 41, uids["worker-0"])
    node.compute(1, 42, uids["worker-0"])
    node.compute(2, 43, uids["notebook"])
    with node, serving(tmp_path / "server", redis_url, "--kubernetes", str(kubeconfig)) as server:
        gpus = [{"node": name, "uuid": uuid} for uuid in (FIRST, SECOND)]
        (item,) = eventually(lambda: server.ask("/jobs?cluster=true").body["items"], 60, "the cluster is known")
        assert (item["name"], item["connected"], item["gpus"], item["nodes"]) == ("llm-2", False, gpus, [name])
        assert [pod["name"] for pod in item["pods"]] == ["worker-0"]
        assert server.ask("/jobs").body["items"] == []
        fired = failing("1", gpu_id="1", node=name)
        assert decided(server, fired) == ("started", "job:llm-2")
        run = server.closed_run()
        assert run["status"] == "succeeded", run
        assert [driver.watts(gpu) for gpu in range(3)] == [560, 560, 700]
        server.ask("/webhook", resolved(fired))
        eventually(lambda: [driver.watts(gpu) for gpu in range(2)] == [700, 700], 60, "the power is back", 0.05)
        assert decided(server, failing("2", gpu_id="2", node=name))[0] == "target_unknown"
