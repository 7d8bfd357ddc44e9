"""Persistent record of the node's GPUs and XID errors.

The driver reports an XID error only once; the record keeps it until the node reboots or the GPU is reset. A reset shows
by a smaller energy counter, or by the end of the requested recovery action.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from trainmedic_agent.errors import JournalUnavailable
from trainmedic_agent.journal import Journal
from trainmedic_agent.ports.gpus import GpuInfo, GpuReading, Inventory
from trainmedic_agent.power.control import boot_id

log = logging.getLogger(__name__)

_TABLES = ("CREATE TABLE gpu_record (gpu TEXT PRIMARY KEY, state TEXT NOT NULL) WITHOUT ROWID",)

# Recovery actions that clear a GPU's errors.
_RESETS = frozenset({"reset", "reboot", "drain_and_reset", "bus_reset", "system_reboot"})


class KnownGpu(Struct, frozen=True):
    """A present or former GPU."""

    info: GpuInfo
    is_present: bool = False  # listed by the driver, even if stuck
    xids: Mapping[int, int] = field(default_factory=dict)  # errors by code, since the last reboot or reset
    recovery_action: str | None = None  # requested by the driver
    energy_mj: int | None = None  # last counter read, None if unsupported

    def as_read(self, reading: GpuReading) -> KnownGpu:
        """Return the GPU after a reading, without its errors if it was reset."""
        energy = self.energy_mj if reading.energy_mj is None else reading.energy_mj
        # The driver may stop reporting an action; then a reset that it asked for stays.
        asked_for = self.recovery_action if self.recovery_action in _RESETS else None
        action = reading.recovery_action or asked_for
        was_counter_reset = energy is not None and self.energy_mj is not None and energy < self.energy_mj
        was_reset = was_counter_reset or (asked_for is not None and action == "none")
        return replace(self, xids={} if was_reset else self.xids, recovery_action=action, energy_mj=energy)


class GpuRecord:
    """Thread-safe. `boot` is the kernel's boot ID."""

    def __init__(self, journal: Journal, boot: str | None = None) -> None:
        """Raises JournalUnavailable; ConfigurationError for a newer agent's record."""
        journal.install("gpu_record", [_TABLES])
        self._journal = journal
        self._boot = boot_id() if boot is None else boot
        self._lock = threading.Lock()
        self._counted: Mapping[str, Mapping[int, int]] = {}  # `xids` that the record has
        rows = journal.rows("SELECT gpu, state FROM gpu_record")
        self._gpus = {gpu: self._of_json(json.loads(state)) for gpu, state in rows}
        self._written = self._gpus

    def gpus(self) -> list[KnownGpu]:
        with self._lock:
            return sorted(self._gpus.values(), key=lambda gpu: (gpu.info.index, gpu.info.uuid))

    def observe(
        self,
        inventory: Inventory,
        readings: Iterable[tuple[GpuInfo, GpuReading]],
        xids: Mapping[str, Mapping[int, int]],
    ) -> None:
        """Update from the driver. `xids` count since this process started."""
        with self._lock:
            gpus = _with_present(self._gpus, inventory)
            for info, reading in readings:
                if info.uuid in gpus:
                    gpus[info.uuid] = gpus[info.uuid].as_read(reading)
            for uuid, counts in xids.items():
                fresh = Counter(counts) - Counter(self._counted.get(uuid, {}))
                if fresh and uuid in gpus:
                    gpus[uuid] = replace(gpus[uuid], xids=dict(Counter(gpus[uuid].xids) + fresh))
            # XIDs of a GPU that the driver does not list yet are counted when it does.
            self._counted = {**self._counted, **{uuid: counts for uuid, counts in xids.items() if uuid in gpus}}
            self._gpus = gpus
            self._write()

    def forget(self, uuid: str) -> bool:
        """Return False if it is not there. Raises JournalUnavailable."""
        with self._lock:
            if uuid not in self._gpus:
                return False
            self._journal.write(lambda connection: connection.execute("DELETE FROM gpu_record WHERE gpu = ?", (uuid,)))
            self._gpus = {gpu: known for gpu, known in self._gpus.items() if gpu != uuid}
            # Failed writes for other GPUs stay due.
            self._written = {gpu: known for gpu, known in self._written.items() if gpu != uuid}
            return True

    def _write(self) -> None:
        """A failed write is repeated by the next `observe`."""
        changed = {uuid: gpu for uuid, gpu in self._gpus.items() if _lasting(gpu) != _lasting(self._written.get(uuid))}
        gone = [(uuid,) for uuid in self._written.keys() - self._gpus.keys()]
        if not changed and not gone:
            return
        rows = [(uuid, json.dumps(self._to_json(gpu))) for uuid, gpu in changed.items()]

        def write(connection: Any) -> None:
            connection.executemany("INSERT OR REPLACE INTO gpu_record VALUES (?, ?)", rows)
            connection.executemany("DELETE FROM gpu_record WHERE gpu = ?", gone)

        try:
            self._journal.write(write)
        except JournalUnavailable as error:
            log.error("cannot write GPU record; retrying later", extra={"reason": str(error)})
            return
        self._written = self._gpus

    def _to_json(self, gpu: KnownGpu) -> dict[str, Any]:
        return {
            "info": asdict(gpu.info),
            "boot": self._boot,
            "xids": {str(code): count for code, count in gpu.xids.items()},
            "recovery_action": gpu.recovery_action,
            "energy_mj": gpu.energy_mj,
        }

    def _of_json(self, state: Mapping[str, Any]) -> KnownGpu:
        info = GpuInfo(**state["info"])
        if state["boot"] != self._boot:
            return KnownGpu(info)
        xids = {int(code): int(count) for code, count in state["xids"].items()}
        return KnownGpu(info, False, xids, state["recovery_action"], state["energy_mj"])


def _with_present(gpus: Mapping[str, KnownGpu], inventory: Inventory) -> dict[str, KnownGpu]:
    present = {info.uuid: info for info in inventory.gpus}
    taken = {info.pci_address for info in inventory.gpus}  # a GPU in another's place has replaced it
    known = {
        uuid: replace(gpu, is_present=False)
        for uuid, gpu in gpus.items()
        if uuid not in present and gpu.info.pci_address not in taken
    }
    for uuid, info in present.items():
        known[uuid] = replace(gpus[uuid], info=info, is_present=True) if uuid in gpus else KnownGpu(info, True)
    return known


def _lasting(gpu: KnownGpu | None) -> KnownGpu | None:
    """Return the fields whose change is written at once."""
    return None if gpu is None else replace(gpu, is_present=False, energy_mj=None)
