"""The agent of a GPU node as a real process: over a real Redis, the real pynvml, and the stand-in for the driver."""

from __future__ import annotations

import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.driver.driver import SET_LIMIT, Driver, cards
from tests.support.gpu_node import GpuNode
from tests.support.programs import eventually
from trainmedic.wire import envelope

FIRST, SECOND = (card.uuid for card in cards(2))


@pytest.fixture
def node(tmp_path: Path, redis_url: str, make_driver: Callable[..., Driver]) -> Iterator[GpuNode]:
    with GpuNode(tmp_path / "node", redis_url, make_driver(2)) as running:
        yield running


def test_a_cap_is_set_renewed_and_undone(node: GpuNode) -> None:
    """Each command has its outcome; the driver was called twice."""
    cap = node.send(node.cap("1", percent=80, lease_seconds=2))
    applied = node.final(cap)
    assert (applied.status, applied.output["gpu"], applied.output["limit_watts"]) == (envelope.APPLIED, SECOND, 560)
    renewed = node.final(node.send(node.renewal(cap.id, seconds=300)))
    assert renewed.output == {"renewed": [cap.id], "unknown": []}
    undone = node.final(node.send(node.cap("1", undo_of=cap.id)))
    assert (undone.status, undone.output["limit_watts"]) == (envelope.APPLIED, 700)
    assert [(call.gpu, call.watts) for call in node.driver.sets()] == [(1, 560), (1, 700)]


def test_a_cap_ends_with_its_lease_without_redis_and_server(node: GpuNode) -> None:
    """Redis and the server may both be gone; it ends to the second."""
    cap = node.final(node.send(node.cap("0", percent=80, lease_seconds=1.5)))
    end = envelope.read_time(cap.output["lease_until"]).timestamp()
    eventually(lambda: node.driver.watts(0) == 700, 60, "the limit from before", every=0.02)
    assert 0 <= node.driver.sets()[-1].at - end < 30


def test_a_lease_that_expired_while_the_agent_was_dead_ends_at_its_start(node: GpuNode) -> None:
    """It ends before the first command is accepted, although the policy no longer allows caps."""
    cap = node.final(node.send(node.cap("0", percent=80, lease_seconds=5)))
    node.kill()
    time.sleep(max(0, envelope.read_time(cap.output["lease_until"]).timestamp() - time.time()))
    assert node.driver.watts(0) == 560
    node.start()
    assert node.driver.watts(0) == 700


def test_an_agent_without_its_state_directory_rejects_commands_and_ends_its_caps(node: GpuNode) -> None:
    """It does nothing that it cannot record durably, and reverts its changes in time."""
    node.final(node.send(node.cap("0", percent=80, lease_seconds=5)))
    shutil.rmtree(node.state)
    refused = node.final(node.send(node.cap("1", percent=80, lease_seconds=300)), within=60)
    assert refused.status == envelope.FAILED
    assert "was moved or removed" in refused.output["reason"]
    eventually(lambda: node.driver.watts(0) == 700, 60, "the limit from before")
    assert [call.gpu for call in node.driver.sets()] == [0, 0]


def test_the_presence_names_the_gpus_and_their_limits(node: GpuNode) -> None:
    """The server learns them from it."""
    presence = node.presence()
    assert presence is not None
    assert presence["gpus"][1] == {
        "index": 1,
        "uuid": SECOND,
        "name": "NVIDIA H100 80GB HBM3",
        "pci_bus_id": "0000:20:00.0",
        "power_limit_watts": 700,
        "default_limit_watts": 700,
        "min_limit_watts": 200,
        "max_limit_watts": 700,
    }
    assert presence["gpu_readings"][1]["uuid"] == SECOND
    assert presence["gpu_readings"][1].keys() == {"uuid", "temperature_celsius", "power_watts", "utilization_percent"}
    assert presence["driver"] == "570.86.15"
    reading = ["logs.read", "node.facts", "node.health"]
    assert presence["actions"] == ["disk.clean", "gpu.power_limit", "gpu.renew_lease", *reading]


def test_a_node_without_a_driver_still_serves(tmp_path: Path, redis_url: str, driver: Driver) -> None:
    """It reports its facts and rejects caps with the reason, without a crash."""
    driver.unload()
    with GpuNode(tmp_path / "node", redis_url, driver) as node:
        presence = node.presence()
        assert presence is not None
        assert presence["gpus"] == []
        status, output = node.do("node.facts")
        assert status == envelope.APPLIED
        assert output["cpu"]["count"] >= 1
        assert "not loaded" in output["gpu_problems"][0]
        refused = node.final(node.send(node.cap("0", percent=80)))
        assert refused.status == envelope.FAILED
        assert "not loaded" in str(refused.output["reason"])
        assert scrape(node)["trainmedic_agent_gpus_missing"] == 1


def test_the_metrics_show_the_gpus_and_the_agent(node: GpuNode) -> None:
    """They are scraped while a cap is active."""
    node.driver.load(0, 0.5)
    cap = node.final(node.send(node.cap("0", percent=60)))
    shown = scrape(node)
    gpu = f'gpu_id="0",gpu_name="NVIDIA H100 80GB HBM3",uuid="{FIRST}"'
    assert shown[f"gpu_power_limit_watts{{{gpu}}}"] == 420
    assert shown[f"gpu_utilization_percent{{{gpu}}}"] == 50
    assert shown['trainmedic_agent_commands_total{action="gpu.power_limit",status="applied"}'] == 1
    assert shown["trainmedic_agent_redis_connected"] == 1
    assert shown[f'trainmedic_agent_power_caps{{uuid="{FIRST}"}}'] == 1
    end = envelope.read_time(cap.output["lease_until"]).timestamp()
    assert shown[f'trainmedic_agent_power_lease_end_timestamp_seconds{{uuid="{FIRST}"}}'] == pytest.approx(end)
    assert shown["process_resident_memory_bytes"] > 1e7


def scrape(node: GpuNode) -> dict[str, float]:
    with urllib.request.urlopen(node.exporter(), timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))
    }


def test_a_hanging_gpu_costs_the_node_only_this_gpu(node: GpuNode) -> None:
    """Its command fails with the reason; the other is capped and restored, the metrics name the one that is
    stuck, and the agent stops when it is told to."""
    node.driver.fail(SET_LIMIT, gpu=0, hang=True)
    stuck, other = node.send(node.cap("0", percent=80)), node.send(node.cap("1", percent=80))
    assert node.final(other).output["limit_watts"] == 560
    failed = node.final(stuck)
    assert failed.status == envelope.FAILED
    assert "is stuck" in failed.output["reason"]
    assert node.final(node.send(node.cap("0", percent=80))).status == envelope.FAILED
    assert node.final(node.send(node.cap("1", undo_of=other.id))).output["limit_watts"] == 700
    with urllib.request.urlopen(node.exporter(), timeout=60) as reply:
        metrics = reply.read().decode().splitlines()
    stuck_ones = [line for line in metrics if line.startswith("trainmedic_agent_gpu_stuck{")]
    assert [(line.rpartition('uuid="')[2]) for line in stuck_ones] == [f'{FIRST}"}} 1.0', f'{SECOND}"}} 0.0']
    assert any(line.startswith("gpu_temperature_celsius") and SECOND in line for line in metrics)
    assert node.agent.end(patience=30) == 0, node.agent.tail()
