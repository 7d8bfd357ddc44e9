"""The simulated GPUs, and what their agents answer."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support.programs import free_port
from trainmedic.wire import envelope
from trainmedic_server.demo.simulated_nodes import DEFAULT_WATTS, SimulatedCluster, SimulatedGpu, SimulatedNode


@pytest.fixture
def node() -> SimulatedNode:
    return SimulatedNode("node-1", "redis://127.0.0.1:1/0", 2)


def order(node: SimulatedNode, action: str, undo_of: str | None = None, **params: Any) -> tuple[str, dict[str, Any]]:
    now = datetime.now(UTC)
    command = envelope.Command(
        id=params.pop("id", "c1"),
        action=action,
        target={"kind": "gpu", "node": "node-1", "gpu": params.pop("gpu", "0")},
        params=params,
        run_id="r1",
        playbook="hot-gpu",
        reason="",
        issued_at=now,
        expires_at=now + timedelta(minutes=1),
        undo_of=undo_of,
    )
    record = node.carry_out(command)
    return record.status, dict(record.output)


def settled(gpu: SimulatedGpu, now: float) -> float:
    for _ in range(100):
        gpu.advance(1, now)
    return gpu.celsius


def test_a_gpu_without_fan_overheats_and_a_cap_cools_it() -> None:
    """It cools below the alert's limit while the fan is still stopped."""
    gpu = SimulatedGpu("node-1", 0, "GPU-a")
    assert settled(gpu, 0) < 75
    gpu.fan_stopped_until = 1000
    assert settled(gpu, 0) > 90
    gpu.caps["c1"] = (0.6 * DEFAULT_WATTS, 1000)
    assert settled(gpu, 0) < 80


def test_a_cap_is_set_renewed_and_reverted(node: SimulatedNode) -> None:
    """The demo agent uses the command's id, as a real agent does."""
    status, output = order(node, "gpu.power_limit", percent=60, lease_seconds=300)
    assert (status, output["limit_watts"], output["previous_watts"]) == ("applied", 210, 350)
    assert order(node, "gpu.renew_lease", holds=["c1", "c9"], lease_seconds=300) == ("applied", {"unknown": ["c9"]})
    assert order(node, "gpu.power_limit", undo_of="c1", id="c2", restore=True)[1]["limit_watts"] == 350
    again = order(node, "gpu.power_limit", undo_of="c1", id="c3", restore=True)
    assert again == ("applied", {"nothing_to_undo": True, "known": "not_in_force"})


def test_a_cap_that_is_not_renewed_ends(node: SimulatedNode) -> None:
    """Its lease has expired."""
    order(node, "gpu.power_limit", percent=60, lease_seconds=-1)
    node.advance(1)
    assert node.gpus[0].limit_watts == DEFAULT_WATTS


def test_an_agent_refuses_unsupported_commands(node: SimulatedNode) -> None:
    """These are another GPU and another action."""
    assert order(node, "gpu.power_limit", gpu="7", percent=60)[0] == "rejected"
    assert order(node, "disk.clean") == ("unsupported", {"reason": "a simulated agent does not know disk.clean"})
    assert order(node, "node.facts")[1]["gpus"][1]["index"] == 1


class BusyNode(SimulatedNode):
    """Each tick takes 0.7 s, as on a busy machine."""

    def __init__(self) -> None:
        super().__init__("node-1", "redis://127.0.0.1:1/0", 1)
        self.advanced: list[float] = []
        self.is_second = threading.Event()

    def advance(self, seconds: float) -> None:
        time.sleep(0.7)
        self.advanced.append(seconds)
        if len(self.advanced) > 1:
            self.is_second.set()


def test_late_ticks_lose_no_time() -> None:
    """Otherwise a fan that stops for 20 s would heat its GPU for only part of that time."""
    node = BusyNode()
    cluster = SimulatedCluster([node], free_port())
    cluster.start()
    try:
        assert node.is_second.wait(60)
    finally:
        cluster.stop()
    assert node.advanced[1] > 1.1
