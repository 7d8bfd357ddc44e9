"""The only reader of the stream ``trainmedic:findings``. Deletes an entry when it is durable or refused."""

from __future__ import annotations

from collections.abc import Sequence

from redis.asyncio import Redis

from trainmedic.wire import findings as wire
from trainmedic.wire.connection import ANSWER_SECONDS
from trainmedic.wire.envelope import EnvelopeError
from trainmedic.wire.log_limit import LogLimit
from trainmedic.wire.signing import BadSignature, Signer, node_identity, signatures_of
from trainmedic_logs.domain import finding_codec
from trainmedic_logs.domain.finding_codec import FindingUpdate
from trainmedic_server import telemetry
from trainmedic_server.adapters.redis_connection import RedisOutage, open_client
from trainmedic_server.adapters.redis_outbox import GROUP
from trainmedic_server.adapters.redis_stream_reader import BLOCK_SECONDS, Entry, StreamReader
from trainmedic_server.errors import StoreUnavailable
from trainmedic_server.ports.fence import Fence, no_fence
from trainmedic_server.ports.findings import TakeUpdates

log = telemetry.logger(__name__)

_ENTRIES_PER_READ = 64


class RedisFindings:
    def __init__(
        self,
        url: str,
        take: TakeUpdates,
        metrics: telemetry.Metrics,
        signer: Signer | None = None,
        consumer: str = "server",
        fence: Fence = no_fence,
    ) -> None:
        self._client: Redis = open_client(url, BLOCK_SECONDS + ANSWER_SECONDS)
        self._take = take
        self._metrics = metrics
        self._signer = signer
        outage = RedisOutage("reading findings", url, metrics.bus_errors)
        self._reader = StreamReader(
            self._client, wire.FINDINGS, self._take_entries, metrics, outage,
            loop="finding reader", consumer=consumer, most=_ENTRIES_PER_READ, fence=fence,
        )  # fmt: skip
        self._log_limit = LogLimit()

    async def run(self) -> None:
        await self._reader.run()

    async def close(self) -> None:
        await self._client.aclose()

    async def _take_entries(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        updates = [update for entry in entries if (update := self._update_in(entry)) is not None]
        if updates:
            await self._pass_on(updates)
        ids = [entry for entry, _ in entries]
        pipeline = self._client.pipeline(transaction=True)
        pipeline.xack(wire.FINDINGS, GROUP, *ids)
        pipeline.xdel(wire.FINDINGS, *ids)
        await pipeline.execute()

    async def _pass_on(self, updates: list[FindingUpdate]) -> None:
        """Pass on all updates together, or else one by one, so that a bad one stops no other."""
        try:
            await self._take(updates)
        except StoreUnavailable:
            raise
        except Exception as error:  # If it left this method, the entry would be read again and again.
            if len(updates) > 1:
                for update in updates:
                    await self._pass_on([update])
                return
            self._metrics.loop_errors.labels(loop="finding reader").inc()
            self._note_refused(
                "unreadable", updates[0].finding.id.encode(), f"it cannot be kept: {error!r}"[:200], error
            )

    def _update_in(self, entry: Entry) -> FindingUpdate | None:
        entry_id, fields = entry
        try:
            if fields is None or sum(map(len, fields.values())) > wire.LARGEST_UPDATE:
                raise EnvelopeError("it is too large, or was taken away")
            raw = fields.get(wire.FIELD, b"")
            update = finding_codec.decode(raw)
            if self._signer is not None:
                self._signer.verify(raw, signatures_of(fields), node_identity(update.node))
        except BadSignature as error:
            self._note_refused("signature", entry_id, f"it {error}")
        except EnvelopeError as error:
            self._note_refused("unreadable", entry_id, str(error)[:200])
        else:
            return update
        return None

    def _note_refused(self, reason: str, entry: bytes, why: str, unexpected: Exception | None = None) -> None:
        self._metrics.refused_messages.labels(reason=reason).inc()
        if self._log_limit.lets_through():
            others = {"others": "are only counted, for a minute"} if self._log_limit.is_last else {}
            log.warning(
                "refusing finding", entry=entry.decode(errors="replace"), why=why, exc_info=unexpected, **others
            )
