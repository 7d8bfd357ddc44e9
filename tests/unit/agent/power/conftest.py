"""One node without its agent's process: the executors and the end of leases, the real journal, the real pynvml, and the
stand-in for the driver. Time stands still until a test moves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.driver.driver import Driver
from trainmedic.wire import envelope
from trainmedic_agent import executors
from trainmedic_agent.adapters.nvml_gpus import NvmlGpus
from trainmedic_agent.journal import Journal
from trainmedic_agent.policy import PowerBounds
from trainmedic_agent.power.control import PowerControl
from trainmedic_agent.power.executors import PowerLimitExecutor, RenewLeaseExecutor
from trainmedic_agent.power.lease_expiry import LeaseExpiry
from trainmedic_agent.power.ledger import PowerLedger

START = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


class Node:
    """What a test does with the node. ``restart`` is what SIGKILL and a new process come to."""

    def __init__(self, driver: Driver, directory: Path, bounds: PowerBounds) -> None:
        self.driver = driver
        self.directory = directory
        self.bounds = bounds
        self.clock = START
        self.boottime = 1000.0
        self.boot = "boot-1"
        self._open()

    def _open(self) -> None:
        self.journal = Journal(self.directory)
        self.gpus = NvmlGpus(lambda: self.boottime)
        self.control = PowerControl(
            self.gpus, PowerLedger(self.journal), self.bounds, lambda: self.clock, lambda: self.boottime, self.boot
        )
        self.expiry = LeaseExpiry(self.control, lambda: self.boottime)

    def close(self) -> None:
        self.gpus.close()
        self.journal.close()

    def restart(self) -> None:
        self.close()
        self._open()

    def reboot(self, seconds: float) -> None:
        """The machine is off for so long; the card keeps its limit all the same."""
        self.close()
        self.clock += timedelta(seconds=seconds)
        self.boottime, self.boot = 5.0, "boot-2"
        self._open()

    def passes(self, seconds: float) -> None:
        """Time goes by, and the end of leases runs whenever it is due."""
        end = self.boottime + seconds
        for _ in range(10_000):
            due = self.expiry.due()
            if due is None or self.boottime + max(due, 0) > end:
                break
            self._go_on(max(due, 0))
            self.expiry.run()
        else:
            raise AssertionError("the end of leases is always due")
        self._go_on(end - self.boottime)

    def _go_on(self, seconds: float) -> None:
        self.boottime += seconds
        self.clock += timedelta(seconds=seconds)

    def cap(
        self, command_id: str, gpu: str | list[str] = "0", resumed: bool = False, **params: Any
    ) -> Mapping[str, Any]:
        """Carry out ``gpu.power_limit``."""
        target = {"kind": "gpu", "node": "node-1", **({"gpus": gpu} if isinstance(gpu, list) else {"gpu": gpu})}
        return PowerLimitExecutor(self.control).perform(
            self.accepted(command_id, "gpu.power_limit", target, params, resumed=resumed)
        )

    def undo(self, of: str, command_id: str | None = None) -> Mapping[str, Any]:
        """Carry out the undo of a cap."""
        target = {"kind": "gpu", "node": "node-1", "gpu": "0"}
        accepted = self.accepted(command_id or f"undo-{of}", "gpu.power_limit", target, {"restore": True}, undo_of=of)
        return PowerLimitExecutor(self.control).perform(accepted)

    def renew(self, *holds: str, seconds: float = 300, ago: float = 0.0, **more: Any) -> Mapping[str, Any]:
        """Carry out ``gpu.renew_lease``, said so many seconds ago."""
        params = {"holds": list(holds), "lease_seconds": seconds, **more}
        accepted = self.accepted("renew", "gpu.renew_lease", {"kind": "node", "node": "node-1"}, params, ago=ago)
        return RenewLeaseExecutor(self.control).perform(accepted)

    def abandon(self, command_id: str) -> None:
        target = {"kind": "gpu", "node": "node-1", "gpu": "0"}
        PowerLimitExecutor(self.control).abandon(
            self.accepted(command_id, "gpu.power_limit", target, {"percent": 80}, resumed=True)
        )

    def accepted(
        self,
        command_id: str,
        action: str,
        target: Mapping[str, Any],
        params: Mapping[str, Any],
        *,
        resumed: bool = False,
        undo_of: str | None = None,
        ago: float = 0.0,
    ) -> executors.AcceptedCommand:
        issued = self.clock - timedelta(seconds=ago)
        expires = issued + timedelta(seconds=30)
        command = envelope.Command(
            command_id,
            action,
            target,
            params,
            "run-1",
            "gpu-temperature-high",
            "GPUTemperatureHigh",
            issued,
            expires,
            undo_of,
        )
        return executors.AcceptedCommand(command, resumed)

    def watts(self, gpu: int = 0) -> float:
        return self.driver.watts(gpu)


@pytest.fixture
def make_node(make_driver: Callable[..., Driver], tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Make a node, by default with two GPUs of 200 to 700 W and a policy that allows half of that and leases of
    fifteen minutes."""
    made: list[Node] = []

    def make(gpus: Any = 2, bounds: PowerBounds = PowerBounds()) -> Node:
        made.append(Node(make_driver(gpus), tmp_path / "state", bounds))
        return made[-1]

    yield make
    for node in made:
        node.close()


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    return make_node()
