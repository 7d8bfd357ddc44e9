"""Command bus on Redis Streams.

While Redis is unreachable, commands wait until they expire. After an outage, those without all replies are sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import timedelta

from msgspec import Struct
from msgspec.structs import replace
from redis.asyncio import Redis

from trainmedic.wire import envelope, notice
from trainmedic.wire.connection import ANSWER_SECONDS
from trainmedic.wire.envelope import Command, Reply
from trainmedic.wire.signing import Signer, job_identity, node_identity
from trainmedic_server import errors, telemetry
from trainmedic_server.adapters.redis_connection import FAULTS, RedisOutage, open_client, unavailable
from trainmedic_server.adapters.redis_inbox import LateReply, ReplyInbox
from trainmedic_server.adapters.redis_outbox import CommandOutbox, QueuedCommand
from trainmedic_server.adapters.redis_presence import PresenceReader
from trainmedic_server.adapters.redis_presence_judge import PresenceJudge
from trainmedic_server.adapters.redis_replies import ReplyRouter, ReplyWaiter
from trainmedic_server.adapters.redis_stream_reader import BLOCK_SECONDS
from trainmedic_server.ports.ending import end_tasks
from trainmedic_server.ports.fence import Fence, no_fence
from trainmedic_server.ports.jobs import ArrivedNotice
from trainmedic_server.ports.outside import Clock, Presence

GRACE = timedelta(seconds=1)  # Wait for replies after the expiry of a command; as `actions.commands.WAITED_OUT`.
UNHEARD_AFTER = timedelta(seconds=10)
"""Time after sending until a receiver without presence and reply counts as absent. Longer than an agent's restart."""


class RedisBus:
    """Each leader has the same `consumer`: Redis delivers unacknowledged replies to it again. `on_late_reply` receives
    final replies that no request waits for. `fence` is called before streams are read or written.
    """

    def __init__(
        self,
        url: str,
        clock: Clock,
        metrics: telemetry.Metrics,
        signer: Signer | None = None,
        consumer: str = "server",
        on_late_reply: LateReply | None = None,
        fence: Fence = no_fence,
    ) -> None:
        self._clock = clock
        self._signer = signer
        self._client: Redis = open_client(url)
        # A separate client, because its timeout must exceed that of the blocking read.
        self._reading: Redis = open_client(url, BLOCK_SECONDS + ANSWER_SECONDS)
        self._judge = PresenceJudge(signer, clock, metrics)
        self._presences = PresenceReader(self._client, self._judge)
        self._url = url
        self._writer_outage = RedisOutage("sending", url, metrics.bus_errors)
        self._outbox = CommandOutbox(self._client, clock, metrics, self._writer_outage, fence)
        self._reader_outage = RedisOutage("reading", url, metrics.bus_errors)
        self._router = ReplyRouter(clock.now(), self._outbox.send, self._outbox.acknowledge, signer is not None)
        self._inbox = ReplyInbox(
            self._reading,
            consumer,
            self._router,
            clock,
            metrics,
            self._reader_outage,
            signer,
            on_late_reply,
            fence,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._outbox.run(), name="redis-outbox"),
            asyncio.create_task(self._inbox.run(), name="redis-inbox"),
        ]

    async def close(self) -> None:
        await end_tasks(self._tasks)
        if self._tasks and not self._reader_outage.is_on:
            # Unacknowledged replies are delivered again. A server that may not act sends nothing.
            with contextlib.suppress(*FAULTS, errors.StoreUnavailable):
                await self._outbox.flush()
        self._tasks = []
        await self._client.aclose()
        await self._reading.aclose()

    @property
    def is_signed(self) -> bool:
        return self._signer is not None

    async def request(
        self, command: Command, unheard: Callable[[], Awaitable[bool]] | None = None
    ) -> tuple[Reply, ...]:
        """A reply ``accepted`` stands for a rank that has not finished."""
        address = _address_of(command)
        waiter = self._router.register(command.id, command.expires_at, address.identity)
        try:
            remaining = command.expires_at + GRACE - self._clock.now()
            async with asyncio.timeout(remaining.total_seconds()):
                await self._send_and_wait(command, address, waiter, unheard)
        except TimeoutError:
            pass  # Return the replies so far.
        finally:
            self._router.unregister(command.id, waiter)
        return waiter.replies()

    def tell(self, command: Command) -> None:
        address = _address_of(command)
        raw, signatures = self._signed(command, address)
        self._outbox.send(QueuedCommand(address.stream, address.presence, raw, signatures, command.expires_at))

    def acknowledge(self, command_id: str) -> None:
        self._router.acknowledge(command_id)

    async def agents(self) -> list[Presence]:
        return await self._presences.all_under(envelope.agent_presence(""))

    async def jobs(self) -> list[Presence]:
        return await self._presences.all_under(envelope.job_presence(""))

    async def launchers(self) -> list[Presence]:
        presences = await self._presences.all_under(notice.launcher_presence(""))
        return [replace(presence, name=notice.job_of_launcher(presence.name)) for presence in presences]

    def notices(self) -> list[ArrivedNotice]:
        return [ArrivedNotice(entry, arrived) for entry, arrived in self._inbox.notices.items()]

    def discard_notices(self, entries: Collection[bytes]) -> None:
        for entry in entries:
            if self._inbox.notices.pop(entry, None) is not None:
                self._router.discard(entry)

    async def check(self) -> None:
        if self._reader_outage.is_on:
            raise self._reader_outage.reason or errors.BusUnavailable("Redis does not answer the reader of replies")
        try:
            await self._client.ping()
        except FAULTS as error:
            raise unavailable(error, self._url) from error
        for refusal in (self._writer_outage.refusal, self._presences.refusal):
            if refusal is not None:
                raise refusal

    async def _send_and_wait(
        self,
        command: Command,
        address: CommandAddress,
        waiter: ReplyWaiter,
        unheard: Callable[[], Awaitable[bool]] | None,
    ) -> None:
        presence = address.presence
        if waiter.finals:  # Replies to the previous server; perhaps all have arrived.
            waiter.expect(await self._ranks(presence))
        if waiter.is_complete:
            return
        raw, signatures = self._signed(command, address)
        waiter.command = _AwaitedCommand(
            address.stream, presence, raw, signatures, command.expires_at, waiter=waiter, judge=self._judge
        )
        self._outbox.send(waiter.command)
        while not waiter.is_sent:
            await waiter.next_change()
        if unheard is not None and not await _is_heard(waiter) and await self._is_absent(presence) and await unheard():
            return
        while True:
            while not waiter.is_complete:
                await waiter.next_change()
            if waiter.knows_who_answers:
                return
            # The job was not connected when the command was sent. Since a rank has answered, its presence lists the
            # others.
            waiter.expect(await self._ranks(presence))
            if waiter.is_complete:
                return

    def _signed(self, command: Command, address: CommandAddress) -> tuple[bytes, Mapping[bytes, str]]:
        raw = command.encode()
        return raw, {} if self._signer is None else self._signer.fields(raw, address.identity)

    async def _is_absent(self, presence: str) -> bool:
        try:
            present = await self._presences.read(presence)
        except errors.BusUnavailable:
            return False
        # An untrusted claim alone is no receiver.
        return present is None or (present.doubt is not None and not present.details)

    async def _ranks(self, presence: str) -> frozenset[int] | None:
        try:
            return self._judge.ranks_of(presence, await self._presences.value(presence))
        except errors.BusUnavailable:
            return self._judge.ranks_of(presence, None)  # The last known ones.


class _AwaitedCommand(QueuedCommand, kw_only=True):
    waiter: ReplyWaiter
    judge: PresenceJudge

    @property
    def is_wanted(self) -> bool:
        return self.waiter.users > 0 and not self.waiter.is_complete

    def note_sent(self, presence: bytes | None) -> None:
        self.waiter.mark_sent(self.judge.ranks_of(self.presence, presence))


async def _is_heard(waiter: ReplyWaiter) -> bool:
    """Wait for a reply. Return False after `UNHEARD_AFTER`."""
    try:
        async with asyncio.timeout(UNHEARD_AFTER.total_seconds()):
            while not waiter.is_heard:
                await waiter.next_change()
    except TimeoutError:
        return False
    return True


class CommandAddress(Struct, frozen=True):
    stream: str
    presence: str  # Key of the receiver's presence.
    identity: str  # Of the receiver, in signatures.


def _address_of(command: Command) -> CommandAddress:
    job, node, launcher = (command.target.get(name) for name in ("job", "node", "launcher"))
    if isinstance(launcher, str) and launcher:
        owner = job_identity(notice.job_of_launcher(launcher))
        return CommandAddress(notice.launcher_commands(launcher), notice.launcher_presence(launcher), owner)
    if isinstance(job, str) and job:
        return CommandAddress(envelope.job_commands(job), envelope.job_presence(job), job_identity(job))
    if isinstance(node, str) and node:
        return CommandAddress(envelope.node_commands(node), envelope.agent_presence(node), node_identity(node))
    raise errors.PermanentFailure("a command needs a job or a node as its target")
