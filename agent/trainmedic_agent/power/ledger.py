"""Persistent power state of each GPU, by UUID. Any thread may read, one writes.

Ended caps take effect even if the disk is full; an unwritten end is repeated at the next start.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping

from trainmedic_agent.errors import JournalUnavailable
from trainmedic_agent.journal import Journal
from trainmedic_agent.power.caps import GpuPowerState

log = logging.getLogger(__name__)

_TABLES = ("CREATE TABLE power (gpu TEXT PRIMARY KEY, state TEXT NOT NULL) WITHOUT ROWID",)


class PowerLedger:
    def __init__(self, journal: Journal) -> None:
        """Raises JournalUnavailable; ConfigurationError for a newer agent's table."""
        journal.install("power", [_TABLES])
        self._journal = journal
        self._lock = threading.Lock()
        self._unwritten: set[str] = set()  # GPUs whose state is newer in memory than on disk
        rows = journal.rows("SELECT gpu, state FROM power")
        self._states = {gpu: GpuPowerState.of_json(json.loads(state)) for gpu, state in rows}

    def all(self) -> dict[str, GpuPowerState]:
        with self._lock:
            return dict(self._states)

    def of(self, gpu: str) -> GpuPowerState:
        with self._lock:
            return self._states.get(gpu, GpuPowerState())

    def save(self, states: Mapping[str, GpuPowerState]) -> None:
        """Write all states, or none. Raises JournalUnavailable."""
        unwritten = {gpu: self.of(gpu) for gpu in self._unwritten - states.keys()}
        changed = {gpu: state for gpu, state in states.items() if gpu in self._unwritten or state != self.of(gpu)}
        if not changed and not unwritten:
            return
        rows = [(gpu, json.dumps(state.to_json())) for gpu, state in {**unwritten, **changed}.items()]
        self._journal.write(
            lambda connection: connection.executemany("INSERT OR REPLACE INTO power VALUES (?, ?)", rows)
        )
        self._unwritten.clear()
        with self._lock:
            self._states.update(states)

    def save_best_effort(self, states: Mapping[str, GpuPowerState]) -> None:
        """Like `save`, but unwritten states take effect too; the next change writes them."""
        try:
            self.save(states)
        except JournalUnavailable as error:
            log.error(
                "cannot journal a change of power caps; it takes effect anyway",
                extra={"reason": str(error)},
            )
            with self._lock:
                self._states.update(states)
            self._unwritten.update(states)
