"""Follows a stream of Redis as the one reader of a consumer group, over outages and kills.

Entries that were delivered to it and not taken off before it was killed, or before its connection broke, are read
again first. Who calls it: ``redis_inbox`` and ``redis_findings``, which say what the entries are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from trainmedic_server import telemetry
from trainmedic_server.adapters.redis_connection import FAULTS, RedisOutage
from trainmedic_server.adapters.redis_outbox import GROUP
from trainmedic_server.errors import StoreUnavailable
from trainmedic_server.ports.fence import Fence

BLOCK_SECONDS = 2.0
REREAD_SECONDS = 3 * BLOCK_SECONDS
"""Seconds after which delivered but unacknowledged entries are read once more.

The previous leader read under the same name. If it hangs, Redis may deliver entries to it until its blocking read
ends, and no other server would read these.
"""
IDS_SECONDS = 3.0
"""Seconds between two looks at the last id of the stream."""
_AHEAD_MS = 3600 * 1000
"""Further than a clock that is set right again goes back."""
_AGAIN_SECONDS = 1.0
"""The wait after what was read was not taken."""

Entry = tuple[bytes, dict[bytes, bytes] | None]
"""The id of an entry and its fields; None where it was taken away meanwhile."""

log = telemetry.logger(__name__)


class StreamReader:
    """Hands what it reads to `take`, up to `most` entries at a time, and nothing now and then. What `take` raises
    leaves them in the stream; it takes them off itself.

    ``consumer`` must stay the same over restarts, and for each of several servers, because Redis delivers what was not
    acknowledged to the same name again. ``fence`` is called before anything is read, and does not return if this server
    is no longer the leader. ``on_back`` is called when Redis answers again. ``loop`` names it in the metrics.
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
        on_back: Callable[[], None] = lambda: None,
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
        self._on_back = on_back

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            try:
                await self._follow()
            except FAULTS as error:
                await asyncio.sleep(self._outage.begin(error))
            except StoreUnavailable as error:  # the store, or the fence, by which another server reads them
                log.warning("entries are left in Redis for now", stream=self._stream, reason=str(error))
                await asyncio.sleep(_AGAIN_SECONDS)
            except Exception:  # the loop's boundary: a connection can die in ways redis-py has no name for
                self._metrics.loop_errors.labels(self._loop).inc()
                log.exception("reading a stream failed; trying again", stream=self._stream)
                await asyncio.sleep(_AGAIN_SECONDS)

    async def _follow(self) -> None:
        await self._make_group()
        cursor = "0"  # entries that were delivered before and not taken off, from the first one
        clock = asyncio.get_running_loop().time
        reread_at: float | None = clock() + REREAD_SECONDS
        look_at_ids_at = clock()
        while True:
            entries = await self._read(cursor)
            if self._outage.is_on:
                self._outage.end()
                self._on_back()
            await self._take(entries)
            if cursor != ">":
                cursor = entries[-1][0].decode() if entries else ">"
            elif reread_at is not None and clock() > reread_at:
                cursor, reread_at = "0", None
            if clock() > look_at_ids_at:
                await _reset_ids(self._client, self._stream)
                look_at_ids_at = clock() + IDS_SECONDS

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
    """Set the last id back to Redis' clock, if it is ahead of it and the stream is empty; return whether it was.

    As long as there are entries the reader is to take them off first: an id below theirs is not possible. May raise
    what redis-py raises.
    """
    seconds, _ = await client.time()
    now = seconds * 1000
    try:
        stream: Any = await client.xinfo_stream(name)
        last = stream["last-generated-id"].decode()
        if stream["length"] or int(last.partition("-")[0]) < now + _AHEAD_MS:
            return
        # XSETID is refused where an entry has come in between, which the group then reads.
        pipeline: Any = client.pipeline(transaction=True)
        pipeline.execute_command("XSETID", name, f"{now}-0")
        pipeline.xgroup_setid(name, GROUP, f"{now}-0")
        await pipeline.execute()
    except ResponseError:
        return
    log.warning("somebody has used up the ids of a stream in Redis; they begin anew", stream=name, last_id=last)
