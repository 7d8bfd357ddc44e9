"""A GPU node for tests: the real agent as a process, with its own executors, on the stand-in for the GPU driver."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.driver.driver import Driver
from tests.support.agent_node import POLICY, Node
from tests.support.programs import eventually
from trainmedic.wire.envelope import Command


class GpuNode(Node):
    """`tests.support.agent_node.Node`, with GPUs. They outlive the agent."""

    def __init__(
        self, directory: Path, url: str, driver: Driver, policy: str | None = POLICY, name: str = "n1"
    ) -> None:
        super().__init__(directory, url, policy, name)
        self.driver = driver

    def _entry(self) -> tuple[str | Path, ...]:
        return "-m", "trainmedic_server"

    def start(self, *options: str, wait: bool = True, **environment: str) -> None:
        super().start(*options, wait=wait, **{**self.driver.environment, **environment})

    def cap(
        self, gpu: str | list[str] = "0", undo_of: str | None = None, lasting: float = 30.0, **params: Any
    ) -> Command:
        """A ``gpu.power_limit`` for one GPU or several, or the undo of one; not sent yet."""
        command = self.command("gpu.power_limit", lasting, undo_of, **(params or {"restore": True}))
        command.target.update({"kind": "gpu", **({"gpus": gpu} if isinstance(gpu, list) else {"gpu": gpu})})
        return command

    def renewal(self, *holds: str, seconds: float) -> Command:
        return self.command("gpu.renew_lease", holds=list(holds), lease_seconds=seconds)

    def exporter(self) -> str:
        """The URL of its metrics, as it logged it."""

        def ask() -> str | None:
            lines = (json.loads(line) for line in self.agent.log.read_text().splitlines() if line.startswith("{"))
            return next(
                (f"http://{one['host']}:{one['port']}/metrics" for one in lines if one["event"] == "metrics"), None
            )

        return eventually(ask, 60, "the exporter's address", every=0.02)
