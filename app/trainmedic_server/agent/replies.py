"""Answers on their way to the server, and the agent's presence.

The outcome of an order is in the journal before it comes here, so none is lost while Redis is away or the
agent restarts: what the journal holds unsent is sent when it can be. Other answers (``accepted``, or why a
command was not taken) come from the reading of a stream entry, and that entry stays on the stream until
Redis has the answer.

The thread that writes is the SDK's `Writer`. Not here: deciding what to answer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from trainmedic.wire import envelope
from trainmedic.wire.connection import Link
from trainmedic.wire.memory import Memory
from trainmedic.wire.writer import Outgoing, Writer
from trainmedic_server.agent.counters import AgentCounters
from trainmedic_server.agent.journal import Journal, JournalEntry
from trainmedic_server.errors import JournalUnavailable

log = logging.getLogger(__name__)

PRESENCE_SECONDS = 30
PRESENCE_EVERY = 10.0
_REFILL = 500
"""How many unsent outcomes are taken from the journal at once; the writer's queue holds twice as many."""


class Replies:
    """Sends answers in the order in which they are put in."""

    def __init__(
        self,
        node: str,
        instance: str,
        link: Link,
        journal: Journal,
        describe: Callable[[], Mapping[str, Any]],
        now: Callable[[], datetime],
        tally: AgentCounters,
    ) -> None:
        self._node = node
        self._tally = tally
        self._journal = journal
        self._now = now
        self._lock = threading.Lock()
        self._on_the_way: set[str] = set()
        self._arrived: list[str] = []
        self._rival: tuple[datetime, str] | None = None
        self._is_behind = True  # an earlier process may have left some
        self._writer = Writer(
            link,
            Memory(f"node:{node}", instance),  # names this process; what it remembers is in the journal
            envelope.node_commands(node),
            envelope.agent_presence(node),
            describe,
            PRESENCE_SECONDS,
            PRESENCE_EVERY,
            self._written,
            self._see_rival,
        )

    def start(self) -> None:
        self._refill()
        self._writer.start()

    def stop(self, timeout: float) -> None:
        """Send what waits, take the presence away. What Redis does not take by then stays in the journal."""
        self._writer.stop(timeout)
        self._note_arrivals()

    def rival(self) -> str | None:
        """Which other agent has this node's name too, as far as was seen lately; None while none has."""
        seen = self._rival
        if seen is None or abs((self._now() - seen[0]).total_seconds()) > PRESENCE_SECONDS:
            return None
        return seen[1]

    def answer(self, command_id: str, status: str, output: Mapping[str, Any], entry: bytes | None) -> None:
        """Say what is not in the journal; with `entry`, which is then taken off the stream."""
        self._writer.put(Outgoing((self._reply(JournalEntry(command_id, status, self._now(), output)),), entry))

    def repeat(self, known: JournalEntry, stream_entry: bytes) -> None:
        """Say again how a command ended that has come once more."""
        self._writer.put(Outgoing((self._reply(known),), stream_entry))

    def conclude(self, concluded: JournalEntry) -> None:
        """Say how a command ended. It is in the journal, as unsent."""
        with self._lock:
            self._on_the_way.add(concluded.id)
        if not self._writer.put(Outgoing((self._reply(concluded),))):
            with self._lock:
                self._on_the_way.discard(concluded.id)
                self._is_behind = True

    def _reply(self, entry: JournalEntry) -> envelope.Reply:
        return envelope.Reply(entry.id, self._node, entry.status, None, entry.output, entry.at)

    def _see_rival(self, said: Mapping[str, Any]) -> None:
        """In the writer's thread, before each presence that finds another agent's in its place."""
        rival = f"process {said.get('pid')} on {said.get('host')!r}"
        if self.rival() != rival:
            log.error(
                "another agent calls itself %s too: %s. Until one of them is stopped, or named otherwise (--node), "
                "commands are refused, for they could be meant for the other",
                self._node,
                rival,
            )
        self._rival = self._now(), rival

    def _written(self, sent: Sequence[Outgoing]) -> None:
        """In the writer's thread. That a reply was sent is noted with the next presence, for many at once:
        where the note is lost the reply is sent twice, which does no harm, and each note is a disk write."""
        self._tally.heard(self._now().timestamp())
        with self._lock:
            for one in sent:
                if one.replies[0].is_final and one.command_id in self._on_the_way:
                    self._on_the_way.discard(one.command_id)
                    self._arrived.append(one.command_id)
            is_behind = self._is_behind and not self._on_the_way
        if is_behind or not sent:
            self._note_arrivals()
        if is_behind:
            self._refill()

    def _note_arrivals(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        try:
            self._journal.sent(arrived)
        except JournalUnavailable as error:
            log.error("sent replies could not be noted, and will be sent again: %s", error)
            with self._lock:
                self._arrived = arrived + self._arrived

    def _refill(self) -> None:
        """Put in what the journal holds unsent."""
        try:
            unsent = self._journal.unsent(_REFILL)
        except JournalUnavailable as error:
            log.error("unsent replies could not be read: %s", error)
            return
        with self._lock:
            left = [entry for entry in unsent if entry.id not in self._on_the_way and entry.id not in self._arrived]
            self._is_behind = len(unsent) == _REFILL
        for entry in left:
            self.conclude(entry)
