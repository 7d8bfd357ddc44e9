"""Time limits for driver calls, which may never return and then affect only their card."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct, field

from trainmedic_agent.errors import GpuFailure, GpuStuck
from trainmedic_agent.ports import gpus

log = logging.getLogger(__name__)

T = TypeVar("T")

CARD_SECONDS = 4.0  # seconds; a call takes milliseconds
DRIVER_SECONDS = 20.0  # seconds; without persistence mode, opening takes 1-2 s per card
RESET_SECONDS = 150.0  # seconds; nvidia-smi, which resets the card, has 120
_MOST_CALLS = 6  # concurrent calls with a key: queues gpu, facts and health, presence, exporter, and `ReaderNews`
_KEPT_IDLE = 2  # threads
_DRIVER = "NVIDIA's driver"


class _Call(Struct, eq=False):
    key: str
    function: Callable[[], Any]
    began: float
    outcome: Future[Any] = field(default_factory=Future)
    is_given_up: bool = False

    def run(self) -> Callable[[], None]:
        """Return a function that passes the result or error to the caller."""
        try:
            return partial(self.outcome.set_result, self.function())
        except BaseException as error:  # this thread continues
            return partial(self.outcome.set_exception, error)


class TimeLimitedCalls:
    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._under_way: list[_Call] = []
        self._idle: list[_CallQueue] = []

    def run(self, key: str, function: Callable[[], T], timeout: float = CARD_SECONDS) -> T:
        """Return or raise `function`'s result.

        Raises GpuStuck after `timeout` seconds, or at once if an earlier call with this key is late or too many run.
        """
        with self._lock:
            self._refuse_if_stuck(key)
            call = _Call(key, function, self._monotonic())
            self._under_way.append(call)
            calls = self._idle.pop() if self._idle else None
        if calls is None:
            calls = _CallQueue()
            try:
                threading.Thread(target=self._serve, args=(calls,), name="gpu-call", daemon=True).start()
            except RuntimeError as error:
                with self._lock:
                    self._under_way.remove(call)
                raise GpuFailure(f"no thread for a driver call can be started: {error}") from error
        calls.put(call)
        result: Future[T] = call.outcome
        try:
            return result.result(timeout)
        except TimeoutError:
            with self._lock:
                call.is_given_up = call in self._under_way
            if not call.is_given_up:  # it returned at the last moment, or this is its own error
                return result.result()
        log.error("driver call has not returned", extra={"stuck": key, "seconds": timeout})
        raise _stuck(key, timeout)

    def stuck(self) -> frozenset[str]:
        with self._lock:
            return frozenset(call.key for call in self._under_way if call.is_given_up)

    def is_free(self) -> bool:
        with self._lock:
            return not self._under_way

    def _refuse_if_stuck(self, key: str) -> None:
        calls = [call for call in self._under_way if call.key == key]
        given_up = [call for call in calls if call.is_given_up]
        if given_up or len(calls) >= _MOST_CALLS:
            raise _stuck(key, self._monotonic() - min(call.began for call in given_up or calls))

    def dismiss(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for calls in idle:
            calls.put(None)

    def _serve(self, calls: _CallQueue) -> None:
        while (call := calls.get()) is not None:
            pass_on = call.run()
            with self._lock:
                self._under_way.remove(call)
                is_kept = len(self._idle) < _KEPT_IDLE
                if is_kept:
                    self._idle.append(calls)
            if call.is_given_up:
                seconds = round(self._monotonic() - call.began)
                log.warning("driver call has returned", extra={"stuck": call.key, "seconds": seconds})
            pass_on()
            if not is_kept:
                return
            del call, pass_on  # and the result, which would stay until the next call


_CallQueue = queue.SimpleQueue[_Call | None]  # calls for one thread; None ends it


def _stuck(key: str, seconds: float) -> GpuStuck:
    return GpuStuck(
        f"{key} is stuck: a driver call has not returned for {seconds:.0f} s. Check the driver's log "
        "(dmesg, Xid); often only a reboot helps"
    )


class TimeLimitedGpus:
    def __init__(self, inner: gpus.Gpus, calls: TimeLimitedCalls) -> None:
        self._inner = inner
        self._calls = calls
        self._last = gpus.Inventory()
        self._xids: Mapping[str, Mapping[int, int]] = {}  # last ones read, as in `Gpus.xids`
        self._is_open = False  # True once a call has opened the driver

    @property
    def openings(self) -> int:
        return self._inner.openings

    def inventory(self) -> gpus.Inventory:
        """Return the last known GPUs while the driver does not respond."""
        try:
            self._last = self._calls.run(_DRIVER, self._inner.inventory, DRIVER_SECONDS)
        except GpuFailure as error:
            return gpus.Inventory(self._last.gpus, (*self._last.problems, str(error)), self._last.driver)
        self._is_open = True
        return self._last

    def find(self, name: str) -> gpus.GpuInfo:
        return self._calls.run(_DRIVER, lambda: self._inner.find(name), DRIVER_SECONDS)

    def power(self, uuid: str) -> gpus.PowerLimits:
        return self._call_card(uuid, lambda: self._inner.power(uuid))

    def set_power_limit(self, uuid: str, milliwatts: int) -> None:
        self._call_card(uuid, lambda: self._inner.set_power_limit(uuid, milliwatts))

    def processes(self, uuid: str) -> tuple[int, ...]:
        return self._call_card(uuid, lambda: self._inner.processes(uuid))

    def read(self, uuid: str) -> gpus.GpuReading:
        return self._call_card(uuid, lambda: self._inner.read(uuid))

    def links(self, uuid: str) -> gpus.GpuLinks:
        return self._call_card(uuid, lambda: self._inner.links(uuid))

    def while_closed(self, uuids: Sequence[str], act: Callable[[], T]) -> T:
        try:
            return self._calls.run(_DRIVER, lambda: self._inner.while_closed(uuids, act), RESET_SECONDS)
        finally:
            self._is_open = False

    def xids(self) -> Mapping[str, Mapping[int, int]]:
        try:
            self._xids = self._calls.run(_DRIVER, self._inner.xids, DRIVER_SECONDS)
        except GpuStuck:
            log.debug("cannot read XIDs: a driver call has not returned")
        except GpuFailure as error:
            log.debug("cannot read XIDs", extra={"reason": str(error)})
        return self._xids

    def close(self) -> None:
        """Close the driver, unless a call is running: that could crash."""
        if not self._calls.is_free():
            stuck = sorted(self._calls.stuck())
            log.warning("leaving NVML open: a driver call has not returned", extra={"stuck": stuck})
            return
        try:
            self._calls.run(_DRIVER, self._inner.close, DRIVER_SECONDS)
        except GpuFailure as error:
            log.warning("cannot close NVML", extra={"reason": str(error)})
        self._calls.dismiss()

    def _call_card(self, uuid: str, function: Callable[[], T]) -> T:
        """Call the card. Opening the driver takes longer, so it is a separate call."""
        if not self._is_open:
            self.inventory()
        return self._calls.run(uuid, function)
