"""Matching of replies to waiting requests.

A stream entry is acknowledged only when its outcome is durable, so that a killed server receives it again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime, timedelta

from trainmedic.wire.envelope import EXPIRED, Reply
from trainmedic_server.adapters.redis_outbox import QueuedCommand

GRACE = timedelta(minutes=5)
"""Time after the start for which unclaimed replies are retained: recovery requests them again."""
EARLY_LIMIT = 10_000  # Commands with unclaimed replies, and replies of one.
RECENT_LIMIT = 20_000  # Commands.


class ReplyWaiter:
    def __init__(self, expires_at: datetime, identity: str) -> None:
        self.expires_at = expires_at
        self.identity = identity  # Of the receiver: signed replies of others do not count.
        self.command: QueuedCommand | None = None
        self.ranks: frozenset[int] | None = None  # Ranks that must reply; None while unknown.
        self.finals: dict[int | None, Reply] = {}  # By rank, None if the receiver has no ranks.
        self.accepted: dict[int | None, Reply] = {}  # By rank, before the final reply.
        self.is_sent = False
        self.is_heard = False  # Any reply arrived that `offer` does not ignore.
        self.users = 0  # Waiting requests.
        self._changed = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        if not self.finals:
            return False
        # The number of ranks in a reply has priority: a presence is of another moment, and can be lost.
        counts = [reply.ranks for reply in self.finals.values() if reply.ranks is not None]
        if counts:
            return len(self.finals) >= max(counts)
        return self.ranks is None or self.ranks <= self.finals.keys()

    @property
    def knows_who_answers(self) -> bool:
        has_count = any(rank is None or reply.ranks is not None for rank, reply in self.finals.items())
        return has_count or self.ranks is not None

    async def next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def expect(self, ranks: frozenset[int] | None) -> None:
        self.ranks = ranks
        self._changed.set()

    def mark_sent(self, ranks: frozenset[int] | None) -> None:
        self.is_sent = True
        self.expect(ranks)

    def offer(self, reply: Reply) -> bool:
        """Take a reply. Return whether it is the first final one of its rank."""
        if reply.status == EXPIRED and reply.at < self.expires_at:
            # It answers an earlier, shorter sending of this command. Counting it would repeat a still valid command
            # under another ID.
            return False
        self.is_heard = True
        self.is_sent = True  # Possibly by the previous server. The outbox omits answered commands.
        self._changed.set()
        if not reply.is_final:
            self.accepted[reply.rank] = reply
            return False
        if reply.rank in self.finals:
            return False
        self.finals[reply.rank] = reply
        return True

    def replies(self) -> tuple[Reply, ...]:
        unfinished = [reply for rank, reply in self.accepted.items() if rank not in self.finals]
        return (*self.finals.values(), *unfinished)


class ReplyRouter:
    def __init__(
        self,
        now: datetime,
        send: Callable[[QueuedCommand], None],
        acknowledge: Callable[[list[bytes]], None],
        is_signed: bool = False,
    ) -> None:
        self._is_signed = is_signed
        self._early_until = now + GRACE
        self._send = send
        self._acknowledge = acknowledge
        self._waiters: dict[str, ReplyWaiter] = {}
        self._unacknowledged: dict[str, dict[bytes, None]] = {}
        """Entries whose outcome is not durable yet."""
        self._early: OrderedDict[str, dict[bytes, Reply]] = OrderedDict()
        """Replies by entry within `GRACE` after the start, without a waiting request."""
        self._recent: OrderedDict[str, frozenset[int | None]] = OrderedDict()
        """Ranks that replied to a command whose request has ended."""
        self._unclaimed: list[tuple[bytes, Reply]] = []  # Late replies, until `take_unclaimed`.

    def register(self, command_id: str, expires_at: datetime, identity: str) -> ReplyWaiter:
        """The waiter also gets replies that arrived earlier, as after a restart."""
        waiter = self._waiters.setdefault(command_id, ReplyWaiter(expires_at, identity))
        waiter.users += 1
        waiter.expires_at = max(waiter.expires_at, expires_at)
        self._recent.pop(command_id, None)
        for entry, reply in self._early.pop(command_id, {}).items():
            self._route(waiter, entry, reply)
        return waiter

    def unregister(self, command_id: str, waiter: ReplyWaiter) -> None:
        waiter.users -= 1
        if waiter.users:
            return
        del self._waiters[command_id]
        waiter.command = None  # Breaks the reference cycle.
        self._recent[command_id] = frozenset(waiter.finals)
        if len(self._recent) > RECENT_LIMIT:
            self._recent.popitem(last=False)

    def send_again(self) -> None:
        for waiter in self._waiters.values():
            if waiter.command is not None and not waiter.is_complete:
                self._send(waiter.command)

    def acknowledge(self, command_id: str) -> None:
        entries = self._unacknowledged.pop(command_id, None)
        if entries:
            self._acknowledge(list(entries))

    def discard(self, entry: bytes) -> None:
        self._acknowledge([entry])

    def take(self, entry: bytes, reply: Reply, now: datetime) -> bool:
        """Return False if the reply answers another command than the one sent."""
        if self._is_signed and not reply.is_to_genuine:
            # The author of the refused message can have chosen the ID of the command sent.
            self.discard(entry)
            return False
        known = self._early.get(reply.command_id, {}), self._unacknowledged.get(reply.command_id, {})
        if any(entry in entries for entries in known):
            return True  # read again after a reconnect
        waiter = self._waiters.get(reply.command_id)
        if waiter is not None:
            return self._route(waiter, entry, reply)
        if not reply.is_final or reply.rank in self._recent.get(reply.command_id, ()):
            self.discard(entry)
        elif now < self._early_until and reply.command_id not in self._recent:
            early = self._early.setdefault(reply.command_id, {})
            early[entry] = reply
            if len(early) > EARLY_LIMIT:
                self._unclaimed.extend(self._early.pop(reply.command_id).items())
            elif len(self._early) > EARLY_LIMIT:
                self._unclaimed.extend(self._early.popitem(last=False)[1].items())
        else:
            self._unclaimed.append((entry, reply))
        return True

    def take_unclaimed(self, now: datetime) -> list[tuple[bytes, Reply]]:
        if now >= self._early_until and self._early:
            for entries in self._early.values():
                self._unclaimed.extend(entries.items())
            self._early.clear()
        unclaimed, self._unclaimed = self._unclaimed, []
        return unclaimed

    def _route(self, waiter: ReplyWaiter, entry: bytes, reply: Reply) -> bool:
        is_asked = reply.identity in (None, waiter.identity)
        if is_asked and waiter.offer(reply):
            self._unacknowledged.setdefault(reply.command_id, {})[entry] = None
        else:
            self.discard(entry)
        return is_asked
