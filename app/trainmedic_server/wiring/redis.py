"""The Redis that the server uses: the one that is set, else the embedded one. Who calls it: ``server``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from trainmedic_server import telemetry
from trainmedic_server.adapters.embedded_redis import EmbeddedRedis
from trainmedic_server.adapters.redis_capacity import RedisCapacity, check_is_no_cluster
from trainmedic_server.settings.server import ServerSettings
from trainmedic_server.wiring.background import background

log = telemetry.logger(__name__)


async def found_redis(
    settings: ServerSettings, stack: contextlib.AsyncExitStack, metrics: telemetry.Metrics
) -> tuple[str, Callable[[], str]]:
    """The URL of the Redis that is set, else of the embedded one, which this starts and `stack` stops; and what to say
    against it. Raises ConfigurationError."""
    if settings.redis is not None:
        url, caveat = settings.redis.get_secret_value(), ""
        await check_is_no_cluster(url)
    else:
        embedded = EmbeddedRedis(settings.state_dir)
        url = await embedded.start()
        stack.push_async_callback(embedded.stop)
        if caveat := embedded.caveat:
            log.warning("the embedded Redis is old", reason=caveat)
    room = RedisCapacity(url, metrics, caveat)
    await stack.enter_async_context(background(room.watch(), "room in Redis"))
    return url, room.caveat
