"""The connection of a process's background threads to Redis: opened when it is needed, and again after it broke.

Redis has room for so many clients, and a fleet has an agent on each node and a process of each job: so all threads of
one of these share a connection, and take turns with it. Who calls it: the threads of ``receiver`` and ``writer``, and
of the agent. The training thread never does. The server, whose connections are asynchronous, uses `client_options`
alone.
"""

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
UNUSABLE = (ValueError, TypeError, AttributeError, redis.RedisError)
"""What redis-py raises for options in a URL that it cannot use."""
ANSWER_SECONDS = 5.0
"""An answer that takes longer counts as a broken connection."""
_CONNECT_SECONDS = 2.0
_FIRST_WAIT = 0.1
_LONGEST_WAIT = 5.0
ROOM_FOR_SERVERS = 64
"""Clients of Redis that agents and jobs leave room for, so that a server which starts anew finds Redis open."""
_WAITS_FOR_ROOM = (10.0, 30.0)
"""Seconds between tries where Redis has no room: any of these, because thousands may wait, and each try takes a
client's place for a moment."""
_MOST_IN_HAND = 1000
"""Commands without an answer that are remembered: most are answered in a moment, few never."""
_REFUSES_ONE_THING = ("OOM", "WRONGTYPE", "NOGROUP", "EXECABORT")
"""First words of Redis, where it refuses one command and the connection is none the worse."""
NO_MORE_CLIENTS = "it takes no more clients: raise its maxclients, and its limit of open files"
_GENERATOR = random.Random()  # noqa: S311 - not the shared one, from which a training draws


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

    def begin(self, connection: object, error: BaseException, url: str | None = None) -> None:
        """Record that a connection to `url` does not work."""
        reason = _reason(error, url)
        with self._lock:
            is_refusal = isinstance(error, (redis.ResponseError, redis.AuthenticationError))
            is_redis_own = is_refusal or takes_no_clients(error)
            is_news = not self._broken or (is_redis_own and reason not in self._logged)
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


class NoRoom(redis.RedisError):
    """Redis has hardly room for more clients, and what is left is the servers'."""


class _Line:
    """A client of Redis that several threads use, one at a time, in the order in which they ask."""

    def __init__(self, find_url: Callable[[], str | None]) -> None:
        self._find_url = find_url
        self._changed = threading.Condition()
        self._given = 0
        self._served = 0
        self.holder: RedisConnection | None = None
        self.users = 0
        self.in_hand: dict[str, float] = {}
        self.answered: set[bytes] = set()
        self.is_ending = False
        self.client: redis.Redis | None = None

    def take(self, holder: RedisConnection) -> None:
        """Wait for one's turn. Not by a lock: who has just given one back would have it again before who waits."""
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
        """The client. Raises NoRedisUrl, NoRoom."""
        if self.client is None:
            url = self._find_url()
            if url is None:
                raise NoRedisUrl("no URL is set, and no server has left one in its state directory")
            try:
                self.client = open_client(url)
            except ValueError as error:
                raise NoRedisUrl(f"the Redis URL that is set, or in the state directory, {error}") from None
            if not self.is_ending:  # the last answers and notices may be lost otherwise
                _leave_room(self.client)
        return self.client

    def drop(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            client.close()


class RedisConnection:
    """One thread's share of a connection, with its own waits before the next try."""

    def __init__(self, find_url: Callable[[], str | None], outage: OutageLog, line: _Line | None = None) -> None:
        self._line = line or _Line(find_url)
        self._is_user = False
        self._find_url = find_url
        self._outage = outage
        self._backoff = Backoff(_FIRST_WAIT, _LONGEST_WAIT, jitter=True)

    def shared(self, outage: OutageLog | None = None) -> RedisConnection:
        """The same connection for another thread."""
        return RedisConnection(self._find_url, outage or self._outage, self._line)

    @contextlib.contextmanager
    def turn(self) -> Iterator[redis.Redis]:
        """The client, for this thread alone while the block lasts; it connects with its first command.

        It is another one after the connection broke for any of the threads. The next client reads the URL again, as it
        may have changed. Raises NoRedisUrl where no URL is known, NoRoom.
        """
        line = self._line
        line.take(self)
        if not self._is_user:
            self._is_user = True
            line.users += 1
        try:
            yield line.opened()
        except Exception as error:
            if not _refuses_one_thing(error):
                line.drop()
            raise
        finally:
            line.give_back()

    def note_command(self, command_id: str) -> None:
        """A command has come by this connection, and its answer will go by it."""
        in_hand = self._line.in_hand
        if len(in_hand) >= _MOST_IN_HAND:
            in_hand.clear()
        in_hand.setdefault(command_id, time.monotonic())  # one that is read again came when it came first

    def note_answer(self, command_id: str) -> None:
        """The final answer to a command was sent."""
        self._line.in_hand.pop(command_id, None)

    def note_answered(self, entry: bytes) -> None:
        """The final replies to a stream entry are made and wait for their turn; with them it goes off the stream."""
        self._line.answered.add(entry)

    def note_taken_off(self, entry: bytes) -> None:
        """A stream entry waits for no replies any more: it is off the stream with them, or they are left out."""
        self._line.answered.discard(entry)

    def is_answered(self, entry: bytes) -> bool:
        """Whether a stream entry is still there only because its replies wait for their turn."""
        return entry in self._line.answered

    def since_command(self, most: float) -> float:
        """Seconds since the last command that came and is not answered; infinite where there is none, or only some that
        came `most` seconds ago."""
        since = time.monotonic() - max(list(self._line.in_hand.values()), default=-math.inf)
        return since if since < most else math.inf

    def succeeded(self) -> None:
        """Redis has just answered a command."""
        self._backoff.reset()
        self._outage.end(self)

    def failed(self, error: BaseException) -> float:
        """Return the seconds to wait before the next try."""
        self._outage.begin(self, error, self._find_url())
        if isinstance(error, (NoRoom, redis.exceptions.MaxConnectionsError)) or takes_no_clients(error):
            return _GENERATOR.uniform(*_WAITS_FOR_ROOM)
        return self._backoff.next()

    def cut(self) -> None:
        """End the answer that this thread waits for, if it does: the process ends. Called from another thread."""
        line = self._line
        line.is_ending = True
        client = line.client
        if client is not None and line.holder is self:
            client.connection_pool.disconnect(inuse_connections=True)

    def close(self) -> None:
        """This thread is done. With the last one the connection ends."""
        self._line.take(self)
        try:
            self._line.users -= self._is_user
            self._is_user = False
            if not self._line.users:
                self._line.drop()
        finally:
            self._line.give_back()


def takes_no_clients(error: BaseException) -> bool:
    """Whether Redis has said that it has no room for another client, which redis-py takes for a broken connection."""
    return "max number of clients" in str(error)


def _refuses_one_thing(error: BaseException) -> bool:
    return isinstance(error, redis.ResponseError) and str(error).startswith(_REFUSES_ONE_THING)


def _leave_room(client: redis.Redis) -> None:
    """Raise NoRoom where Redis says that it has hardly any left. One that does not say has some."""
    try:
        clients: Any = client.info("clients")
        left = int(clients["maxclients"]) - int(clients["connected_clients"])
    except (redis.ResponseError, KeyError, TypeError, ValueError):  # an older Redis, or this user may not ask
        return
    if left < min(ROOM_FOR_SERVERS, int(clients["maxclients"]) // 10):
        raise NoRoom(f"it has room for {left} clients more, which is left to servers")


def open_client(url: str) -> redis.Redis:
    """A client that never retries by itself, because it does not know which command may be repeated.

    It connects when it is first used. Raises ValueError, which says what is wrong with the URL and shows nothing of it.
    """
    check_redis_url(url)
    try:
        return _client(url)
    except UNUSABLE as error:
        raise ValueError(fault_of_options(url, error)) from None


def fault_of_options(url: str, error: Exception) -> str:
    """What redis-py takes for wrong in a URL whose other parts are right, by the error that it raises."""
    name = re.search(r"(?:unexpected keyword argument|Invalid value for) '([a-z_]{1,40})'", str(error))
    if name is None or "@" in url.partition("?")[2]:  # perhaps a ? of a password
        return "has an option behind ? that is not known, or a value that it cannot have"
    fault = "that is not known" if isinstance(error, TypeError) else "with a value that it cannot have"
    return f"has an option behind ? {fault}: {name[1]}"


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
    pool.connection_class(
        **pool.connection_kwargs
    )  # only this reads the options at the URL's end, and refuses wrong ones
    return client


class _BriefSentinels(Sentinel):
    """Sentinels that are asked over a connection that ends with the answer: thousands of clients ask them."""

    def discover_master(self, service_name: str) -> Any:
        """Where the master is. Raises MasterNotFoundError."""
        try:
            return super().discover_master(service_name)  # type: ignore[no-untyped-call]
        finally:
            for sentinel in self.sentinels:
                sentinel.connection_pool.disconnect()


def client_options(url: str, answer_seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    """The options that every client of ours has.

    RESP2 is asked for because every Redis, Valkey and redis-py in use agrees on the shape of its answers.
    """
    options: dict[str, Any] = {"socket_timeout": answer_seconds, "protocol": 2}
    if not url.startswith("unix://"):  # a file is there or not, and has nothing to keep alive
        options.update(socket_connect_timeout=_CONNECT_SECONDS, socket_keepalive=True)
    return options


def _reason(error: BaseException, url: str | None) -> str:
    """A reason that is fit for a log: Redis may repeat what it was sent, a password among it, after its first word."""
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
