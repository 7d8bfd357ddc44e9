"""NVIDIA's GPUs through NVML. Calls hold no lock, so slow readings delay no power limit."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import pynvml

from trainmedic_agent.adapters.nvml_errors import CARD_GONE, STALE
from trainmedic_agent.adapters.nvml_readings import FIXED, LINKS, READINGS, collect
from trainmedic_agent.adapters.nvml_session import CallRunner, DirectCalls, NvmlSession, NvmlSessions, if_supported
from trainmedic_agent.errors import GpuAbsent, GpuError, GpuFailure, GpuLost, NotSupported
from trainmedic_agent.ports import gpus
from trainmedic_core.gpu_names import normal_pci, normal_uuid

T = TypeVar("T")

_ENDS_READING = (*STALE, *CARD_GONE)


class NvmlGpus:
    def __init__(self, monotonic: Callable[[], float] = time.monotonic, calls: CallRunner | None = None) -> None:
        self._nvml = NvmlSessions(monotonic, calls or DirectCalls())
        self._draining = threading.Lock()
        self._xids: dict[str, Counter[int]] = {}
        self._last_xid: dict[str, int] = {}

    @property
    def openings(self) -> int:
        return self._nvml.openings

    def inventory(self) -> gpus.Inventory:
        try:
            return self._nvml.retry_after_reload(self._inventory)
        except GpuError as error:
            return gpus.Inventory(problems=(str(error),))

    def find(self, name: str) -> gpus.GpuInfo:
        text = name.strip()
        if text.lower().startswith("mig-"):
            raise NotSupported(
                f"{name} is a MIG instance, which has no limit of its own: name the GPU that it is part of"
            )
        infos = self._nvml.retry_after_reload(self._infos)
        if re.fullmatch("[0-9]{1,4}", text):
            matches = [info for info in infos if info.index == int(text)]
        elif ":" in text:
            address = normal_pci(text)
            matches = [info for info in infos if normal_pci(info.pci_address) == address] if address else []
        else:
            matches = [info for info in infos if normal_uuid(info.uuid) == normal_uuid(text)]
        if matches:
            return matches[0]
        if self._nvml.has_seen(name):
            raise GpuLost(f"{name} no longer responds")
        there = ", ".join(f"{info.index} ({info.uuid})" for info in infos) or "none"
        raise GpuAbsent(f"there is no GPU {name!r} on this node; there are: {there}")

    def power(self, uuid: str) -> gpus.PowerLimits:
        return self._nvml.retry_after_reload(lambda: self._power(uuid))

    def set_power_limit(self, uuid: str, milliwatts: int) -> None:
        with self._nvml.card(uuid) as (_, handle):
            # Check right before setting: if NVML mixes up its handles, no other card may be capped.
            if pynvml.nvmlDeviceGetUUID(handle) != uuid:
                raise GpuFailure(f"the driver confused {uuid} with another GPU; nothing was set")
            pynvml.nvmlDeviceSetPowerManagementLimit(handle, milliwatts)
            self._nvml.limit_was_set(uuid)

    def read(self, uuid: str) -> gpus.GpuReading:
        return self._nvml.retry_after_reload(lambda: self._read(uuid))

    def processes(self, uuid: str) -> tuple[int, ...]:
        return self._nvml.retry_after_reload(lambda: self._processes(uuid))

    def links(self, uuid: str) -> gpus.GpuLinks:
        return self._nvml.retry_after_reload(lambda: self._links(uuid))

    def xids(self) -> Mapping[str, Mapping[int, int]]:
        with contextlib.suppress(GpuError), self._nvml.open() as session:  # without a driver: earlier counts
            self._drain_xids(session)
        return {uuid: dict(counts) for uuid, counts in self._xids.copy().items()}

    def while_closed(self, uuids: Sequence[str], act: Callable[[], T]) -> T:
        self.xids()  # those pending would be lost
        with self._nvml.kept_closed(uuids):
            return act()

    def close(self) -> None:
        self._nvml.close()

    def _inventory(self) -> gpus.Inventory:
        with self._nvml.open() as session:
            pynvml.nvmlDeviceGetCount()  # fails if the driver was reloaded
            there = tuple(info for info in session.infos if info.uuid not in session.lost)
            return gpus.Inventory(there, (*session.problems, *session.lost.values()), session.driver)

    def _infos(self) -> tuple[gpus.GpuInfo, ...]:
        with self._nvml.open() as session:
            pynvml.nvmlDeviceGetCount()  # as above
            return session.infos

    def _power(self, uuid: str) -> gpus.PowerLimits:
        with self._nvml.card(uuid) as (session, handle):
            limit = pynvml.nvmlDeviceGetPowerManagementLimit(handle)
            enforced = if_supported(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle))
            draw = if_supported(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
            fixed, unread = _fixed(session, uuid, handle)
            for name in ("power_default", "power_constraints"):
                if name in unread:
                    raise GpuFailure(f"{uuid} does not report its {name.replace('_', ' ')}: {unread[name]}")
            return gpus.PowerLimits(
                limit_mw=limit,
                enforced_mw=enforced if enforced is not None else limit,
                session=self._nvml.name_for(session, uuid),
                default_mw=fixed.get("power_default_mw"),
                min_mw=fixed.get("power_min_mw"),
                max_mw=fixed.get("power_max_mw"),
                draw_mw=draw,
                forgotten_mw=self._nvml.forgotten_limit(uuid, limit),
            )

    def _read(self, uuid: str) -> gpus.GpuReading:
        with self._nvml.card(uuid) as (session, handle):
            values, unread = collect(READINGS, handle, _ENDS_READING)
            fixed, unread_fixed = _fixed(session, uuid, handle)
            self._drain_xids(session)
            return gpus.GpuReading(**values, **fixed, last_xid=self._last_xid.get(uuid), unread=unread | unread_fixed)

    def _links(self, uuid: str) -> gpus.GpuLinks:
        with self._nvml.card(uuid) as (_, handle):
            values, unread = collect(LINKS, handle, _ENDS_READING)
            return gpus.GpuLinks(**values, unread=unread)

    def _processes(self, uuid: str) -> tuple[int, ...]:
        with self._nvml.card(uuid) as (_, handle):
            return tuple(process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))

    def _drain_xids(self, session: NvmlSession) -> None:
        """Collect pending XIDs, in one thread at a time."""
        if session.events is None or not self._draining.acquire(blocking=False):
            return
        try:
            while True:  # until NVML reports by an error that no event is pending
                event = pynvml.nvmlEventSetWait_v2(session.events, 0)
                uuid = session.uuid_of(event.device)  # a lost GPU can no longer report its UUID
                if event.eventType == pynvml.nvmlEventTypeXidCriticalError and uuid is not None:
                    # Replace the Counter instead of changing it: another thread may be copying the old one.
                    self._xids[uuid] = self._xids.get(uuid, Counter()) + Counter({int(event.eventData): 1})
                    self._last_xid[uuid] = int(event.eventData)
        except pynvml.NVMLError as error:
            if error.value in STALE:
                raise
        finally:
            self._draining.release()


def _fixed(session: NvmlSession, uuid: str, handle: Any) -> tuple[dict[str, Any], dict[str, str]]:
    if uuid in session.fixed:
        return session.fixed[uuid], {}
    values, unread = collect(FIXED, handle, _ENDS_READING)
    if not unread:
        session.fixed[uuid] = values
    return values, unread
