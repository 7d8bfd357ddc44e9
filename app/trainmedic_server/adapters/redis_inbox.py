"""The one reader of ``trainmedic:replies``.

It reads as a member of a consumer group. Entries that were delivered to it and not acknowledged before it
was killed, or before its connection broke, are read again first. Who calls it: ``redis_bus``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from trainmedic.wire import envelope
from trainmedic.wire.log_limit import LogLimit
from trainmedic.wire.notice import FIELD, Notice
from trainmedic.wire.signing import BadSignature, Signer, job_identity, signatures_of
from trainmedic_server import telemetry
from trainmedic_server.adapters.redis_connection import FAULTS, RedisOutage
from trainmedic_server.adapters.redis_outbox import GROUP
from trainmedic_server.adapters.redis_replies import ReplyRouter
from trainmedic_server.adapters.redis_reply_ids import begin_ids_anew
from trainmedic_server.errors import StoreUnavailable
from trainmedic_server.ports.fence import Fence
from trainmedic_server.ports.outside import Clock

log = telemetry.logger(__name__)

BLOCK_SECONDS = 2.0
REREAD_SECONDS = 3 * BLOCK_SECONDS
"""Seconds after which delivered but unacknowledged entries are read once more.

The previous leader read under the same name. If it hangs, Redis may deliver entries to it until its blocking read
ends, and no other server would read these.
"""
IDS_SECONDS = 3.0
"""Seconds between two looks at the last id of the stream."""
LARGEST_REPLY = 256 * 1024
MOST_NOTICES = 1000
"""Notices that wait for the engine, which takes them every few seconds."""
_ENTRIES_PER_READ = 100
"""Few, for each can be as large as Redis lets it be, and only who has read it knows."""

LateReply = Callable[[envelope.Reply], Awaitable[None]]


class ReplyInbox:
    """Reads replies, and hands those that are genuine to the router. ``signer`` is None where no key is in use."""

    def __init__(
        self,
        client: Redis,
        consumer: str,
        router: ReplyRouter,
        clock: Clock,
        metrics: telemetry.Metrics,
        outage: RedisOutage,
        signer: Signer | None,
        on_late_reply: LateReply | None,
        fence: Fence,
    ) -> None:
        self._client = client
        self._consumer = consumer
        self._router = router
        self._clock = clock
        self._metrics = metrics
        self._outage = outage
        self._signer = signer
        self._on_late_reply = on_late_reply
        self._fence = fence
        self._log_limit = LogLimit()
        self.notices: dict[bytes, Notice] = {}
        """The genuine notices that have come, by their entries; whoever has dealt with one takes it out."""

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            try:
                await self._follow()
            except FAULTS as error:
                await asyncio.sleep(self._outage.begin(error))
            except StoreUnavailable as error:  # the fence: another server works, and takes the replies
                log.warning("replies are left to the server that works", reason=str(error))
                await asyncio.sleep(1)
            except Exception:  # the loop's boundary: a connection can die in ways redis-py has no name for
                self._metrics.loop_errors.labels(loop="replies").inc()
                log.exception("reading replies failed; trying again")
                await asyncio.sleep(1)

    async def _follow(self) -> None:
        await self._make_group()
        cursor = "0"  # entries that were delivered before and not acknowledged, from the first one
        clock = asyncio.get_running_loop().time
        reread_at: float | None = clock() + REREAD_SECONDS
        look_at_ids_at = clock()
        while True:
            entries = await self._read(cursor)
            if self._outage.is_on:
                self._outage.end()
                # Redis may have lost commands that it had not written to disk; receivers recognise repeats.
                self._router.send_again()
            for entry, fields in entries:
                self._take(entry, fields)
            if cursor != ">":
                cursor = entries[-1][0].decode() if entries else ">"
            elif reread_at is not None and clock() > reread_at:
                cursor, reread_at = "0", None
            if clock() > look_at_ids_at:
                await begin_ids_anew(self._client)
                look_at_ids_at = clock() + IDS_SECONDS
            await self._hand_on_late_replies()

    async def _make_group(self) -> None:
        try:
            await self._client.xgroup_create(envelope.REPLIES, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def _read(self, cursor: str) -> list[tuple[bytes, dict[bytes, bytes] | None]]:
        self._fence()
        answer: Any = await self._client.xreadgroup(
            GROUP, self._consumer, {envelope.REPLIES: cursor}, count=_ENTRIES_PER_READ, block=int(BLOCK_SECONDS * 1000)
        )
        return list(answer[0][1]) if answer else []

    def _take(self, entry: bytes, fields: dict[bytes, bytes] | None) -> None:
        fields = fields or {}
        reply = None
        try:
            if sum(map(len, fields.values())) > LARGEST_REPLY:
                raise envelope.EnvelopeError("the reply is too large")
            if FIELD in fields:
                self._take_notice(entry, fields)
                return
            reply = envelope.Reply.of_entry(fields)
            self._verify(reply, fields)
        except BadSignature as error:
            event = "a notice is refused" if reply is None else "a reply is refused"
            self._note_refused("signature", event, reply, why=f"it {error}")
            self._router.discard(entry)
        except envelope.EnvelopeError as error:
            self._note_refused("unreadable", "a reply cannot be read", entry=entry.decode(), why=str(error)[:200])
            self._router.discard(entry)
        else:
            if not self._router.take(entry, reply, self._clock.now()):
                why = "it answers another command than was sent under this id"
                self._note_refused("other_command", "a reply is refused", reply, why=why)

    def _take_notice(self, entry: bytes, fields: dict[bytes, bytes]) -> None:
        raw = fields[FIELD]
        if len(self.notices) >= MOST_NOTICES:
            raise envelope.EnvelopeError("too many notices wait")
        notice = Notice.decode(raw)
        if self._signer is not None:
            self._signer.verify(raw, signatures_of(fields), job_identity(notice.job))
        self.notices[entry] = notice

    def _verify(self, reply: envelope.Reply, fields: dict[bytes, bytes]) -> None:
        """Raise BadSignature where a key is in use and the reply is not genuine."""
        if self._signer is None:
            return
        if envelope.is_in_several_fields(fields):
            raise BadSignature("has its members in fields of their own, which nobody can sign")
        self._signer.verify(envelope.body_of(fields, b"reply"), signatures_of(fields), reply.identity)

    def _note_refused(self, reason: str, event: str, reply: envelope.Reply | None = None, **fields: str) -> None:
        """Count a message that is refused, and log it if not too many were logged already."""
        self._metrics.refused_messages.labels(reason=reason).inc()
        if not self._log_limit.lets_through():
            return
        if reply is not None:
            fields |= {"command_id": reply.command_id, "sender": reply.sender[:200], "status": reply.status}
        if self._log_limit.is_last:
            fields["others"] = "are only counted, for a minute"
        log.warning(event, **fields)

    async def _hand_on_late_replies(self) -> None:
        for entry, reply in self._router.take_unclaimed(self._clock.now()):
            self._note_refused("unmatched", "a reply came that nobody waits for", reply)
            if self._on_late_reply is not None:
                try:
                    await self._on_late_reply(reply)
                except StoreUnavailable as error:
                    message = "a late reply could not be noted; it stays in Redis until the next start"
                    log.warning(message, command_id=reply.command_id, error=str(error))
                    continue
                except Exception:  # a callback: a late reply that cannot be recorded must not stop the others
                    self._metrics.loop_errors.labels(loop="late replies").inc()
                    log.exception("a late reply could not be noted")
            self._router.discard(entry)
