"""One background thread's connection to Redis: opened when needed, opened again when it broke.

Who calls it: ``following`` and ``writer``, each with a link of its own. Never the training thread.
"""

from __future__ import annotations

import logging
import random
import threading
from typing import Any, Callable

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
    """Whether Redis is away, shared by the threads: one line when it goes, one when it is back.

    It is back when it is for all of them. Where Redis answers one and refuses another, that is told once for each
    kind of refusal.
    """

    def __init__(self, who: str, meanwhile: str = "training goes on") -> None:
        self._who = who
        self._meanwhile = meanwhile
        self._lock = threading.Lock()
        self._cut_off: set[int] = set()
        self._told: set[str] = set()

    def begin(self, link: object, error: BaseException) -> None:
        reason = _reason(error)
        with self._lock:
            is_news = not self._cut_off or (isinstance(error, redis.ResponseError) and reason not in self._told)
            self._cut_off.add(id(link))
            self._told.add(reason)
        if is_news:
            unknown = None if isinstance(error, FAULTS) else error
            log.warning(
                "%s: no connection to Redis (%s); %s, trying again",
                self._who,
                reason,
                self._meanwhile,
                exc_info=unknown,
            )

    def end(self, link: object) -> None:
        with self._lock:
            if id(link) not in self._cut_off:
                return
            self._cut_off.discard(id(link))
            if self._cut_off:
                return
            self._told.clear()
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
        self._outage.end(self)

    def broke(self, error: BaseException) -> float:
        """Drop the connection; return the seconds to wait. The URL is looked up anew: it may have changed."""
        self.close()
        self._outage.begin(self, error)
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
    """A client that never retries by itself: it does not know what may be repeated.

    It connects when it is first used. Raises ValueError or TypeError where the URL cannot be read.
    """
    options: dict[str, Any] = {"socket_timeout": ANSWER_SECONDS, "retry": Retry(NoBackoff(), 0), "protocol": 2}
    if not url.startswith("unix://"):  # a file is there or not, and has nothing to keep alive
        options.update(socket_connect_timeout=_CONNECT_SECONDS, socket_keepalive=True)
    client: redis.Redis = redis.Redis.from_url(url, **options)
    pool = client.connection_pool
    pool.connection_class(**pool.connection_kwargs)  # it is this that reads the options at the URL's end
    return client


def _reason(error: BaseException) -> str:
    """Fit for a log: what Redis says may repeat what it was sent, a password among it; its first word does not."""
    if isinstance(error, Away):
        return str(error)
    name = type(error).__name__
    code = str(error).split(" ", 1)[0] if isinstance(error, redis.ResponseError) else ""
    return f"{name}: {code}" if code.isupper() and code.isalpha() else name
