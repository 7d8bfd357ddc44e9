"""The only reader of a consumer group's stream. Undeleted entries are read again first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from trainmedic_server import telemetry
from trainmedic_server.adapters.redis_connection import RedisOutage, tried_again
from trainmedic_server.adapters.redis_outbox import GROUP
from trainmedic_server.ports.fence import Fence

BLOCK_SECONDS = 2.0  # Longest wait of a read for entries.
REREAD_SECONDS = 3 * BLOCK_SECONDS
"""Seconds until unacknowledged entries are read once more: Redis may deliver some to a hanging previous leader until
its blocking read ends.
"""
RESET_IDS_SECONDS = 3.0  # Between checks of the stream's last ID (`_reset_ids`).
_AHEAD_MS = 3600 * 1000  # A last ID that is further ahead of Redis's clock is reset.

Entry = tuple[bytes, dict[bytes, bytes] | None]
"""ID and fields, which are None if the entry was deleted in the meantime."""

log = telemetry.logger(__name__)


class StreamReader:
    """Passes up to `most` entries at a time, or none, to `take`, which has them deleted; if it raises, they stay.

    `consumer` and `fence`: see `RedisBus`. `on_recovery` is called when Redis answers again. `loop`: name in metrics.
    """

    def __init__(
        self,
        client: Redis,
        stream: str,
        take: Callable[[Sequence[Entry]], Awaitable[None]],
        metrics: telemetry.Metrics,
        outage: RedisOutage,
        *,
        loop: str,
        consumer: str,
        most: int,
        fence: Fence,
        on_recovery: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._stream = stream
        self._take = take
        self._metrics = metrics
        self._outage = outage
        self._loop = loop
        self._consumer = consumer
        self._most = most
        self._fence = fence
        self._on_recovery = on_recovery

    async def run(self) -> None:
        while True:
            messages = "leaving entries in Redis for now", "reading a stream failed; trying again"
            async with tried_again(log, self._outage, self._metrics, self._loop, *messages, stream=self._stream):
                await self._follow()

    async def _follow(self) -> None:
        await self._make_group()
        cursor = "0"  # Undeleted entries of earlier deliveries come first.
        clock = asyncio.get_running_loop().time
        reread_at: float | None = clock() + REREAD_SECONDS
        reset_ids_at = clock()
        while True:
            entries = await self._read(cursor)
            if self._outage.is_on:
                self._outage.end()
                self._on_recovery()
            await self._take(entries)
            if cursor != ">":
                cursor = entries[-1][0].decode() if entries else ">"
            elif reread_at is not None and clock() > reread_at:
                cursor, reread_at = "0", None
            if clock() > reset_ids_at:
                await _reset_ids(self._client, self._stream)
                reset_ids_at = clock() + RESET_IDS_SECONDS

    async def _make_group(self) -> None:
        try:
            await self._client.xgroup_create(self._stream, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def _read(self, cursor: str) -> list[Entry]:
        self._fence()
        answer: Any = await self._client.xreadgroup(
            GROUP, self._consumer, {self._stream: cursor}, count=self._most, block=int(BLOCK_SECONDS * 1000)
        )
        return list(answer[0][1]) if answer else []


async def _reset_ids(client: Redis, name: str) -> None:
    """Set back an empty stream's last ID if it is far in the future. Writers choose IDs; the maximum would block the
    stream. Raises errors of the connection.
    """
    seconds, _ = await client.time()
    now = seconds * 1000
    try:
        stream: Any = await client.xinfo_stream(name)
        last = stream["last-generated-id"].decode()
        if stream["length"] or int(last.partition("-")[0]) < now + _AHEAD_MS:
            return
        # XSETID fails if an entry has arrived in between, which the group then reads.
        pipeline: Any = client.pipeline(transaction=True)
        pipeline.execute_command("XSETID", name, f"{now}-0")
        pipeline.xgroup_setid(name, GROUP, f"{now}-0")
        await pipeline.execute()
    except ResponseError:
        return
    log.warning("resetting stream IDs in Redis: another writer used them up", stream=name, last_id=last)
