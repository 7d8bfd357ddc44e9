"""Periodic task that ends expired caps and verifies active limits."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

from trainmedic.wire.backoff import Backoff
from trainmedic_agent.errors import GpuError
from trainmedic_agent.power.caps import EXPIRED
from trainmedic_agent.power.control import PowerControl, PowerOutcome

log = logging.getLogger(__name__)

_VERIFY_SECONDS = 30.0  # between looks for changes by other processes
_LOOK_SECONDS = 1.0  # between looks for a reopened driver
_FIRST_RETRY, _LONGEST_RETRY = 1.0, 30.0  # seconds


class LeaseExpiry:
    queue = "gpu"

    def __init__(self, control: PowerControl, boottime: Callable[[], float]) -> None:
        self._control = control
        self._boottime = boottime
        self._verify_at = -math.inf
        self._openings = 0  # of the driver, at the last look
        self._backoffs: dict[str, Backoff] = {}
        self._retry_at: dict[str, float] = {}  # seconds since boot, by GPU UUID

    def due(self) -> float | None:
        states = self._control.ledger.all()
        if not any(state.baseline is not None for state in states.values()):
            return None
        if self._control.gpus.openings != self._openings:
            return 0.0
        now = self._boottime()
        retries = [self._retry_at.get(uuid, now) - now for uuid, state in states.items() if state.needs_reconciling]
        next_end = self._control.next_end()
        return min([_LOOK_SECONDS, self._verify_at - now, *retries, *([] if next_end is None else [next_end])])

    def run(self) -> None:
        overdue = self._control.overdue()
        for cap_id in overdue:
            log.warning("lease expired; ending power cap", extra={"command": cap_id})
        self._schedule_retries(self._control.end(overdue, EXPIRED))
        now = self._boottime()
        openings = self._control.gpus.openings
        # Also check limits without `needs_reconciling`: another process may have set one, or the driver forgotten them.
        verifies = now >= self._verify_at or openings != self._openings
        self._openings = openings
        if verifies:
            self._verify_at = now + _VERIFY_SECONDS
        uuids = (
            uuid
            for uuid, state in self._control.ledger.all().items()
            if (verifies and state.baseline is not None)
            or (state.needs_reconciling and now >= self._retry_at.get(uuid, now))
        )
        self._schedule_retries(self._control.reconcile(uuids))

    def _schedule_retries(self, outcomes: Mapping[str, PowerOutcome | GpuError]) -> None:
        for uuid, outcome in outcomes.items():
            if isinstance(outcome, GpuError):
                backoff = self._backoffs.setdefault(uuid, Backoff(_FIRST_RETRY, _LONGEST_RETRY))
                self._retry_at[uuid] = self._boottime() + backoff.next()
            else:
                self._backoffs.pop(uuid, None)
                self._retry_at.pop(uuid, None)
