"""Connection of a process's background threads to Redis, shared in turns because Redis's clients are limited."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import re
import threading
import time
from typing import Any, Callable, Iterator

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from trainmedic.wire.backoff import Backoff
from trainmedic.wire.redis_faults import explained, unreachable
from trainmedic.wire.redis_url import behind_sentinels
from trainmedic.wire.redis_url_check import check_redis_url

log = logging.getLogger("trainmedic")

REDIS_ERRORS = (redis.RedisError, OSError)
UNUSABLE = (ValueError, TypeError, AttributeError, redis.RedisError)  # raised by redis-py for options of a URL
ANSWER_SECONDS = 5.0  # limit of each read and write
_CONNECT_SECONDS = 2.0  # limit of opening a connection
_FIRST_WAIT = 0.1  # seconds, at most, from the first failure to the next try; each further failure doubles it
_LONGEST_WAIT = 5.0  # most seconds between two tries
ROOM_FOR_SERVERS = 64  # clients that agents and jobs leave free for servers
_WAITS_FOR_ROOM = (10.0, 30.0)  # random seconds between tries while Redis is full
_MOST_UNANSWERED = 1000  # unanswered commands whose times are known; one more clears them all
# Errors that leave the connection intact. redis-py removes the first word of those that it has a class for.
_INTACT_AFTER = (redis.exceptions.OutOfMemoryError, redis.exceptions.ExecAbortError)
_INTACT_AFTER_WORD = ("WRONGTYPE ", "NOGROUP ")
NO_MORE_CLIENTS = "it takes no more clients: raise its maxclients, and its limit of open files"
_GENERATOR = random.Random()  # noqa: S311 - not the shared one, from which a training draws


class NoRedisUrl(redis.RedisError):
    """No usable URL is set, or written by a server to its state directory."""


class OutageLog:
    """One log line when Redis becomes unreachable, one when every connection has recovered, and one per kind of
    refusal.
    """

    def __init__(self, owner: str, meanwhile: str = "training continues") -> None:
        self._owner = owner
        self._meanwhile = meanwhile
        self._lock = threading.Lock()
        self._broken: set[int] = set()
        self._logged: set[str] = set()

    def begin(self, connection: object, error: BaseException, url: str | None = None) -> None:
        reason = _reason(error, url)
        with self._lock:
            is_refusal = isinstance(error, (redis.ResponseError, redis.AuthenticationError))
            is_redis_own = is_refusal or takes_no_clients(error)
            is_unexpected = not isinstance(error, REDIS_ERRORS)  # a fault of ours, or an answer in an unknown shape
            is_news = not self._broken or ((is_redis_own or is_unexpected) and reason not in self._logged)
            self._broken.add(id(connection))
            self._logged.add(reason)
        if is_news and is_unexpected:
            message = "%s: an unexpected error in messages with Redis (%s); %s, trying again"
            log.error(message, self._owner, reason, self._meanwhile, exc_info=error)
        elif is_news:
            log.warning("%s: no connection to Redis (%s); %s, trying again", self._owner, reason, self._meanwhile)

    def end(self, connection: object) -> None:
        with self._lock:
            if id(connection) not in self._broken:
                return
            self._broken.discard(id(connection))
            if self._broken:
                return
            self._logged.clear()
        log.info("%s: connected to Redis again", self._owner)


class NoRoom(redis.RedisError):
    """Redis has no client slots left except those reserved for servers."""


class _SharedClient:
    """Client that several connections use in turns."""

    def __init__(self, find_url: Callable[[], str | None]) -> None:
        self._find_url = find_url
        self._changed = threading.Condition()
        # Number of turns requested, and of turns that have ended.
        self._given = 0
        self._served = 0
        self.holder: RedisConnection | None = None
        self.users = 0  # connections that have had a turn; the last one to close drops the client
        self.unanswered: dict[str, float] = {}  # time.monotonic() of unanswered commands, by ID
        self.answered: set[bytes] = set()  # see `RedisConnection.answered`
        self.is_ending = False
        self.client: redis.Redis | None = None

    def take(self, holder: RedisConnection) -> None:
        """Wait for a turn in fair order."""
        with self._changed:
            ticket = self._given
            self._given += 1
            self._changed.wait_for(lambda: ticket == self._served)
            self.holder = holder

    def give_back(self) -> None:
        with self._changed:
            self.holder = None
            self._served += 1
            self._changed.notify_all()

    def opened(self) -> redis.Redis:
        if self.client is None:
            url = self._find_url()
            if url is None:
                raise NoRedisUrl("no URL is set, and no server has left one in its state directory")
            try:
                self.client = open_client(url)
            except ValueError as error:
                raise NoRedisUrl(f"the Redis URL that is set, or in the state directory, {error}") from None
            if not self.is_ending:  # the last answers and notices may take a slot reserved for servers
                _check_room(self.client)
        return self.client

    def drop(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            client.close()


class RedisConnection:  # one thread's use of the client
    def __init__(
        self, find_url: Callable[[], str | None], outage: OutageLog, shared_client: _SharedClient | None = None
    ) -> None:
        self._shared_client = shared_client or _SharedClient(find_url)
        self._is_user = False
        self._find_url = find_url
        self._outage = outage
        self._backoff = Backoff(_FIRST_WAIT, _LONGEST_WAIT, jitter=True)

    def shared(self, outage: OutageLog | None = None) -> RedisConnection:
        # For another thread; both use one client in turns.
        return RedisConnection(self._find_url, outage or self._outage, self._shared_client)

    @contextlib.contextmanager
    def turn(self) -> Iterator[redis.Redis]:
        """Yield the client for this thread's exclusive use.

        After a break it is a new client with a reread URL. Raises NoRedisUrl, NoRoom.
        """
        shared = self._shared_client
        shared.take(self)
        if not self._is_user:
            self._is_user = True
            shared.users += 1
        try:
            yield shared.opened()
        except Exception as error:
            if not _leaves_connection_intact(error):
                shared.drop()
            raise
        finally:
            shared.give_back()

    def note_command(self, command_id: str) -> None:
        unanswered = self._shared_client.unanswered
        if len(unanswered) >= _MOST_UNANSWERED:
            unanswered.clear()
        unanswered.setdefault(command_id, time.monotonic())  # a repeated read keeps the time of the first

    def note_command_answered(self, command_id: str) -> None:
        self._shared_client.unanswered.pop(command_id, None)

    @property
    def answered(self) -> set[bytes]:
        """Stream entries whose replies are queued, and that are still on the stream."""
        return self._shared_client.answered

    def since_command(self, most: float) -> float:
        """Return seconds since the newest unanswered command; infinite from `most` on."""
        since = time.monotonic() - max(list(self._shared_client.unanswered.values()), default=-math.inf)
        return since if since < most else math.inf

    def succeeded(self) -> None:
        self._backoff.reset()
        self._outage.end(self)

    def failed(self, error: BaseException) -> float:
        """Log a new outage; return the seconds to wait."""
        self._outage.begin(self, error, self._find_url())
        if isinstance(error, (NoRoom, redis.exceptions.MaxConnectionsError)) or takes_no_clients(error):
            return _GENERATOR.uniform(*_WAITS_FOR_ROOM)
        return self._backoff.next()

    def cut(self) -> None:
        """Interrupt a read of the thread that uses this connection, as the process ends."""
        shared = self._shared_client
        shared.is_ending = True
        client = shared.client
        if client is not None and shared.holder is self:
            client.connection_pool.disconnect(inuse_connections=True)

    def close(self) -> None:
        self._shared_client.take(self)
        try:
            self._shared_client.users -= self._is_user
            self._is_user = False
            if not self._shared_client.users:
                self._shared_client.drop()
        finally:
            self._shared_client.give_back()


def takes_no_clients(error: BaseException) -> bool:
    return "max number of clients" in str(error)


def redis_text(error: BaseException) -> str:
    # In a transaction, redis-py puts the command before it, which may hold any text.
    return str(error).rpartition(" of pipeline caused error: ")[2]


def _leaves_connection_intact(error: BaseException) -> bool:
    if isinstance(error, _INTACT_AFTER):
        return True
    return isinstance(error, redis.ResponseError) and redis_text(error).startswith(_INTACT_AFTER_WORD)


def _check_room(client: redis.Redis) -> None:
    try:
        clients: Any = client.info("clients")
        left = int(clients["maxclients"]) - int(clients["connected_clients"])
    except (redis.ResponseError, KeyError, TypeError, ValueError):  # an older Redis, or a user without this permission
        return
    if left < min(ROOM_FOR_SERVERS, int(clients["maxclients"]) // 10):  # of a small Redis, a tenth
        raise NoRoom(f"it has {left} free client slots, which are reserved for servers")


def open_client(url: str) -> redis.Redis:
    """Return a client that connects on first use and never retries.

    Raises ValueError that shows no part of the URL.
    """
    check_redis_url(url)
    try:
        return _client(url)
    except UNUSABLE as error:
        raise ValueError(fault_of_options(url, error)) from None


def fault_of_options(url: str, error: Exception) -> str:
    name = re.search(r"(?:unexpected keyword argument|Invalid value for) '([a-z_]{1,40})'", str(error))
    if name is None or "@" in url.partition("?")[2]:  # perhaps the ? belongs to a password
        return "has an unknown option after ?, or one with an invalid value"
    fault = "an unknown option after ?" if isinstance(error, TypeError) else "an option after ? with an invalid value"
    return f"has {fault}: {name[1]}"


def _client(url: str) -> redis.Redis:
    options = {"retry": Retry(NoBackoff(), 0), **client_options(url)}
    behind = behind_sentinels(url)
    client: redis.Redis
    if behind is None:
        client = redis.Redis.from_url(url, **options)
    else:
        asked = options | behind.sentinel_options
        sentinels = _BriefSentinels(behind.sentinels, sentinel_kwargs=asked)  # type: ignore[no-untyped-call]
        client = sentinels.master_for(behind.master, **options | behind.options)  # type: ignore[no-untyped-call]
    pool = client.connection_pool
    pool.connection_class(**pool.connection_kwargs)  # redis-py reads and checks the URL's options only here
    return client


class _BriefSentinels(Sentinel):
    """Sentinels with a connection for each query."""

    def discover_master(self, service_name: str) -> Any:
        try:
            return super().discover_master(service_name)  # type: ignore[no-untyped-call]
        finally:
            for sentinel in self.sentinels:
                sentinel.connection_pool.disconnect()


def client_options(url: str, answer_seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    """Return every client's options: RESP2, on whose answers all versions agree."""
    options: dict[str, Any] = {"socket_timeout": answer_seconds, "protocol": 2}
    if not url.startswith("unix://"):  # sockets in files need no keepalive
        options.update(socket_connect_timeout=_CONNECT_SECONDS, socket_keepalive=True)
    return options


def _reason(error: BaseException, url: str | None) -> str:
    """Return a reason without Redis's text, which may repeat a password."""
    if isinstance(error, (NoRedisUrl, NoRoom)):
        return str(error)
    if isinstance(error, (redis.exceptions.MovedError, redis.exceptions.ClusterDownError)):
        return "it is part of a Redis Cluster, which is not supported"
    if takes_no_clients(error):
        return NO_MORE_CLIENTS
    if explanation := explained(error, url) or unreachable(error):
        return explanation
    name = type(error).__name__
    code = str(error).split(" ", 1)[0] if isinstance(error, redis.ResponseError) else ""
    return f"{name}: {code}" if code.isupper() and code.isalpha() else name
