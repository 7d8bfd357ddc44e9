"""The ids of the entries in a stream to the server, which grow for ever and which whoever may append can choose.

Redis gives no id below the last one, and none at all after the greatest: one entry with that id, and nobody could
append any more, as long as the stream is there. So where the last id lies ahead of Redis' own clock, the ids begin
anew. Not here: reading the entries. Who calls it: ``redis_inbox`` and ``redis_findings``, every few seconds.
"""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from trainmedic.wire import envelope
from trainmedic_server import telemetry
from trainmedic_server.adapters.redis_outbox import GROUP

_AHEAD_MS = 3600 * 1000
"""Further than a clock that is set right again goes back."""

log = telemetry.logger(__name__)


async def begin_ids_anew(client: Redis, name: str = envelope.REPLIES) -> bool:
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
            return False
        # XSETID is refused where an entry has come in between, which the group then reads.
        pipeline: Any = client.pipeline(transaction=True)
        pipeline.execute_command("XSETID", name, f"{now}-0")
        pipeline.xgroup_setid(name, GROUP, f"{now}-0")
        await pipeline.execute()
    except ResponseError:
        return False
    log.warning("somebody has used up the ids of a stream in Redis; they begin anew", stream=name, last_id=last)
    return True
