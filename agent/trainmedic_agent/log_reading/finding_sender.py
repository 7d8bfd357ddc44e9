"""Sender of findings to the agent, in order and at least once each.

Findings stay in the reader's database until Redis has them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import replace

from trainmedic.wire.envelope import EnvelopeError
from trainmedic.wire.findings import LARGEST_UPDATE
from trainmedic.wire.log_limit import LogLimit
from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.errors import JournalUnavailable
from trainmedic_agent.log_reading.log_store import LogStore
from trainmedic_logs.domain import finding_codec

log = logging.getLogger(__name__)

NAME = "log-findings"
_BATCH = 50  # updates, at most `MOST_UPDATES` of the link
_BATCH_BYTES = 256 * 1024
_IDLE_SECONDS = 1.0  # between looks without a signal


class FindingPort(Protocol):
    def send_findings(self, updates: Sequence[tuple[int, bytes]]) -> None:
        """Send updates and wait until Redis has them. Raises ConnectionError if the link ends first."""
        ...


class FindingSender:
    """``has_findings`` is set when findings were stored."""

    def __init__(
        self, port: FindingPort, store: LogStore, has_findings: threading.Event, counters: AgentCounters
    ) -> None:
        self._port = port
        self._counters = counters
        self._store = store
        self._has_findings = has_findings
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._log_limit = LogLimit()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Send what waits, then stop."""
        self._stopping.set()
        self._has_findings.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopping.is_set()
            try:
                while batch := self._batch():
                    self._port.send_findings(batch)
                    self._store.delete_sent([number for number, _ in batch])
            except ConnectionError:
                return  # the process ends with its link
            except JournalUnavailable as error:
                if self._log_limit.lets_through():
                    log.error("cannot read findings from the journal", extra={"reason": str(error)})
            except Exception:  # thread boundary: otherwise no finding would be sent any more
                self._counters.loop_errors.add(NAME)
                if self._log_limit.lets_through():
                    log.exception("sending findings continues after an unexpected error")
            if not self._stopping.is_set():
                self._has_findings.wait(_IDLE_SECONDS)
                self._has_findings.clear()

    def _batch(self) -> list[tuple[int, bytes]]:
        batch: list[tuple[int, bytes]] = []
        size = 0
        for number, body in self._store.number_next(_BATCH):
            update = _limited(body)
            if batch and size + len(update) > _BATCH_BYTES:
                break
            batch.append((number, update))
            size += len(update)
        return batch


def _limited(body: bytes) -> bytes:
    """Return the update, without excerpt if too large."""
    if len(body) <= LARGEST_UPDATE:
        return body
    try:
        update = finding_codec.decode(body)
    except EnvelopeError:
        return b""  # another version's; the agent drops it
    return finding_codec.encode(replace(update, excerpt=None))
