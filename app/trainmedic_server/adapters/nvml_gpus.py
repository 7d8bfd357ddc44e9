"""NVIDIA's GPUs through NVML, by the binding that NVIDIA publishes (``pynvml`` of nvidia-ml-py).

NVML is opened at the first call and stays open: with no client left, a driver without persistence mode would
forget the power limits. It is opened anew when the driver was loaded anew, and at most once a minute while a
GPU is lost. Both wait until no other call is under way, for closing it under a running call may crash.

Nothing is locked while NVML works, so a slow reading never holds up a power limit; only opening it holds up
everything, so there each card is asked apart (`CallRunner`). Every NVML error is translated here, and nowhere else.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
import uuid as uuids
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import pynvml

from trainmedic_server.adapters.nvml_readings import FIXED, MISSING, READINGS, collect
from trainmedic_server.domain.gpu_names import normal_pci, normal_uuid
from trainmedic_server.errors import (
    DriverAbsent,
    GpuAbsent,
    GpuError,
    GpuFailure,
    GpuLost,
    GpuStuck,
    NoPermission,
    NotSupported,
)
from trainmedic_server.ports import gpus

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_AGAIN = 60.0
"""How long a lost GPU is left alone before NVML is opened anew to look for it."""

_LIBRARY = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
_STALE = (
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
)
_LOST = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)
_GONE = (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_GPU_NOT_FOUND)
_ENDS = (*_STALE, *_LOST, *_GONE)


class CallRunner(Protocol):
    """Makes calls of which one that never comes back takes no other with it (``time_limited_gpus``)."""

    def ask(self, key: str, work: Callable[[], T]) -> T:
        """What `work` gives or raises; raises GpuStuck where it does not come back."""
        ...

    def stuck(self) -> Collection[str]:
        """The keys of calls that have not come back."""
        ...


class _Together:
    """The `CallRunner` of who can wait."""

    def ask(self, key: str, work: Callable[[], T]) -> T:
        return work()

    def stuck(self) -> Collection[str]:
        return ()


@dataclass(slots=True)
class _Session:
    """NVML while it is open. ``lost`` are the UUIDs that stopped answering since."""

    name: str
    opened_at: float
    infos: tuple[gpus.GpuInfo, ...] = ()
    handles: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: Any = None
    lost: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    driver: str | None = None


class NvmlGpus:
    """Implements `trainmedic_server.ports.gpus.Gpus`."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, apart: CallRunner | None = None) -> None:
        self._monotonic = monotonic
        self._apart = apart or _Together()
        self._process = uuids.uuid4().hex[:12]
        self._lock = threading.Lock()
        self._session: _Session | None = None
        self._is_stale = False
        self._in_flight = 0
        self._sessions = 0
        self._listening = threading.Lock()
        self._away: Counter[str] = Counter()
        self._known: dict[str, str] = {}  # of all GPUs that were ever seen: UUID by its normal form
        self._xids: dict[str, Counter[int]] = {}
        self._last_xid: dict[str, int] = {}

    # --- the port ------------------------------------------------------------------------------------

    def inventory(self) -> gpus.Inventory:
        try:
            return self._retried(self._inventory)
        except GpuError as error:
            return gpus.Inventory(problems=(str(error),))

    def find(self, name: str) -> gpus.GpuInfo:
        wanted = name.strip()
        if wanted.lower().startswith("mig-"):
            raise NotSupported(
                f"{name} is a MIG instance, which has no limit of its own: name the GPU that it is part of"
            )
        infos = self._retried(self._infos)
        if re.fullmatch("[0-9]{1,4}", wanted):
            found = [info for info in infos if info.index == int(wanted)]
        elif ":" in wanted:
            address = normal_pci(wanted)
            found = [info for info in infos if normal_pci(info.pci_address) == address] if address else []
        else:
            found = [info for info in infos if normal_uuid(info.uuid) == normal_uuid(wanted)]
        if found:
            return found[0]
        if normal_uuid(wanted) in self._known:
            raise GpuLost(f"{name} was here and does not answer any more")
        there = ", ".join(f"{info.index} ({info.uuid})" for info in infos) or "none"
        raise GpuAbsent(f"there is no GPU {name!r} on this node; there are: {there}")

    def power(self, uuid: str) -> gpus.PowerLimits:
        return self._retried(lambda: self._power(uuid))

    def set_power_limit(self, uuid: str, milliwatts: int) -> None:
        with self._device(uuid) as (_, handle):
            if pynvml.nvmlDeviceGetUUID(handle) != uuid:
                raise GpuFailure(f"the driver takes another GPU for {uuid}; nothing was set")
            pynvml.nvmlDeviceSetPowerManagementLimit(handle, milliwatts)

    def read(self, uuid: str) -> gpus.GpuReading:
        return self._retried(lambda: self._read(uuid))

    def processes(self, uuid: str) -> tuple[int, ...]:
        return self._retried(lambda: self._processes(uuid))

    def close(self) -> None:
        with self._lock:
            self._shut()

    def _inventory(self) -> gpus.Inventory:
        with self._open() as session:
            pynvml.nvmlDeviceGetCount()  # tells whether the driver was loaded anew
            there = tuple(info for info in session.infos if info.uuid not in session.lost)
            return gpus.Inventory(there, (*session.problems, *session.lost.values()), session.driver)

    def _infos(self) -> tuple[gpus.GpuInfo, ...]:
        with self._open() as session:
            pynvml.nvmlDeviceGetCount()
            return session.infos

    # --- readings ------------------------------------------------------------------------------------

    def _power(self, uuid: str) -> gpus.PowerLimits:
        with self._device(uuid) as (session, handle):
            limit = pynvml.nvmlDeviceGetPowerManagementLimit(handle)
            enforced = _offered(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle))
            draw = _offered(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
            fixed, unread = _fixed(session, uuid, handle)
            for name in ("power_default", "power_constraints"):
                if name in unread:
                    raise GpuFailure(f"{uuid} does not tell its {name.replace('_', ' ')}: {unread[name]}")
            return gpus.PowerLimits(
                limit,
                enforced if enforced is not None else limit,
                f"{session.name}/{self._away[uuid]}",
                fixed.get("power_default_mw"),
                fixed.get("power_min_mw"),
                fixed.get("power_max_mw"),
                draw,
            )

    def _read(self, uuid: str) -> gpus.GpuReading:
        with self._device(uuid) as (session, handle):
            values, unread = collect(READINGS, handle, _ENDS)
            fixed, unfixed = _fixed(session, uuid, handle)
            self._drain(session)
            counts = dict(self._xids.get(uuid, {}))
            unread.update(unfixed)
            return gpus.GpuReading(**values, **fixed, xids=counts, last_xid=self._last_xid.get(uuid), unread=unread)

    def _processes(self, uuid: str) -> tuple[int, ...]:
        with self._device(uuid) as (_, handle):
            return tuple(one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))

    def _drain(self, session: _Session) -> None:
        """Take the XIDs that have come in. One thread does; the others go on with what is known."""
        if session.events is None or not self._listening.acquire(blocking=False):
            return
        try:
            while True:
                event = pynvml.nvmlEventSetWait_v2(session.events, 0)
                if event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                    uuid = pynvml.nvmlDeviceGetUUID(event.device)
                    self._xids[uuid] = self._xids.get(uuid, Counter()) + Counter({int(event.eventData): 1})
                    self._last_xid[uuid] = int(event.eventData)
        except pynvml.NVMLError as error:
            if error.value in _STALE:
                raise
        finally:
            self._listening.release()

    # --- the session -----------------------------------------------------------------------------------

    def _retried(self, ask: Callable[[], T]) -> T:
        """Ask, and once more where the driver turned out to have been loaded anew. For questions only."""
        try:
            return ask()
        except DriverAbsent:
            if not self._is_stale:
                raise
            return ask()

    @contextlib.contextmanager
    def _device(self, uuid: str) -> Iterator[tuple[_Session, Any]]:
        with self._open(uuid) as session:
            handle = session.handles.get(uuid)
            if handle is None:
                kind = GpuLost if normal_uuid(uuid) in self._known else GpuAbsent
                raise kind(f"{uuid} is not there; {'; '.join(session.problems) or 'the driver does not list it'}")
            yield session, handle
            session.lost.pop(uuid, None)

    @contextlib.contextmanager
    def _open(self, uuid: str | None = None) -> Iterator[_Session]:
        """NVML, opened where it is not. What it raises within is translated."""
        with self._lock:
            session = self._fresh()
            self._in_flight += 1
        try:
            yield session
        except pynvml.NVMLError as error:
            raise self._translated(error, session, uuid) from error
        finally:
            with self._lock:
                self._in_flight -= 1

    def _fresh(self) -> _Session:
        session = self._session
        if session is not None and self._in_flight == 0 and not self._apart.stuck():
            looks_again = (
                bool(session.problems or session.lost) and self._monotonic() - session.opened_at >= _LOOK_AGAIN
            )
            if self._is_stale or looks_again:
                self._shut()
                session = None
        if session is None:
            if self._in_flight:
                raise DriverAbsent("the driver is being loaded anew; try again in a moment")
            session = self._session = self._opened()
        return session

    def _opened(self) -> _Session:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise _driver_error(error) from error
        try:
            # A driver that was loaded anew has forgotten; NVML opened anew to look for a lost GPU has not.
            session = _Session(f"{self._process}/{self._sessions}", self._monotonic())
            session.driver = _offered(pynvml.nvmlSystemGetDriverVersion)
            self._enumerate(session)
            session.events = self._listen(session)
        except pynvml.NVMLError as error:
            pynvml.nvmlShutdown()
            raise _driver_error(error) from error
        return session

    def _enumerate(self, session: _Session) -> None:
        infos, problems = [], []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                info, handle = self._apart.ask(f"GPU {index}", partial(_identified, index))
            except GpuStuck as error:
                problems.append(str(error))
                continue
            except pynvml.NVMLError as error:
                if error.value in _STALE:
                    raise
                problems.append(f"GPU {index} does not answer: {error}")
                continue
            infos.append(info)
            session.handles[info.uuid] = handle
            self._known[normal_uuid(info.uuid)] = info.uuid
        for uuid in set(self._known.values()) - set(session.handles):
            self._away[uuid] += 1
            problems.append(f"{uuid} was here before")
        session.infos, session.problems = tuple(infos), tuple(problems)

    def _listen(self, session: _Session) -> Any:
        """An event set that collects the XIDs of every GPU that reports them; None where none does."""
        try:
            events = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError:
            return None
        for uuid, handle in session.handles.items():
            register = partial(pynvml.nvmlDeviceRegisterEvents, handle, pynvml.nvmlEventTypeXidCriticalError, events)
            with contextlib.suppress(pynvml.NVMLError, GpuStuck):
                self._apart.ask(uuid, register)
        return events

    def _shut(self) -> None:
        session, self._session, self._is_stale = self._session, None, False
        if session is None:
            return
        for let_go in (lambda: session.events and pynvml.nvmlEventSetFree(session.events), pynvml.nvmlShutdown):
            try:
                let_go()
            except pynvml.NVMLError as error:
                log.warning("NVML was not closed properly: %s", error)

    def _translated(self, error: Any, session: _Session, uuid: str | None) -> GpuError:
        code = error.value
        named = uuid or "the driver"
        if code in _STALE:
            with self._lock:
                if self._session is session and not self._is_stale:
                    self._is_stale = True
                    self._sessions += 1
            return _driver_error(error)
        if code in _LOST or code in _GONE:
            with self._lock:
                if uuid and uuid not in session.lost:
                    self._away[uuid] += 1
                    session.lost[uuid] = f"{uuid} is lost: {error}"
                    session.opened_at = self._monotonic()
            return GpuLost(f"{named} does not answer any more: {error}. The driver's log (dmesg, Xid) says why")
        if code in MISSING:
            return NotSupported(f"{named} does not offer that: {error}")
        if code == pynvml.NVML_ERROR_NO_PERMISSION:
            return NoPermission(f"the agent may not do that to {named}: {error}. It needs root, or CAP_SYS_ADMIN")
        return GpuFailure(f"{named}: {error} (NVML error {code})")


def _driver_error(error: Any) -> GpuError:
    if error.value in _LIBRARY:
        return DriverAbsent("NVML (libnvidia-ml.so.1) is not on this machine: NVIDIA's driver is not installed")
    if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return DriverAbsent(
            "NVML and the loaded driver are of different versions: load the new driver, or restart the node"
        )
    if error.value in _STALE:
        return DriverAbsent(f"NVIDIA's driver is not loaded, or was loaded anew: {error}")
    if error.value == pynvml.NVML_ERROR_NO_PERMISSION:
        return NoPermission(f"the agent may not use NVIDIA's driver: {error}. It needs access to /dev/nvidiactl")
    return GpuFailure(f"NVIDIA's driver does not answer: {error} (NVML error {error.value})")


def _offered(ask: Callable[[], Any]) -> Any:
    """The answer; None where there is no such thing here."""
    try:
        return ask()
    except pynvml.NVMLError as error:
        if error.value in MISSING:
            return None
        raise


def _fixed(session: _Session, uuid: str, handle: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """What does not change while the driver is loaded, asked until it has once been answered in full."""
    known = session.fixed.get(uuid)
    if known is not None:
        return known, {}
    values, unread = collect(FIXED, handle, _ENDS)
    if not unread:
        session.fixed[uuid] = values
    return values, unread


def _identified(index: int) -> tuple[gpus.GpuInfo, Any]:
    """Who the GPU at this index is, and NVML's handle of it."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    address = pynvml.nvmlDeviceGetPciInfo(handle).busId
    address = address.decode() if isinstance(address, bytes) else address
    uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    return gpus.GpuInfo(index, uuid, name, normal_pci(address) or address.lower()), handle
