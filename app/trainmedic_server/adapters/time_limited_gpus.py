"""GPUs of a driver whose calls may never come back: nobody waits for one for long, and one card holds up no other.

A card that is about to die can swallow a call for ever, and the thread that made it with it. So every call is
made in a thread that can be spared. Whoever asked waits for some seconds; then the card is stuck: they are told
`GpuStuck`, and so is everybody who asks for that card after them, at once, until the call comes back. Calls to
the other cards go on meanwhile. What is about no card in particular (who is there?) stands for itself alike.

Threads are made as they are needed and kept for the next call, one or two in ordinary times. A card takes
`_MOST_CALLS` of them at most.

Not here: what is asked (``nvml_gpus``). Who uses it: the agent's wiring.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from trainmedic_server.errors import GpuStuck
from trainmedic_server.ports import gpus

log = logging.getLogger(__name__)

T = TypeVar("T")

CARD_SECONDS = 4.0
"""A call to a card takes milliseconds; under a load that starves the agent, tenths of a second."""
DRIVER_SECONDS = 20.0
"""Opening the driver wakes every card, which takes a second or two each where persistence mode is off; a node has
eight as a rule."""
_MOST_CALLS = 4
"""To one card at once. So many ask at most: two lanes, the presence and the exporter."""
_KEPT_IDLE = 2
_DRIVER = "NVIDIA's driver"


class _Job(Generic[T]):
    """One call: what it came to, once it has come back."""

    def __init__(self, key: str, work: Callable[[], T], began: float, patience: float) -> None:
        self.key = key
        self.began = began
        self.patience = patience
        self.is_given_up = False
        self._work = work
        self._ended = threading.Event()
        self._result: T
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # it belongs to who asked
            self._error = error

    def end(self) -> None:
        self._ended.set()

    def wait(self) -> bool:
        return self._ended.wait(self.patience)

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result


class TimeLimitedCalls:
    """Makes calls in threads of their own."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._under_way: list[_Job[object]] = []
        self._idle: list[_Worker] = []

    def ask(self, key: str, work: Callable[[], T], patience: float = CARD_SECONDS) -> T:
        """What `work` gives or raises. Raises GpuStuck where it has not come back after `patience` seconds, and at
        once where an earlier one with this key has not. It may then still take its effect."""
        with self._lock:
            self._refuse_if_stuck(key)
            job = _Job(key, work, self._monotonic(), patience)
            self._under_way.append(job)  # type: ignore[arg-type]
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = _Worker()
            threading.Thread(target=self._serve, args=(worker,), name="gpu-call", daemon=True).start()
        worker.put(job)  # type: ignore[arg-type]
        if job.wait():
            return job.result()
        with self._lock:
            job.is_given_up = any(one is job for one in self._under_way)
        if not job.is_given_up:  # it came back at the last moment
            return job.result()
        log.error("%s is stuck: a call has not come back after %g s", key, patience)
        raise _stuck(key, patience)

    def stuck(self) -> frozenset[str]:
        """The keys of calls that somebody has given up, and that have not come back."""
        with self._lock:
            return frozenset(job.key for job in self._under_way if job.is_given_up)

    def is_free(self) -> bool:
        """Whether no call at all is under way."""
        with self._lock:
            return not self._under_way

    def _refuse_if_stuck(self, key: str) -> None:
        calls = [job for job in self._under_way if job.key == key]
        given_up = [job for job in calls if job.is_given_up]
        if given_up or len(calls) >= _MOST_CALLS:
            raise _stuck(key, self._monotonic() - min(job.began for job in given_up or calls))

    def dismiss(self) -> None:
        """End the threads that wait for work; others are made when there is some."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.put(None)

    def _serve(self, mine: _Worker) -> None:
        while (job := mine.get()) is not None:
            job.run()
            with self._lock:
                self._under_way.remove(job)
                stays = len(self._idle) < _KEPT_IDLE
                if stays:
                    self._idle.append(mine)
            if job.is_given_up:
                log.warning("%s: a call has come back after %.0f s", job.key, self._monotonic() - job.began)
            job.end()
            if not stays:
                return
            del job  # and what it holds, until the next one comes


_Worker = queue.SimpleQueue[_Job[object] | None]
"""The thread that takes its jobs from here; None ends it."""


def _stuck(key: str, seconds: float) -> GpuStuck:
    return GpuStuck(
        f"{key} is stuck: a call to the driver has not come back for {seconds:.0f} s. Look into the driver's log "
        "(dmesg, Xid); often only a restart of the node helps"
    )


class TimeLimitedGpus:
    """`trainmedic_server.ports.gpus.Gpus`, made of another one, which never lets its caller wait for long."""

    def __init__(self, inner: gpus.Gpus, calls: TimeLimitedCalls) -> None:
        self._inner = inner
        self._calls = calls
        self._last = gpus.Inventory()
        self._is_open = False

    def inventory(self) -> gpus.Inventory:
        """Where the driver does not say who is there, those that were there when it last did."""
        try:
            self._last = self._calls.ask(_DRIVER, self._inner.inventory, DRIVER_SECONDS)
        except GpuStuck as error:
            return gpus.Inventory(self._last.gpus, (*self._last.problems, str(error)), self._last.driver)
        self._is_open = True
        return self._last

    def find(self, name: str) -> gpus.GpuInfo:
        return self._calls.ask(_DRIVER, lambda: self._inner.find(name), DRIVER_SECONDS)

    def power(self, uuid: str) -> gpus.PowerLimits:
        return self._of_card(uuid, lambda: self._inner.power(uuid))

    def set_power_limit(self, uuid: str, milliwatts: int) -> None:
        self._of_card(uuid, lambda: self._inner.set_power_limit(uuid, milliwatts))

    def processes(self, uuid: str) -> tuple[int, ...]:
        return self._of_card(uuid, lambda: self._inner.processes(uuid))

    def read(self, uuid: str) -> gpus.GpuReading:
        return self._of_card(uuid, lambda: self._inner.read(uuid))

    def close(self) -> None:
        """Let the driver go, unless a call is under way: to close it under one may crash."""
        if not self._calls.is_free():
            log.warning("NVML is left open, since a call has not come back: %s", ", ".join(self._calls.stuck()))
            return
        try:
            self._calls.ask(_DRIVER, self._inner.close, DRIVER_SECONDS)
        except GpuStuck as error:
            log.warning("NVML was not closed: %s", error)
        self._calls.dismiss()

    def _of_card(self, uuid: str, work: Callable[[], T]) -> T:
        """The first call opens the driver, which is not the card's time."""
        if not self._is_open:
            self.inventory()
        return self._calls.ask(uuid, work)
