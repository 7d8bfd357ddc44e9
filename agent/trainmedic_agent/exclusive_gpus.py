"""Exclusive control of GPUs between agents of one machine.

A second agent would take the first one's cap for the original limit, and leave the GPU capped permanently. Agents in
other network namespaces are not detected; a node's pods share the chart's state directory instead.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from trainmedic.errors import ConfigurationError
from trainmedic_agent import privileges
from trainmedic_agent.adapters.time_limited_gpus import TimeLimitedCalls, TimeLimitedGpus
from trainmedic_agent.errors import GpuTaken
from trainmedic_agent.ports import gpus
from trainmedic_core.gpu_names import normal_uuid
from trainmedic_core.machine_locks import NameLock, holder_of

T = TypeVar("T")


class ExclusiveGpus(TimeLimitedGpus):
    def __init__(self, inner: gpus.Gpus, calls: TimeLimitedCalls) -> None:
        super().__init__(inner, calls)
        self._lock = threading.Lock()
        self._held: dict[str, NameLock] = {}

    def claim(self) -> None:
        """Take all listed GPUs. Raises ConfigurationError if another agent holds one."""
        listed = super().inventory().gpus
        refusals = [reason for info in listed if (reason := self._take(info.uuid))]
        if refusals:
            raise ConfigurationError("\n".join(refusals))

    def inventory(self) -> gpus.Inventory:
        """Return the GPUs that no other agent has; the others are among the problems."""
        inventory = super().inventory()
        refusals = {info.uuid: self._take(info.uuid) for info in inventory.gpus}
        free = tuple(info for info in inventory.gpus if refusals[info.uuid] is None)
        taken = tuple(reason for reason in refusals.values() if reason is not None)
        return gpus.Inventory(free, (*inventory.problems, *taken), inventory.driver)

    def find(self, name: str) -> gpus.GpuInfo:
        """Raises GpuTaken."""
        info = super().find(name)
        self._require(info.uuid)
        return info

    def set_power_limit(self, uuid: str, milliwatts: int) -> None:
        """Raises GpuTaken."""
        self._require(uuid)
        super().set_power_limit(uuid, milliwatts)

    def while_closed(self, uuids: Sequence[str], act: Callable[[], T]) -> T:
        """Raises GpuTaken."""
        for uuid in uuids:
            self._require(uuid)
        return super().while_closed(uuids, act)

    def close(self) -> None:
        super().close()
        with self._lock:
            while self._held:
                self._held.popitem()[1].release()

    def _require(self, uuid: str) -> None:
        reason = self._take(uuid)
        if reason is not None:
            raise GpuTaken(reason)

    def _take(self, uuid: str) -> str | None:
        """Take the GPU. Return None, or why another agent has it."""
        with self._lock:
            if uuid in self._held:
                return None
            lock_or_holder = NameLock.take(_name(uuid))
            if isinstance(lock_or_holder, NameLock):
                self._held[uuid] = lock_or_holder
                return None
        # Any user can take the lock: a holder that cannot set limits must not block the agent.
        return taken_by(uuid, lock_or_holder.pid) if privileges.is_agent(lock_or_holder, privileges.POWER) else None


def agents_of(uuids: list[str]) -> Mapping[str, int]:
    """Return the process IDs of agents that hold these GPUs, by UUID."""
    holders = {
        uuid: holder
        for uuid in uuids
        if (holder := holder_of(_name(uuid))) and privileges.is_agent(holder, privileges.POWER)
    }
    return {uuid: holder.pid for uuid, holder in holders.items() if holder.pid is not None}


def taken_by(uuid: str, pid: int | None) -> str:
    return (
        f"{uuid} belongs to another agent of this machine, process {pid}: each would take the other's cap for "
        "the original limit, and leave the GPU capped. Stop one of them"
    )


def _name(uuid: str) -> str:
    simulation = hashlib.sha256(" ".join(_simulated_in()).encode()).hexdigest()[:16]
    return f"gpu:{normal_uuid(uuid)}:{simulation}"


def _simulated_in() -> list[str]:
    """Return device and inode of a simulated driver's state files.

    Simulations may share UUIDs, but not the mapped file.
    """
    try:
        mappings = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    except OSError:
        return []
    # Files with the suffix -shm are SQLite's.
    return sorted(
        {
            f"{device}:{inode}"
            for _, access, _, device, inode, path in (columns for columns in mappings if len(columns) == 6)
            if access == "rw-s" and path.startswith("/") and not path.startswith("/dev/") and not path.endswith("-shm")
        }
    )
