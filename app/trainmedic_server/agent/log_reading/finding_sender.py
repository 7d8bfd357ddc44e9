"""Sends findings to the server, in order, at least once each, and looks for new rules. One thread with a connection.

Findings stay in the agent's database until Redis has them; while Redis is away, or the server has not taken those that
are there, they wait. Each says by how much this node's clock differs from that of Redis, which is asked now and then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import redis
from msgspec.structs import replace

from trainmedic.wire.connection import RedisConnection
from trainmedic.wire.envelope import EnvelopeError
from trainmedic.wire.findings import FIELD, FINDINGS, LARGEST_UPDATE, MOST_WAITING
from trainmedic.wire.log_limit import LogLimit
from trainmedic.wire.signing import Signer
from trainmedic_server.agent.log_reading.log_counters import LogCounters
from trainmedic_server.agent.log_reading.log_store import LogStore
from trainmedic_server.agent.log_reading.rules_in_force import RulesInForce
from trainmedic_server.domain import finding_codec
from trainmedic_server.errors import JournalUnavailable

log = logging.getLogger(__name__)

_BATCH = 50
_RULES_EVERY = 5.0
_CLOCK_EVERY = 60.0
_FULL_SECONDS = 1.0
_IDLE_SECONDS = 1.0
_TURN_SECONDS = 1.0
"""How long it has the connection at most before commands are received again."""


class FindingSender:
    """The thread, from `start` to `stop`. ``has_findings`` is set when some were written down."""

    def __init__(
        self,
        connection: RedisConnection,
        signer: Signer | None,
        store: LogStore,
        rules: RulesInForce,
        counters: LogCounters,
        has_findings: threading.Event,
        unix_now: Callable[[], float],
    ) -> None:
        self._connection = connection
        self._signer = signer
        self._store = store
        self._rules = rules
        self._counters = counters
        self._has_findings = has_findings
        self._unix_now = unix_now
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-findings", daemon=True)
        self._rules_due = self._clock_due = 0.0
        self._log_limit = LogLimit()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Send what waits, and end. What Redis has not taken by then is sent after the next start."""
        self._stopping.set()
        self._has_findings.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopping.is_set()
            wait = _IDLE_SECONDS
            try:
                with self._connection.turn() as client:
                    wait = self._round_or_wait(client)
                self._connection.succeeded()
            # Every error is caught, because Redis may also answer in a shape that it should never use.
            except Exception as error:
                wait = self._connection.failed(error)
            if not self._stopping.is_set():
                self._has_findings.wait(wait)
                self._has_findings.clear()
        self._connection.close()

    def _round_or_wait(self, client: redis.Redis) -> float:
        """The same where the journal can be read; that it cannot is no fault of the connection that others use."""
        try:
            return self._round(client)
        except JournalUnavailable as error:
            if self._log_limit.lets_through():
                log.error("findings cannot be read from the journal", extra={"reason": str(error)})
            return _IDLE_SECONDS

    def _round(self, client: redis.Redis) -> float:
        """Do what is due; return the seconds until it should be asked again."""
        now = time.monotonic()
        if now >= self._clock_due:
            self._counters.clock_error = self._measured(client)
            self._clock_due = now + _CLOCK_EVERY
        if now >= self._rules_due:
            self._rules.look(client, self._signer)
            self._rules_due = now + _RULES_EVERY
        while waiting := self._store.waiting(_BATCH):
            room = MOST_WAITING - int(client.xlen(FINDINGS))
            if room <= 0:
                return _FULL_SECONDS
            taken = waiting[:room]
            with client.pipeline(transaction=False) as pipeline:
                for number, body in taken:
                    raw = self._with_clock(body)
                    if raw is None:
                        log.error("a finding that cannot be read is left out", extra={"number": number})
                        continue
                    fields: dict[Any, Any] = {FIELD: raw}
                    if self._signer is not None:
                        fields |= self._signer.fields(raw)
                    pipeline.xadd(FINDINGS, fields)
                pipeline.execute()
            self._store.sent([number for number, _ in taken])
            if time.monotonic() - now > _TURN_SECONDS:
                return 0.0
        return _IDLE_SECONDS

    def _measured(self, client: redis.Redis) -> float | None:
        """Seconds by which this node's clock may differ from that of Redis: the difference, and half of the time that
        the answer took. None where this user of Redis may not ask."""
        asked = time.monotonic()
        try:
            seconds, microseconds = client.time()
        except redis.exceptions.NoPermissionError:
            return None
        took = time.monotonic() - asked
        there = seconds + microseconds / 1e6
        return abs(self._unix_now() - took / 2 - there) + took / 2

    def _with_clock(self, body: bytes) -> bytes | None:
        """The update as it is sent; None where it was written by a version whose form is not read any more."""
        try:
            update = finding_codec.decode(body)
        except EnvelopeError:
            return None
        finding = replace(update.finding, clock_error=self._counters.clock_error or 0.0)
        raw = finding_codec.encode(replace(update, finding=finding))
        if len(raw) > LARGEST_UPDATE - 4096:  # an excerpt of characters that JSON writes as six
            raw = finding_codec.encode(replace(update, finding=finding, excerpt=None))
        return raw
