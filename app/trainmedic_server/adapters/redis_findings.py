"""The one reader of ``trainmedic:findings``.

It reads as a member of a consumer group, a few entries at a time, and hands the genuine ones on. An entry is taken off
the stream once what it says is durable; what was delivered and not taken off is read again first.

Who calls it: ``wiring`` runs it. Not here: what the entries mean (``engine.finding_intake``).
"""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from trainmedic.wire import findings as wire
from trainmedic.wire.connection import ANSWER_SECONDS
from trainmedic.wire.envelope import EnvelopeError
from trainmedic.wire.log_limit import LogLimit
from trainmedic.wire.signing import BadSignature, Signer, node_identity, signatures_of
from trainmedic_server import telemetry
from trainmedic_server.adapters.redis_connection import FAULTS, RedisOutage, open_client
from trainmedic_server.adapters.redis_inbox import BLOCK_SECONDS, IDS_SECONDS, REREAD_SECONDS
from trainmedic_server.adapters.redis_outbox import GROUP
from trainmedic_server.adapters.redis_reply_ids import begin_ids_anew
from trainmedic_server.domain import finding_codec
from trainmedic_server.domain.finding_codec import FindingUpdate
from trainmedic_server.errors import StoreUnavailable
from trainmedic_server.ports.fence import Fence, no_fence
from trainmedic_server.ports.findings import TakeUpdates

log = telemetry.logger(__name__)

_ENTRIES_PER_READ = 64
"""Few, for each may have an excerpt of a quarter of a megabyte."""
_AGAIN_SECONDS = 1.0
"""The wait after the store did not take what was read."""

Entry = tuple[bytes, dict[bytes, bytes] | None]


class RedisFindings:
    """Reads findings, and hands those that are genuine to ``take``. ``signer`` is None where no key is in use.

    ``consumer`` must stay the same over restarts, and for each of several servers, because Redis delivers what was not
    acknowledged to the same name again. ``fence`` is called before anything is read, and does not return if this server
    is no longer the leader.
    """

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
        self._consumer = consumer
        self._fence = fence
        self._outage = RedisOutage("reading findings", url, metrics.bus_errors)
        self._log_limit = LogLimit()

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            try:
                await self._follow()
            except FAULTS as error:
                await asyncio.sleep(self._outage.begin(error))
            except StoreUnavailable as error:  # the store, or the fence: they stay in the stream
                log.warning("findings are left in Redis for now", reason=str(error))
                await asyncio.sleep(_AGAIN_SECONDS)
            except Exception:  # the loop's boundary: a connection can die in ways redis-py has no name for
                self._metrics.loop_errors.labels(loop="finding reader").inc()
                log.exception("reading findings failed; trying again")
                await asyncio.sleep(_AGAIN_SECONDS)

    async def close(self) -> None:
        await self._client.aclose()

    async def _follow(self) -> None:
        await self._make_group()
        cursor = "0"  # entries that were delivered before and not taken off, from the first one
        clock = asyncio.get_running_loop().time
        reread_at: float | None = clock() + REREAD_SECONDS
        look_at_ids_at = clock()
        while True:
            entries = await self._read(cursor)
            self._outage.end()
            if entries:
                await self._hand_on(entries)
            if cursor != ">":
                cursor = entries[-1][0].decode() if entries else ">"
            elif reread_at is not None and clock() > reread_at:
                cursor, reread_at = "0", None
            if clock() > look_at_ids_at:
                await begin_ids_anew(self._client, wire.FINDINGS)
                look_at_ids_at = clock() + IDS_SECONDS

    async def _make_group(self) -> None:
        try:
            await self._client.xgroup_create(wire.FINDINGS, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def _read(self, cursor: str) -> list[Entry]:
        self._fence()
        answer: Any = await self._client.xreadgroup(
            GROUP, self._consumer, {wire.FINDINGS: cursor}, count=_ENTRIES_PER_READ, block=int(BLOCK_SECONDS * 1000)
        )
        return list(answer[0][1]) if answer else []

    async def _hand_on(self, entries: list[Entry]) -> None:
        """Have what is genuine taken, and take all of them off the stream."""
        updates = [update for entry in entries if (update := self._update_in(entry)) is not None]
        if updates:
            await self._have_taken(updates)
        ids = [entry for entry, _ in entries]
        pipeline = self._client.pipeline(transaction=True)
        pipeline.xack(wire.FINDINGS, GROUP, *ids)
        pipeline.xdel(wire.FINDINGS, *ids)
        await pipeline.execute()

    async def _have_taken(self, updates: list[FindingUpdate]) -> None:
        """Have all of them taken. Where one cannot be, the others are, so that nobody keeps the others out by it."""
        try:
            await self._take(updates)
        except StoreUnavailable:
            raise
        except Exception as error:  # whatever is wrong with one of them, it must not come back for ever
            if len(updates) > 1:
                for update in updates:
                    await self._have_taken([update])
                return
            self._metrics.loop_errors.labels(loop="finding reader").inc()
            self._note_refused("unreadable", updates[0].finding.id.encode(), f"it cannot be kept: {error!r}"[:200])

    def _update_in(self, entry: Entry) -> FindingUpdate | None:
        """What the entry says; None where it is not genuine, or no finding."""
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

    def _note_refused(self, reason: str, entry: bytes, why: str) -> None:
        """Count a message that is refused, and log it if not too many were logged already."""
        self._metrics.refused_messages.labels(reason=reason).inc()
        if self._log_limit.lets_through():
            others = {"others": "are only counted, for a minute"} if self._log_limit.is_last else {}
            log.warning("a finding is refused", entry=entry.decode(errors="replace"), why=why, **others)
