"""The only reader of the stream ``trainmedic:replies``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from redis.asyncio import Redis

from trainmedic.wire import envelope
from trainmedic.wire.log_limit import LogLimit
from trainmedic.wire.notice import FIELD, Notice
from trainmedic.wire.signing import BadSignature, Signer, job_identity, signatures_of
from trainmedic_server import telemetry
from trainmedic_server.adapters.redis_connection import RedisOutage
from trainmedic_server.adapters.redis_replies import ReplyRouter
from trainmedic_server.adapters.redis_stream_reader import Entry, StreamReader
from trainmedic_server.errors import StoreUnavailable
from trainmedic_server.ports.fence import Fence
from trainmedic_server.ports.outside import Clock

log = telemetry.logger(__name__)

LARGEST_REPLY = 256 * 1024  # Bytes.
MOST_NOTICES = 1000  # Waiting for `engine.job_watch`; further ones are lost.
_ENTRIES_PER_READ = 100

LateReply = Callable[[envelope.Reply], Awaitable[None]]


class ReplyInbox:
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
        self._router = router
        self._clock = clock
        self._metrics = metrics
        self._signer = signer
        self._on_late_reply = on_late_reply
        self._reader = StreamReader(
            client, envelope.REPLIES, self._take_all, metrics, outage,
            loop="replies", consumer=consumer, most=_ENTRIES_PER_READ, fence=fence,
            # Redis may have lost commands that were not on disk. Receivers recognise repetitions.
            on_recovery=router.send_again,
        )  # fmt: skip
        self._log_limit = LogLimit()
        # By entry, until `RedisBus.discard_notices`; until then the stream has the entry too.
        self.notices: dict[bytes, Notice] = {}

    async def run(self) -> None:
        await self._reader.run()

    async def _take_all(self, entries: Sequence[Entry]) -> None:
        for entry, fields in entries:
            self._take(entry, fields)
        await self._pass_on_late_replies()

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
            event = "refusing notice" if reply is None else "refusing reply"
            self._note_refused("signature", event, reply, why=f"it {error}")
            self._router.discard(entry)
        except envelope.EnvelopeError as error:
            self._note_refused("unreadable", "cannot read reply", entry=entry.decode(), why=str(error)[:200])
            self._router.discard(entry)
        else:
            if not self._router.take(entry, reply, self._clock.now()):  # `take` has discarded it
                why = "it answers another command than was sent under this id"
                self._note_refused("other_command", "refusing reply", reply, why=why)

    def _take_notice(self, entry: bytes, fields: dict[bytes, bytes]) -> None:
        raw = fields[FIELD]
        if len(self.notices) >= MOST_NOTICES:
            raise envelope.EnvelopeError("too many notices wait")  # this one is lost
        notice = Notice.decode(raw)
        if self._signer is not None:
            self._signer.verify(raw, signatures_of(fields), job_identity(notice.job))
        self.notices[entry] = notice

    def _verify(self, reply: envelope.Reply, fields: dict[bytes, bytes]) -> None:
        if self._signer is None:
            return
        if envelope.is_in_several_fields(fields):
            raise BadSignature("has its members in fields of their own, which nobody can sign")
        self._signer.verify(envelope.body_of(fields, b"reply"), signatures_of(fields), reply.identity)

    def _note_refused(self, reason: str, event: str, reply: envelope.Reply | None = None, **fields: str) -> None:
        self._metrics.refused_messages.labels(reason=reason).inc()
        if not self._log_limit.lets_through():
            return
        if reply is not None:
            fields |= {"command_id": reply.command_id, "sender": reply.sender[:200], "status": reply.status}
        if self._log_limit.is_last:
            fields["others"] = "are only counted, for a minute"
        log.warning(event, **fields)

    async def _pass_on_late_replies(self) -> None:
        for entry, reply in self._router.take_unclaimed(self._clock.now()):
            self._note_refused("unmatched", "received a reply that no request waits for", reply)
            if self._on_late_reply is not None:
                try:
                    await self._on_late_reply(reply)
                except StoreUnavailable as error:
                    message = "cannot record late reply; it stays in Redis until the next start"
                    log.warning(message, command_id=reply.command_id, error=str(error))
                    continue
                except Exception:  # A late reply that cannot be recorded must not stop the others.
                    self._metrics.loop_errors.labels(loop="late replies").inc()
                    log.exception("cannot record late reply")
            self._router.discard(entry)
