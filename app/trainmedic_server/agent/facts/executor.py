"""``node.facts``: what this node reports, as the output of a step.

It looks at the processors over half a second, in a lane of its own, so nothing waits for it. A part that cannot
be read is left out and named in ``problems``; the others are told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainmedic_server.agent import executors
from trainmedic_server.agent.facts import gpu, host
from trainmedic_server.errors import GpuError
from trainmedic_server.ports.gpus import Gpus

WINDOW = 0.5
"""Seconds over which the processors' share is taken."""


@dataclass(frozen=True, slots=True)
class NodeFactsExecutor:
    """``places``: paths whose file systems are of interest, such as the roots of the policy's cleaning rules."""

    node: str
    gpus: Gpus
    places: Sequence[str] = ()
    proc: Path = host.PROC
    sleep: Callable[[float], None] = field(default=time.sleep)
    action: str = "node.facts"
    queue: str = "facts"

    def perform(self, order: executors.AcceptedCommand) -> Mapping[str, Any]:
        told: dict[str, Any] = {"node": self.node}
        problems: list[str] = []
        parts: Sequence[Callable[[], Mapping[str, Any]]] = (
            self._cpu,
            lambda: host.memory(self.proc),
            lambda: {"disks": host.disks(self.places, self.proc)},
            lambda: {"uptime_seconds": host.uptime(self.proc)},
        )
        for part in parts:
            try:
                told.update(part())
            except (OSError, ValueError, LookupError) as error:
                problems.append(f"{type(error).__name__}: {error}")
        told.update(gpu.all_facts(self.gpus))
        named = order.command.target.get("gpu")
        if isinstance(named, str):
            try:
                uuid = self.gpus.find(named).uuid
                told["gpu"] = next((one for one in told.get("gpus", ()) if one["uuid"] == uuid), None)
            except GpuError as error:
                problems.append(str(error))
        if problems:
            told["problems"] = problems
        return {name: value for name, value in told.items() if value is not None}

    def _cpu(self) -> Mapping[str, Any]:
        before = host.cpu_times(self.proc)
        self.sleep(WINDOW)
        return {"cpu": host.cpu(before, host.cpu_times(self.proc), self.proc)}
