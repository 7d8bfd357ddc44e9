"""Relay that signs findings and sends them to Redis, and fetches new rules.

A second thread sends to the reader, so that a blocked reader does not delay the Redis connection. A generation is the
number of the reader's connection.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import redis
from msgspec.structs import replace

from trainmedic.wire.connection import RedisConnection
from trainmedic.wire.envelope import EnvelopeError
from trainmedic.wire.findings import FIELD, FINDINGS, LARGEST_UPDATE, MOST_WAITING
from trainmedic.wire.signing import Signer
from trainmedic_agent.log_link.messages import AgentMessage, FindingBatch, FindingsTaken, QueuedFinding, RulesNow
from trainmedic_agent.log_link.rule_news import RuleNews
from trainmedic_logs.domain import finding_codec

log = logging.getLogger(__name__)

_RULES_SECONDS = 5.0  # between looks for new rules
_CLOCK_SECONDS = 60.0  # between measurements of the clock error
_FULL_SECONDS = 1.0  # pause while the stream in Redis is full
_IDLE_SECONDS = 1.0  # pause without findings
_TURN_SECONDS = 1.0  # longest use of the connection, on which commands are received too
_NEXT_BATCH_SECONDS = 0.1  # wait for the next batch


class FindingRelay:
    def __init__(
        self,
        node: str,
        connection: RedisConnection,
        signer: Signer | None,
        rules: RuleNews,
        send: Callable[[AgentMessage, int], bool],
        unix_now: Callable[[], float],
    ) -> None:
        """`send` sends a message to a generation's reader; False if it is gone."""
        self._node = node
        self._connection = connection
        self._signer = signer
        self._rules = rules
        self._send = send
        self._unix_now = unix_now
        self.clock_error: float | None = None  # maximum difference to Redis's clock in seconds. None if unknown.
        self._lock = threading.Lock()
        self._batch: FindingBatch | None = None  # not, or not completely, in Redis
        self._generation = 0  # 0 before the first reader
        self._rules_due = self._clock_due = 0.0
        self._has_work = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-findings", daemon=True)
        self._unsent: queue.SimpleQueue[tuple[AgentMessage, int] | None] = queue.SimpleQueue()
        self._sending = threading.Thread(target=self._send_all, name="log-answers", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._sending.start()

    def stop(self, timeout: float) -> None:
        """Stop. Unsent findings are sent after the next start."""
        self._stopping.set()
        self._has_work.set()
        self._thread.join(timeout)
        self._unsent.put(None)

    def begin_generation(self, generation: int) -> None:
        """Serve a new reader, which needs the rules."""
        with self._lock:
            self._batch = None
            self._generation = generation
            self._rules_due = 0.0
        self._rules.forget()
        self._has_work.set()

    def offer(self, batch: FindingBatch, generation: int) -> bool:
        """Take a batch; False if Redis does not have all of the previous one."""
        with self._lock:
            if generation != self._generation:
                return True  # from a reader that is not served now; it will offer them again
            if self._batch is not None:
                return False
            self._batch = batch
        self._has_work.set()
        return True

    # --- thread ---

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopping.is_set()
            wait = _IDLE_SECONDS
            try:
                with self._connection.turn() as client:
                    wait = self._round(client)
                self._connection.succeeded()
            # Any error, because Redis may return malformed replies.
            except Exception as error:
                wait = self._connection.failed(error)
            if not self._stopping.is_set():
                self._has_work.wait(wait)
                self._has_work.clear()
        self._connection.close()

    def _round(self, client: redis.Redis) -> float:
        now = time.monotonic()
        if now >= self._clock_due:
            self.clock_error = self._measure_clock_error(client)
            self._clock_due = now + _CLOCK_SECONDS
        self._fetch_rules(client, now)
        while self._batch is not None:
            if not self._relay_batch(client):
                return _FULL_SECONDS
            if time.monotonic() - now > _TURN_SECONDS:
                return 0.0
            # Regaining the shared connection can take a second, and the next batch is on its way.
            self._has_work.wait(_NEXT_BATCH_SECONDS)
            self._has_work.clear()
        return _IDLE_SECONDS

    def _fetch_rules(self, client: redis.Redis, now: float) -> None:
        with self._lock:
            generation, due = self._generation, self._rules_due
        if not generation or now < due:
            return
        rules = self._rules.fetch_changed(client)
        if rules is not None:
            self._unsent.put((rules, generation))
        with self._lock:
            if generation == self._generation:
                self._rules_due = now + _RULES_SECONDS

    def _relay_batch(self, client: redis.Redis) -> bool:
        """Return False if the stream has no space for all of it."""
        with self._lock:
            batch, generation = self._batch, self._generation
        if batch is None:
            return True
        room = max(MOST_WAITING - int(client.xlen(FINDINGS)), 0)
        taken, rest = batch.updates[:room], batch.updates[room:]
        if taken:
            self._add_to_stream(client, taken)
        with self._lock:
            if generation != self._generation:
                return True
            self._batch = replace(batch, updates=rest) if rest else None
        if taken:  # with dropped ones, which the reader must not repeat
            self._unsent.put((FindingsTaken([update.number for update in taken]), generation))
        return not rest

    def _send_all(self) -> None:
        while (unsent := self._unsent.get()) is not None:
            message, generation = unsent
            if not self._send(message, generation) and isinstance(message, RulesNow):
                self._rules.forget()

    def _add_to_stream(self, client: redis.Redis, updates: list[QueuedFinding]) -> None:
        with client.pipeline(transaction=False) as pipeline:
            for update in updates:
                raw = self._verified(update)
                if raw is None:
                    log.error("dropping unreadable finding", extra={"number": update.number})
                    continue
                fields: dict[Any, Any] = {FIELD: raw}
                if self._signer is not None:
                    fields |= self._signer.fields(raw)
                pipeline.xadd(FINDINGS, fields)
            pipeline.execute()

    def _verified(self, queued: QueuedFinding) -> bytes | None:
        """Return the update with the clock's error, without an excerpt that makes it too large.

        None if unreadable, too large, or of another node or number.
        """
        try:
            update = finding_codec.decode(queued.body)
        except EnvelopeError:
            return None
        if update.node != self._node or update.number != queued.number:
            return None
        finding = replace(update.finding, clock_error=self.clock_error or 0.0)
        raw = finding_codec.encode(replace(update, finding=finding))
        # The server counts the signature too. An excerpt may have characters that JSON escapes with six.
        if len(raw) > LARGEST_UPDATE - 4096:
            raw = finding_codec.encode(replace(update, finding=finding, excerpt=None))
        return raw if len(raw) <= LARGEST_UPDATE else None

    def _measure_clock_error(self, client: redis.Redis) -> float | None:
        """Return None if TIME is not permitted."""
        asked = time.monotonic()
        try:
            seconds, microseconds = client.time()
        except redis.exceptions.NoPermissionError:
            return None
        took = time.monotonic() - asked
        there = seconds + microseconds / 1e6
        return abs(self._unix_now() - took / 2 - there) + took / 2
