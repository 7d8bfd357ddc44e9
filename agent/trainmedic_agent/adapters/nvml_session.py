"""Lifetime of NVML.

NVML stays open: without a client, a driver without persistence mode forgets power limits. It is reopened after a driver
reload or loss of a GPU, but never under a running call, which could crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import uuid as uuids
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import pynvml
from msgspec import Struct, field

from trainmedic_agent.adapters.nvml_errors import CARD_GONE, STALE, UNAVAILABLE, call_error, driver_error
from trainmedic_agent.errors import DriverAbsent, GpuAbsent, GpuFailure, GpuLost, GpuStuck
from trainmedic_agent.ports import gpus
from trainmedic_core.gpu_names import normal_pci, normal_uuid

log = logging.getLogger(__name__)

T = TypeVar("T")

_REOPEN_SECONDS = 60.0  # seconds between reopenings for a lost GPU
_CLOSE_SECONDS = 5.0  # wait for running calls before a reset


class CallRunner(Protocol):
    def run(self, key: str, function: Callable[[], T]) -> T:
        """Return or raise `function`'s result. Raises GpuStuck if it does not return."""
        ...

    def stuck(self) -> Collection[str]: ...  # keys of calls that have not returned


class DirectCalls:
    def run(self, key: str, function: Callable[[], T]) -> T:
        return function()

    def stuck(self) -> Collection[str]:
        return ()


class NvmlSession(Struct):
    name: str  # changes after a driver reload or a restart of this process
    opened_at: float  # monotonic seconds of the opening, or of a later loss of a card: both delay the next opening
    infos: tuple[gpus.GpuInfo, ...] = ()  # cards that responded at the opening
    handles: dict[str, Any] = field(default_factory=dict)  # their NVML handles by UUID
    fixed: dict[str, dict[str, Any]] = field(default_factory=dict)  # their constant readings by UUID
    events: Any = None  # event set that collects XIDs, if supported
    lost: dict[str, str] = field(default_factory=dict)  # a sentence for each card that stopped responding, by UUID
    problems: tuple[str, ...] = ()  # a sentence for each card that did not respond at the opening
    driver: str | None = None  # its version

    def uuid_of(self, handle: Any) -> str | None:
        """Return a handle's UUID, or None, without a call to the card."""
        address = _address(handle)
        return next((uuid for uuid, known in self.handles.items() if _address(known) == address), None)


class NvmlSessions:
    def __init__(self, monotonic: Callable[[], float], calls: CallRunner) -> None:
        self._monotonic = monotonic
        self._calls = calls
        self._process = uuids.uuid4().hex[:12]
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._closed_for: str | None = None  # UUID of the GPU being reset
        self._session: NvmlSession | None = None
        self._is_stale = False  # the driver was reloaded: reopen before the next call
        self._in_flight = 0  # running blocks of `open`
        self._driver_reloads = 0
        self.openings = 0
        self._times_lost: Counter[str] = Counter()  # losses and resets, by UUID
        self._at_closing: dict[str, int] = {}  # limits in mW that the driver may forget, by UUID
        self._forgotten: dict[str, tuple[int, int]] = {}  # those that it forgot, and what it had instead
        self._seen: dict[str, str] = {}  # UUID by its normal form, of all GPUs seen by this process

    def has_seen(self, uuid: str) -> bool:
        return normal_uuid(uuid) in self._seen

    def name_for(self, session: NvmlSession, uuid: str) -> str:
        """Return a name that changes when the driver may have forgotten the card's settings."""
        return f"{session.name}/{self._times_lost[uuid]}"

    def forgotten_limit(self, uuid: str, present: int) -> int | None:
        """Return the limit in mW that the driver forgot, if any. It is dropped once `present` shows another was set."""
        forgotten = self._forgotten.get(uuid)
        if forgotten is None or forgotten[1] == present:
            return forgotten[0] if forgotten else None
        self.limit_was_set(uuid)
        return None

    def limit_was_set(self, uuid: str) -> None:
        self._forgotten.pop(uuid, None)

    def retry_after_reload(self, ask: Callable[[], T]) -> T:
        """Call `ask`, again after a driver reload. Only for queries: a setter may have taken effect."""
        try:
            return ask()
        except DriverAbsent:
            if not self._is_stale:
                raise
            return ask()

    @contextlib.contextmanager
    def card(self, uuid: str) -> Iterator[tuple[NvmlSession, Any]]:
        """Yield the session and the card's handle. Raises as `open`, GpuLost, GpuAbsent."""
        with self.open(uuid) as session:
            handle = session.handles.get(uuid)
            if handle is None:
                error = GpuLost if self.has_seen(uuid) else GpuAbsent
                raise error(f"{uuid} is not there; {'; '.join(session.problems) or 'the driver does not list it'}")
            yield session, handle
            session.lost.pop(uuid, None)

    @contextlib.contextmanager
    def open(self, uuid: str | None = None) -> Iterator[NvmlSession]:
        """Yield the session, opened if necessary. NVML errors in the block become GpuError, of `uuid` if given."""
        with self._lock:
            session = self._current()
            self._in_flight += 1
        try:
            yield session
        except pynvml.NVMLError as error:
            self._record_failure(error, session, uuid)
            raise call_error(error, uuid or "the driver") from error
        finally:
            with self._lock:
                self._in_flight -= 1
                self._ended.notify_all()

    @contextlib.contextmanager
    def kept_closed(self, uuids: Sequence[str]) -> Iterator[None]:
        """Keep NVML closed in the block, which resets these cards.

        Raises GpuFailure if a call does not return, or during another reset.
        """
        with self._lock:
            if self._closed_for is not None:
                raise GpuFailure(f"{self._closed_for} is being reset; try again")
            self._closed_for = ", ".join(uuids)
            try:
                if (
                    not self._ended.wait_for(lambda: self._in_flight == 0, _CLOSE_SECONDS)
                    or not self._prepare_closing()
                ):
                    raise GpuFailure("a call to the driver does not return, so NVML cannot be closed")
                self._shut_down()
            except BaseException:
                self._closed_for = None
                raise
        try:
            yield
        finally:
            with self._lock:
                self._closed_for = None
                self._times_lost.update(uuids)

    def close(self) -> None:
        with self._lock:
            self._shut_down()

    # This method and the private ones that it calls run with the lock held.
    def _current(self) -> NvmlSession:
        if self._closed_for is not None:
            raise DriverAbsent(f"the driver is not used here while {self._closed_for} is reset; try again")
        session = self._session
        if session is not None:
            has_waited = self._monotonic() - session.opened_at >= _REOPEN_SECONDS
            is_due = self._is_stale or ((session.problems or session.lost) and has_waited)
            if is_due and self._prepare_closing():
                self._shut_down()
                session = None
        if session is None:
            if self._in_flight:
                raise DriverAbsent("the driver is being reloaded; try again in a moment")
            session = self._session = self._open_nvml()
        return session

    def _prepare_closing(self) -> bool:
        """Return whether NVML may be closed. Note the limits that the driver may forget then."""
        if self._in_flight or self._calls.stuck():
            return False
        if self._session is not None:  # reading the limits may get stuck too
            # After a driver reload, the new session's name says that the limits may be forgotten.
            self._at_closing = {} if self._is_stale else self._forgettable(self._session)
        return not self._calls.stuck()

    def _forgettable(
        self, session: NvmlSession, uuids: Collection[str] | None = None, unread: set[str] | None = None
    ) -> dict[str, int]:
        """Return limits in mW by UUID. Failed cards go to `unread`."""
        limits: dict[str, int] = {}
        for uuid in session.handles if uuids is None else session.handles.keys() & uuids:
            try:
                limit = self._calls.run(uuid, partial(_forgettable_limit, session.handles[uuid]))
            except (pynvml.NVMLError, GpuFailure):
                if unread is not None:
                    unread.add(uuid)
                continue
            if limit is not None:
                limits[uuid] = limit
        return limits

    def _open_nvml(self) -> NvmlSession:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise driver_error(error) from error
        try:
            session = NvmlSession(f"{self._process}/{self._driver_reloads}", self._monotonic())
            session.driver = if_supported(pynvml.nvmlSystemGetDriverVersion)
            self._enumerate(session)
            self._note_forgotten(session)
            session.events = self._listen(session)
            self.openings += 1
        except BaseException as error:  # left open, this client would prevent a reset
            pynvml.nvmlShutdown()
            if isinstance(error, pynvml.NVMLError):
                raise driver_error(error) from error
            raise
        return session

    def _enumerate(self, session: NvmlSession) -> None:
        infos, problems = [], []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                info, handle = self._calls.run(f"GPU {index}", partial(_identify, index))
            except GpuStuck as error:
                problems.append(str(error))
                continue
            except pynvml.NVMLError as error:
                if error.value in STALE:
                    raise
                problems.append(f"GPU {index} does not respond: {error}")
                continue
            infos.append(info)
            session.handles[info.uuid] = handle
            self._seen[normal_uuid(info.uuid)] = info.uuid
        for uuid in set(self._seen.values()) - set(session.handles):
            self._times_lost[uuid] += 1
            problems.append(f"{uuid} was here before")
        session.infos, session.problems = tuple(infos), tuple(problems)

    def _note_forgotten(self, session: NvmlSession) -> None:
        before, self._at_closing = self._at_closing, {}
        for uuid, limit in before.items():
            self.forgotten_limit(uuid, limit)  # drops it if one was set
        unread: set[str] = set()
        after = self._forgettable(session, before, unread)
        self._times_lost.update(unread)  # the driver may have forgotten their limits
        self._forgotten |= {uuid: (before[uuid], limit) for uuid, limit in after.items() if limit != before[uuid]}

    def _listen(self, session: NvmlSession) -> Any:
        try:
            events = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError:
            return None
        for uuid, handle in session.handles.items():
            register = partial(pynvml.nvmlDeviceRegisterEvents, handle, pynvml.nvmlEventTypeXidCriticalError, events)
            with contextlib.suppress(pynvml.NVMLError, GpuStuck):
                self._calls.run(uuid, register)
        return events

    def _shut_down(self) -> None:
        session, self._session, self._is_stale = self._session, None, False
        if session is None:
            return
        for let_go in (lambda: session.events and pynvml.nvmlEventSetFree(session.events), pynvml.nvmlShutdown):
            try:
                let_go()
            except pynvml.NVMLError as error:
                log.warning("cannot close NVML", extra={"reason": str(error)})

    def _record_failure(self, error: Any, session: NvmlSession, uuid: str | None) -> None:
        with self._lock:
            if error.value in STALE:
                if self._session is session and not self._is_stale:
                    self._is_stale = True
                    self._driver_reloads += 1
            elif error.value in CARD_GONE and uuid and uuid not in session.lost:
                self._times_lost[uuid] += 1
                session.lost[uuid] = f"{uuid} is lost: {error}"
                session.opened_at = self._monotonic()


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def if_supported(ask: Callable[[], Any]) -> Any:
    """Return None if unsupported."""
    try:
        return ask()
    except pynvml.NVMLError as error:
        if error.value in UNAVAILABLE:
            return None
        raise


def _forgettable_limit(handle: Any) -> int | None:
    if pynvml.nvmlDeviceGetPersistenceMode(handle) != pynvml.NVML_FEATURE_DISABLED:
        return None  # the driver keeps it without a client
    return int(pynvml.nvmlDeviceGetPowerManagementLimit(handle))


def _identify(index: int) -> tuple[gpus.GpuInfo, Any]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    address = pynvml.nvmlDeviceGetPciInfo(handle).busId
    address = address.decode() if isinstance(address, bytes) else address
    uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    return gpus.GpuInfo(index, uuid, name, normal_pci(address) or address.lower()), handle
