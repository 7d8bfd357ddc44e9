"""Replies to the server, and the agent's presence.

Unsent outcomes are sent from the journal after an outage or restart.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from trainmedic.wire import envelope
from trainmedic.wire.command_book import CommandRecord, ended
from trainmedic.wire.command_memory import CommandMemory
from trainmedic.wire.connection import RedisConnection
from trainmedic.wire.writer import OutgoingReplies, PresenceKey, ReplyWriter
from trainmedic_agent.context import AgentContext
from trainmedic_agent.errors import JournalUnavailable

log = logging.getLogger(__name__)

_PRESENCE_LIFETIME = 30  # seconds
_PRESENCE_INTERVAL = 10.0  # seconds
_MOST_REFILLED = 500  # the writer's queue holds twice as many


class AgentReplies:
    """Thread-safe."""

    def __init__(
        self,
        context: AgentContext,
        instance: str,
        connection: RedisConnection,
        describe: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._node = node = context.node
        self._counters = context.counters
        self._journal = context.journal
        self._now = context.now
        self._lock = threading.Lock()
        self._in_flight: set[str] = set()  # commands whose outcomes are queued
        self._sent_ids: list[str] = []  # commands whose outcomes Redis has, not marked in the journal yet
        self._conflict: tuple[datetime, str] | None = None  # last sight of another agent with this name
        self._is_behind = True  # the journal may have outcomes that are not queued, as from an earlier process
        name = envelope.agent_presence(node)
        self._writer = ReplyWriter(
            connection,
            CommandMemory(f"node:{node}", instance),  # identifies this process; the memory itself is the journal
            envelope.node_commands(node),
            PresenceKey(name, node, describe, self._on_conflict, _PRESENCE_LIFETIME, _PRESENCE_INTERVAL),
            context.signer,
            self._on_sent,
        )

    def start(self) -> None:
        self._refill()
        self._writer.start()

    def stop(self, timeout: float) -> None:
        self._writer.stop(timeout)
        self._mark_sent()

    def name_conflict(self) -> str | None:
        """Return the other agent with this name, if seen lately."""
        conflict = self._conflict
        if conflict is None or abs((self._now() - conflict[0]).total_seconds()) > _PRESENCE_LIFETIME:
            return None
        return conflict[1]

    def answer(self, command_id: str, record: CommandRecord, entry: bytes) -> None:
        self._writer.put(OutgoingReplies((self._reply(command_id, record),), entry))

    def refuse(self, command_id: str, reason: str, entry: bytes) -> None:
        """Reject a command that is not authentic or for another node."""
        reply = self._reply(command_id, ended(envelope.REJECTED, reason))
        self._writer.put(OutgoingReplies((replace(reply, is_to_genuine=False),), entry))

    def send_outcome(self, command_id: str, outcome: CommandRecord) -> None:
        with self._lock:
            self._in_flight.add(command_id)
        if not self._writer.put(OutgoingReplies((self._reply(command_id, outcome),))):
            with self._lock:
                self._in_flight.discard(command_id)
                self._is_behind = True

    def send_reading(self, command_id: str, outcome: CommandRecord) -> None:
        """Send an outcome without journal entry. If it is lost, the server asks again."""
        self._writer.put(OutgoingReplies((self._reply(command_id, outcome),)))

    def _reply(self, command_id: str, record: CommandRecord) -> envelope.Reply:
        return envelope.Reply(command_id, self._node, record.status, None, record.output, record.at, node=self._node)

    def _on_conflict(self, presence: Mapping[str, Any]) -> None:
        other = f"process {presence.get('pid')} on {presence.get('host')!r}"
        if self.name_conflict() != other:
            log.error(
                "another agent has the name %s too: %s; refusing commands until one is stopped or renamed (--node)",
                self._node,
                other,
            )
        self._conflict = self._now(), other

    def _on_sent(self, sent: Sequence[OutgoingReplies]) -> None:
        """Mark replies once the queue is empty (no `sent`): each mark is a disk write."""
        self._counters.redis_answered_at = self._now().timestamp()
        with self._lock:
            for batch in sent:
                if batch.replies[0].is_final and batch.command_id in self._in_flight:
                    self._in_flight.discard(batch.command_id)
                    self._sent_ids.append(batch.command_id)
            is_behind = self._is_behind and not self._in_flight
        if is_behind or not sent:
            self._mark_sent()
        if is_behind:
            self._refill()

    def _mark_sent(self) -> None:
        with self._lock:
            sent_ids, self._sent_ids = self._sent_ids, []
        if not sent_ids:
            return
        try:
            self._journal.mark_sent(sent_ids)
        except JournalUnavailable as error:
            log.error("cannot journal sent replies; they will be sent again", extra={"reason": str(error)})
            with self._lock:
                self._sent_ids = sent_ids + self._sent_ids

    def _refill(self) -> None:
        try:
            unsent = self._journal.unsent(_MOST_REFILLED)
        except JournalUnavailable as error:
            log.error("cannot read unsent replies", extra={"reason": str(error)})
            return
        with self._lock:
            known = {*self._in_flight, *self._sent_ids}
            self._is_behind = len(unsent) == _MOST_REFILLED
        for command_id, outcome in unsent:
            if command_id not in known:
                self.send_outcome(command_id, outcome)
