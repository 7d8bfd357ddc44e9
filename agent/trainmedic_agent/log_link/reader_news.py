"""Greeting of a new reader, and updates of GPU addresses and the log store's credential."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.log_link.agent_end import AgentEnd
from trainmedic_agent.log_link.finding_relay import FindingRelay
from trainmedic_agent.log_link.messages import AgentMessage, GpusNow, Welcome
from trainmedic_agent.log_shipping.store_access import StoreAccess, read_access

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0  # between looks for a new reader, unless woken
_CHANGES_SECONDS = 5.0  # between looks for a new credential, or for GPUs while none is known
_GPUS_SECONDS = 60.0  # between looks for further GPUs


class ReaderNews:
    def __init__(
        self,
        link: AgentEnd,
        relay: FindingRelay,
        welcome: Welcome,
        uuids: Callable[[], Mapping[str, str]],
        store_token: str | None,
        counters: AgentCounters,
    ) -> None:
        self._link = link
        self._relay = relay
        self._welcome = welcome
        self._uuids = uuids
        self._store_token = store_token
        self._counters = counters
        self._generation = 0  # of the last reader seen, greeted or gone before; 0 before the first
        self._gpus = GpusNow({})
        self._access = StoreAccess()
        self._gpus_due = self._changes_due = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-news", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> None:
        self._stopping.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._round()
            except Exception:  # thread boundary: a failing driver or file must not prevent greetings
                log.exception("updates to the log reader continue after an unexpected error")
                self._counters.loop_errors.add("log-news")
                self._stopping.wait(1.0)
            self._link.wait_for_another(self._generation, _LOOK_SECONDS)

    def _round(self) -> None:
        generation = self._link.generation
        if generation != self._generation:
            if self._link.is_connected:
                self._greet(generation)
            self._generation = generation
        if generation and time.monotonic() >= self._changes_due:
            self._changes_due = time.monotonic() + _CHANGES_SECONDS
            self._send_changes(generation)

    def _greet(self, generation: int) -> None:
        self._update_gpus()
        self._access = self._store_access()
        self._relay.begin_generation(generation)
        first: list[AgentMessage] = [self._gpus]
        if self._welcome.policy.ship is not None:
            first.append(self._access)
        # The welcome comes last: it starts the reading.
        self._link.greet([*first, self._welcome], generation)
        self._changes_due = time.monotonic() + _CHANGES_SECONDS

    def _send_changes(self, generation: int) -> None:
        known, access = self._gpus, self._access
        if time.monotonic() >= self._gpus_due or not known.uuids:
            self._update_gpus()
        if self._gpus != known:
            self._link.send(self._gpus, generation)
        if self._welcome.policy.ship is not None:
            self._access = self._store_access()
            if self._access != access:
                self._link.send(self._access, generation)

    def _update_gpus(self) -> None:
        self._gpus_due = time.monotonic() + _GPUS_SECONDS
        self._gpus = GpusNow(dict(self._uuids()))

    def _store_access(self) -> StoreAccess:
        ship = self._welcome.policy.ship
        return read_access(ship, self._store_token) if ship is not None else StoreAccess()
