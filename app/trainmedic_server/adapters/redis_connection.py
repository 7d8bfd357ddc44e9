"""How the server connects to Redis: clients from a URL, one log line per outage, errors translated.

Who calls it: the other ``redis_`` adapters. Not here: what is sent.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from prometheus_client import Counter
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from trainmedic_server import errors, telemetry

log = telemetry.logger(__name__)

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 5.0
FAULTS = (RedisError, OSError, asyncio.TimeoutError)
"""What redis-py raises when Redis is away or refuses; it lets some socket errors through as they are."""

_BACKOFF_FIRST = 0.05
_BACKOFF_LAST = 2.0


def open_client(url: str, answer_seconds: float = ANSWER_SECONDS) -> Redis:
    """A client for `url` (``redis://``, ``rediss://`` or ``unix://``); it connects when first used.

    It never retries by itself: the callers know which of their calls may be repeated. RESP2 is
    asked for because every Redis, Valkey and redis-py in use agrees on the shape of its answers.
    Raises ConfigurationError, without the URL, whose password would end up in a log.
    """
    options: dict[str, Any] = {"protocol": 2, "socket_timeout": answer_seconds, "retry": Retry(NoBackoff(), 0)}
    if not url.startswith("unix://"):  # a file is there or not, and has nothing to keep alive
        options.update(socket_connect_timeout=CONNECT_SECONDS, socket_keepalive=True)
    try:
        client: Redis = Redis.from_url(url, **options)
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)  # it is this that reads the options at the URL's end
    except (ValueError, TypeError) as error:
        raise errors.ConfigurationError(
            "the Redis URL cannot be read; it looks like redis://:password@host:6379/0, rediss://… or unix:///path"
        ) from error
    return client


def without_password(url: str) -> str:
    """`url` fit for a log line: scheme, host and database, never user, password or options."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


class Outage:
    """Remembers whether Redis is away, so that each outage makes one line when it begins and one when it ends."""

    def __init__(self, what: str, url: str, faults: Counter) -> None:
        self._what = what
        self._url = without_password(url)
        self._faults = faults
        self._failures = 0

    @property
    def is_on(self) -> bool:
        return self._failures > 0

    def begin(self, error: BaseException) -> float:
        """Count a failure; return how many seconds to wait before the next try."""
        self.count()
        self._failures += 1
        if self._failures == 1:
            log.warning("redis_unavailable", what=self._what, redis=self._url, error=type(error).__name__)
        return backoff(self._failures)

    def count(self) -> None:
        """Count a failure that is not an outage: Redis answers, and refuses one thing."""
        self._faults.inc()

    def end(self) -> None:
        if self._failures:
            self._failures = 0
            log.info("redis_back", what=self._what, redis=self._url)


def backoff(failures: int) -> float:
    """Seconds to wait after the n-th failure in a row: doubling, capped, with jitter so that peers spread out."""
    longest: float = min(_BACKOFF_LAST, _BACKOFF_FIRST * 2 ** min(failures - 1, 10))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - no secret depends on it


def unavailable(error: BaseException) -> errors.BusUnavailable:
    """The error of ours for one of redis-py's."""
    return errors.BusUnavailable(f"Redis does not answer ({type(error).__name__})")
