"""One background thread's connection to Redis: opened when needed, opened again when it broke.

Who calls it: ``following`` and ``writer``, each with a link of its own. Never the training thread.
"""

from __future__ import annotations

import logging
import random
import threading
from typing import Callable

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

log = logging.getLogger("trainmedic")

FAULTS = (redis.RedisError, OSError)
ANSWER_SECONDS = 5.0
_CONNECT_SECONDS = 2.0
_BACKOFF_FIRST = 0.1
_BACKOFF_LAST = 5.0
# The training's own generator must not be drawn from behind its back: its results would no longer repeat.
_OWN_RANDOM = random.Random()  # noqa: S311


class Away(redis.RedisError):
    """There is no usable URL yet: no server has written one into its state directory."""


class Outage:
    """Whether Redis is away, shared by the threads: one line when it goes, one when it is back."""

    def __init__(self, who: str, meanwhile: str = "training goes on") -> None:
        self._who = who
        self._meanwhile = meanwhile
        self._lock = threading.Lock()
        self._is_on = False

    def begin(self, error: BaseException) -> None:
        with self._lock:
            if not self._is_on:
                self._is_on = True
                reason = str(error) if isinstance(error, Away) else type(error).__name__
                log.warning("%s: no connection to Redis (%s); %s, trying again", self._who, reason, self._meanwhile)

    def end(self) -> None:
        with self._lock:
            if self._is_on:
                self._is_on = False
                log.info("%s: connected to Redis again", self._who)


class Link:
    """A lazily opened client, and how long to wait before the next try."""

    def __init__(self, find_url: Callable[[], str | None], outage: Outage) -> None:
        self._find_url = find_url
        self._outage = outage
        self._client: redis.Redis | None = None
        self._failures = 0

    def client(self) -> redis.Redis:
        """Raises Away where no URL is known; connecting itself happens with the first command."""
        if self._client is None:
            url = self._find_url()
            if url is None:
                raise Away("no URL is set, and no server has left one in its state directory")
            try:
                self._client = open_client(url)
            except (ValueError, TypeError) as error:
                raise Away("what the state directory says is no Redis URL") from error
        return self._client

    def works(self) -> None:
        """A command has just been answered."""
        self._failures = 0
        self._outage.end()

    def broke(self, error: BaseException) -> float:
        """Drop the connection; return the seconds to wait. The URL is looked up anew: it may have changed."""
        self.close()
        self._outage.begin(error)
        self._failures += 1
        longest: float = min(_BACKOFF_LAST, _BACKOFF_FIRST * 2 ** min(self._failures - 1, 10))
        return longest * _OWN_RANDOM.uniform(0.5, 1.0)  # so that thousands of jobs spread out

    def cut(self) -> None:
        """From another thread: end the answer that this link's thread waits for."""
        client = self._client
        if client is not None:
            client.connection_pool.disconnect(inuse_connections=True)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def open_client(url: str) -> redis.Redis:
    """A client that never retries by itself: it does not know what may be repeated."""
    client: redis.Redis = redis.Redis.from_url(
        url,
        protocol=2,
        socket_timeout=ANSWER_SECONDS,
        socket_connect_timeout=_CONNECT_SECONDS,
        socket_keepalive=True,
        retry=Retry(NoBackoff(), 0),
    )
    return client
