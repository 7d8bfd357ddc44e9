"""Executor of ``node.facts``, with its own worker queue: it measures for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from trainmedic.errors import described
from trainmedic_agent.errors import GpuError
from trainmedic_agent.executors import AcceptedCommand
from trainmedic_agent.facts import gpu, host
from trainmedic_agent.gpu_record import GpuRecord
from trainmedic_agent.ports.gpus import Gpus

CPU_SECONDS = 0.5  # measured for the CPU's load


class NodeFactsExecutor(Struct, frozen=True):
    """`paths`: their file systems are reported too."""

    node: str
    gpus: Gpus
    record: GpuRecord
    paths: Sequence[str] = ()
    proc: Path = host.PROC
    sleep: Callable[[float], None] = field(default=time.sleep)
    action: str = "node.facts"
    queue: str = "facts"

    def perform(self, accepted: AcceptedCommand) -> Mapping[str, Any]:
        facts: dict[str, Any] = {"node": self.node}
        problems: list[str] = []
        parts: Sequence[Callable[[], Mapping[str, Any]]] = (
            self._cpu,
            lambda: host.memory(self.proc),
            lambda: {"disks": host.disks(self.paths, self.proc)},
            lambda: {"uptime_seconds": host.uptime(self.proc)},
        )
        for part in parts:
            try:
                facts.update(part())
            except (OSError, ValueError, LookupError) as error:
                problems.append(described(error))
        facts.update(gpu.all_facts(self.gpus))
        present = {card["uuid"] for card in facts.get("gpus", ())}
        # With earlier GPUs, so that a missing one shows.
        facts["gpus_known"] = len(present | {known.info.uuid for known in self.record.gpus()}) or None
        name = accepted.command.target.get("gpu")
        if isinstance(name, str):
            try:
                uuid = self.gpus.find(name).uuid
                facts["gpu"] = next((card for card in facts.get("gpus", ()) if card["uuid"] == uuid), None)
            except GpuError as error:
                problems.append(str(error))
        if problems:
            facts["problems"] = problems
        return {name: value for name, value in facts.items() if value is not None}

    def _cpu(self) -> Mapping[str, Any]:
        before = host.cpu_times(self.proc)
        self.sleep(CPU_SECONDS)
        return {"cpu": host.cpu(before, host.cpu_times(self.proc), self.proc)}
