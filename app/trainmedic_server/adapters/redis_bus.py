"""`ports.CommandBus` on Redis Streams.

A command goes to its receiver's own stream; every reply comes back on ``trainmedic:replies``. The
parts: ``redis_outbox`` writes, ``redis_inbox`` reads, ``redis_replies`` matches the two,
``redis_presence`` knows who is connected. Who calls it: ``wiring`` builds and starts it; actions
use it through the port.

While Redis is away commands wait until they expire. When it is back, replies that were not settled
are delivered again, and commands that wait for an answer are sent again, since Redis may have lost them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from datetime import timedelta

from redis.asyncio import Redis

from trainmedic.wire import envelope
from trainmedic.wire.envelope import Command, Reply
from trainmedic_server import errors, telemetry
from trainmedic_server.adapters.redis_connection import ANSWER_SECONDS, FAULTS, Outage, open_client, unavailable
from trainmedic_server.adapters.redis_inbox import BLOCK_SECONDS, Inbox, LateReply
from trainmedic_server.adapters.redis_outbox import Outbox, Outgoing
from trainmedic_server.adapters.redis_presence import Directory, ranks_of
from trainmedic_server.adapters.redis_replies import Replies, Waiter
from trainmedic_server.ports.fence import Fence, no_fence
from trainmedic_server.ports.outside import Clock, Presence

GRACE = timedelta(seconds=1)
"""How long after a command has expired its replies are still waited for (the port's promise)."""
UNHEARD_AFTER = timedelta(seconds=10)
"""How long after a command was sent its receiver counts as away, if it is not connected and says nothing.
Longer than an agent takes to start again."""


class RedisBus:
    """Commands out, replies in. `start` it before use, `close` it after.

    ``consumer`` names this server among those that read the replies; a server that restarts must
    keep its name, because what it was given before is given to that name again. ``on_late_reply``
    is called with each final reply that nobody waits for. Where several servers share a Redis one works,
    under the one name, so that it is given what was given to the one before; ``fence`` is called before
    anything is read or sent, and does not return where this server is not the one any more.
    """

    def __init__(
        self,
        url: str,
        clock: Clock,
        metrics: telemetry.Metrics,
        signing_key: bytes | None = None,
        consumer: str = "server",
        on_late_reply: LateReply | None = None,
        fence: Fence = no_fence,
    ) -> None:
        self._clock = clock
        self._key = signing_key
        self._client: Redis = open_client(url)
        # A client of its own: its answers take as long as the blocking read, and then some.
        self._reading: Redis = open_client(url, BLOCK_SECONDS + ANSWER_SECONDS)
        self._directory = Directory(self._client, clock)
        self._outbox = Outbox(self._client, clock, metrics, Outage("sending", url, metrics.bus_errors), fence)
        self._reader_outage = Outage("reading", url, metrics.bus_errors)
        self._replies = Replies(clock.now(), self._outbox.acknowledge)
        self._inbox = Inbox(
            self._reading,
            consumer,
            self._replies,
            self._outbox.acknowledge,
            clock,
            metrics,
            self._reader_outage,
            on_late_reply,
            fence,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to read and write. Returns at once, whether or not Redis answers."""
        self._tasks = [
            asyncio.create_task(self._outbox.run(), name="redis-outbox"),
            asyncio.create_task(self._inbox.run(), name="redis-inbox"),
        ]

    async def close(self) -> None:
        """Stop. Acknowledgements still queued are sent if Redis takes them now, else replies come again."""
        running = set(self._tasks)
        while running:
            # More than once: a cancellation that meets a failing connection is lost in redis-py.
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=0.2)
        if self._tasks and not self._reader_outage.is_on:
            with contextlib.suppress(*FAULTS):  # nothing is lost: what is not acknowledged is delivered again
                await self._outbox.flush()
        self._tasks = []
        await self._client.aclose()
        await self._reading.aclose()

    async def request(
        self, command: Command, unheard: Callable[[], Awaitable[bool]] | None = None
    ) -> tuple[Reply, ...]:
        """See the port. Besides final replies, those who took it up and did not finish are named by
        their ``accepted``."""
        waiter = self._replies.enter(command.id, command.expires_at)
        try:
            left = command.expires_at + GRACE - self._clock.now()
            async with asyncio.timeout(left.total_seconds()):
                await self._fulfil(command, waiter, unheard)
        except TimeoutError:
            pass  # what came until now is the answer
        finally:
            self._replies.leave(command.id, waiter)
        return waiter.replies()

    def acknowledge(self, command_id: str) -> None:
        self._replies.acknowledge(command_id)

    async def agents(self) -> list[Presence]:
        """Raises BusUnavailable."""
        return await self._directory.listed(envelope.agent_presence(""))

    async def jobs(self) -> list[Presence]:
        """Raises BusUnavailable."""
        return await self._directory.listed(envelope.job_presence(""))

    async def check(self) -> None:
        if self._reader_outage.is_on:
            raise errors.BusUnavailable("Redis does not answer the reader of replies")
        try:
            await self._client.ping()
        except FAULTS as error:
            raise unavailable(error) from error

    async def _fulfil(self, command: Command, waiter: Waiter, unheard: Callable[[], Awaitable[bool]] | None) -> None:
        stream, presence = _addresses(command)
        if waiter.finals:  # they came before this server was killed; perhaps nothing is missing
            waiter.expect(ranks_of(await self._presence(presence)))
        if waiter.is_complete:
            return
        raw = command.encode()
        outgoing = Outgoing(
            stream=stream,
            presence=presence,
            raw=raw,
            signature=None if self._key is None else envelope.sign(raw, self._key),
            expires_at=command.expires_at,
            told=lambda value: waiter.note_sent(ranks_of(value)),
            is_wanted=lambda: waiter.users > 0 and not waiter.is_complete,
        )
        waiter.send_again = lambda: self._outbox.send(outgoing)
        self._outbox.send(outgoing)
        if unheard is not None and await self._is_unheard(waiter, presence) and await unheard():
            return
        while True:
            await _completion(waiter)
            if waiter.ranks is not None or None in waiter.finals:
                return
            # A rank of a job that was not connected when the command was sent: by now it says who answers.
            waiter.expect(ranks_of(await self._presence(presence)))
            if waiter.is_complete:
                return

    async def _is_unheard(self, waiter: Waiter, presence: str) -> bool:
        """Whether, a while after the command was sent, nobody has answered and nobody is there who could."""
        await waiter.sent.wait()
        try:
            async with asyncio.timeout(UNHEARD_AFTER.total_seconds()):
                await waiter.heard.wait()
            return False
        except TimeoutError:
            pass
        try:
            return await self._directory.read(presence) is None
        except errors.BusUnavailable:
            return False

    async def _presence(self, key: str) -> bytes | None:
        try:
            return await self._directory.read(key)
        except errors.BusUnavailable:
            return None


async def _completion(waiter: Waiter) -> None:
    while not waiter.is_complete:
        waiter.changed.clear()
        await waiter.changed.wait()


def _addresses(command: Command) -> tuple[str, str]:
    """The stream and the presence key of whoever carries out the command: its job, else its node."""
    job, node = command.target.get("job"), command.target.get("node")
    if isinstance(job, str) and job:
        return envelope.job_commands(job), envelope.job_presence(job)
    if isinstance(node, str) and node:
        return envelope.node_commands(node), envelope.agent_presence(node)
    raise errors.PermanentFailure("a command needs a job or a node as its target")
