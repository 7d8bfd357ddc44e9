"""One background thread's connection to Redis: opened when it is needed, and opened again after it broke.

Who calls it: the threads of ``receiver`` and ``writer``, each with a connection of its own. The training thread
never does. The server, whose connections are asynchronous, uses `client_options` alone.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Callable

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from trainmedic.wire.backoff import Backoff

log = logging.getLogger("trainmedic")

REDIS_ERRORS = (redis.RedisError, OSError)
ANSWER_SECONDS = 5.0
"""An answer that takes longer counts as a broken connection."""
_CONNECT_SECONDS = 2.0
_FIRST_WAIT = 0.1
_LONGEST_WAIT = 5.0


class NoRedisUrl(redis.RedisError):
    """There is no usable URL yet: no server has written one into its state directory."""


class OutageLog:
    """Logs one line when Redis becomes unreachable and one when it is back, for all connections of a process.

    Redis is back when every connection works again. Where Redis answers one connection and refuses another, each
    kind of refusal is logged once.
    """

    def __init__(self, owner: str, meanwhile: str = "training goes on") -> None:
        self._owner = owner
        self._meanwhile = meanwhile
        self._lock = threading.Lock()
        self._broken: set[int] = set()
        self._logged: set[str] = set()

    def begin(self, connection: object, error: BaseException) -> None:
        reason = _reason(error)
        with self._lock:
            is_news = not self._broken or (isinstance(error, redis.ResponseError) and reason not in self._logged)
            self._broken.add(id(connection))
            self._logged.add(reason)
        if is_news:
            unexpected = None if isinstance(error, REDIS_ERRORS) else error
            message = "%s: no connection to Redis (%s); %s, trying again"
            log.warning(message, self._owner, reason, self._meanwhile, exc_info=unexpected)

    def end(self, connection: object) -> None:
        with self._lock:
            if id(connection) not in self._broken:
                return
            self._broken.discard(id(connection))
            if self._broken:
                return
            self._logged.clear()
        log.info("%s: connected to Redis again", self._owner)


class RedisConnection:
    """A client that is opened when it is needed, and how long to wait before the next try."""

    def __init__(self, find_url: Callable[[], str | None], outage: OutageLog) -> None:
        self._find_url = find_url
        self._outage = outage
        self._client: redis.Redis | None = None
        self._backoff = Backoff(_FIRST_WAIT, _LONGEST_WAIT, jitter=True)

    def client(self) -> redis.Redis:
        """The client; it connects with its first command. Raises NoRedisUrl where no URL is known."""
        if self._client is None:
            url = self._find_url()
            if url is None:
                raise NoRedisUrl("no URL is set, and no server has left one in its state directory")
            try:
                self._client = open_client(url)
            except (ValueError, TypeError) as error:
                raise NoRedisUrl("what the state directory says is no Redis URL") from error
        return self._client

    def succeeded(self) -> None:
        """Redis has just answered a command."""
        self._backoff.reset()
        self._outage.end(self)

    def failed(self, error: BaseException) -> float:
        """Drop the client; return the seconds to wait. The next client reads the URL again, as it may have changed."""
        self.close()
        self._outage.begin(self, error)
        return self._backoff.next()

    def cut(self) -> None:
        """End the answer that this connection's thread waits for. Called from another thread."""
        client = self._client
        if client is not None:
            client.connection_pool.disconnect(inuse_connections=True)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def open_client(url: str) -> redis.Redis:
    """A client that never retries by itself, because it does not know which command may be repeated.

    It connects when it is first used. Raises ValueError or TypeError where the URL cannot be read.
    """
    client: redis.Redis = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **client_options(url))
    pool = client.connection_pool
    pool.connection_class(
        **pool.connection_kwargs
    )  # only this reads the options at the URL's end, and refuses wrong ones
    return client


def client_options(url: str, answer_seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    """The options that every client of ours has.

    RESP2 is asked for because every Redis, Valkey and redis-py in use agrees on the shape of its answers.
    """
    options: dict[str, Any] = {"socket_timeout": answer_seconds, "protocol": 2}
    if not url.startswith("unix://"):  # a file is there or not, and has nothing to keep alive
        options.update(socket_connect_timeout=_CONNECT_SECONDS, socket_keepalive=True)
    return options


def _reason(error: BaseException) -> str:
    """A reason that is fit for a log: Redis may repeat what it was sent, a password among it, after its first word."""
    if isinstance(error, NoRedisUrl):
        return str(error)
    name = type(error).__name__
    code = str(error).split(" ", 1)[0] if isinstance(error, redis.ResponseError) else ""
    return f"{name}: {code}" if code.isupper() and code.isalpha() else name
