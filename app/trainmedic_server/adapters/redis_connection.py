"""Clients of Redis, and its outages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from prometheus_client import Counter
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from structlog.stdlib import BoundLogger

from trainmedic.wire.backoff import Backoff
from trainmedic.wire.connection import (
    ANSWER_SECONDS,
    NO_MORE_CLIENTS,
    UNUSABLE,
    client_options,
    fault_of_options,
    takes_no_clients,
)
from trainmedic.wire.redis_faults import explained, unreachable
from trainmedic.wire.redis_url import behind_sentinels
from trainmedic.wire.redis_url_check import check_redis_url
from trainmedic_server import errors, telemetry

log = telemetry.logger(__name__)

FAULTS = (RedisError, OSError, asyncio.TimeoutError)
_CLOSING_MESSAGE_SECONDS = 1.0  # To read Redis's last message from a closed connection.
_AGAIN_SECONDS = 1.0  # Pause of a loop after a failure that is no outage of Redis.
_CLOSED_TRANSPORT = "unable to perform operation on <"  # Beginning of uvloop's message.


def open_client(url: str, answer_seconds: float = ANSWER_SECONDS) -> Redis:
    """Return a client that connects on first use and never retries.

    Raises ConfigurationError, without the URL, which may contain a password.
    """
    try:
        check_redis_url(url)
    except ValueError as error:
        raise errors.ConfigurationError(f"the Redis URL (--redis, TRAINMEDIC_REDIS_URL) {error}") from None
    try:
        client = _client(url, {"retry": Retry(NoBackoff(), 0), **client_options(url, answer_seconds)})
        pool = client.connection_pool
        pool.connection_class = type("Connection", (_PackedAtOnce, _ReadsLastMessage, pool.connection_class), {})
        first = pool.connection_class(**pool.connection_kwargs)  # Only this reads the URL's options.
        if hasattr(first, "driver_info"):
            # Otherwise redis-py reads its version from the package's metadata for each connection.
            pool.connection_kwargs["driver_info"] = first.driver_info
    except UNUSABLE as error:
        reason = fault_of_options(url, error)
        raise errors.ConfigurationError(f"the Redis URL (--redis, TRAINMEDIC_REDIS_URL) {reason}") from None
    return client


def _client(url: str, options: Mapping[str, Any]) -> Redis:
    behind = behind_sentinels(url)
    if behind is None:
        client: Redis = Redis.from_url(url, **options)
        return client
    asked = {**options, **behind.sentinel_options}
    sentinels = _BriefSentinels(behind.sentinels, sentinel_kwargs=asked)  # type: ignore[no-untyped-call]
    master: Redis = sentinels.master_for(behind.master, **{**options, **behind.options})
    return master


class _PackedAtOnce:
    """Packs pipelines three times as fast as redis-py."""

    def pack_commands(self, commands: Iterable[Sequence[Any]]) -> list[bytes]:
        """A name of several words (``XGROUP CREATE``) is several arguments."""
        pieces: list[bytes] = []
        for name, *others in commands:
            arguments = [*name.split(), *others]
            pieces.append(b"*%d\r\n" % len(arguments))
            for argument in arguments:
                raw = argument if isinstance(argument, bytes) else str(argument).encode()
                pieces.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
        return [b"".join(pieces)]


class _ReadsLastMessage:
    """Reports Redis's last message if it closes before a command, as at its client limit."""

    _reader: asyncio.StreamReader | None

    async def send_packed_command(self, *arguments: Any, **options: Any) -> None:
        reader = self._reader
        try:
            await super().send_packed_command(*arguments, **options)  # type: ignore[misc]
        except (RedisConnectionError, OSError) as error:
            if not (message := await _closing_message(reader)):
                raise
            raise RedisConnectionError(message) from error
        except RuntimeError as error:
            if not str(error).startswith(_CLOSED_TRANSPORT):
                raise
            raise RedisConnectionError(await _closing_message(reader) or "the connection was closed") from error


async def _closing_message(reader: asyncio.StreamReader | None) -> str:
    if reader is None:
        return ""
    # The stored exception hides data received before. It was reported already, and nothing else reads here.
    reader.set_exception(None)  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(_CLOSING_MESSAGE_SECONDS):
            line = await reader.readline()
    except (OSError, ValueError):  # reset, or a line without an end
        return ""
    return line[1:].decode(errors="replace").strip() if line.startswith(b"-") else ""


class _BriefSentinels(Sentinel):
    """Closes connections to Sentinels after each answer. Concurrent calls share one query."""

    _asking: asyncio.Task[Any] | None = None

    async def discover_master(self, service_name: str) -> Any:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(service_name))
        return await asyncio.shield(self._asking)

    async def _ask(self, service_name: str) -> Any:
        try:
            return await super().discover_master(service_name)
        finally:
            for sentinel in self.sentinels:
                await sentinel.connection_pool.disconnect()


def without_password(url: str) -> str:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


class RedisOutage:
    """Outage of one activity: counts faults, logs each reason once, and the recovery."""

    def __init__(self, activity: str, url: str, faults: Counter) -> None:
        self._activity = activity
        self._whole_url = url  # With the password, to explain faults.
        self._url = without_password(url)
        self._faults = faults
        self._backoff = new_backoff()
        self.is_on = False
        self.reason: errors.BusExplained | None = None  # Of the current outage; None if unexplained.
        self.refusal: errors.BusExplained | None = None
        """Set if Redis refuses a needed command although it answers."""
        self._logged: set[str] = set()

    def begin(self, error: BaseException) -> float:
        """Return the seconds to wait before the next call."""
        self.count()
        translated = unavailable(error, self._whole_url)
        self.reason = translated if isinstance(translated, errors.BusExplained) else None
        reason = NO_MORE_CLIENTS if takes_no_clients(error) else str(self.reason or type(error).__name__)
        if not self.is_on or (self.reason is not None and reason not in self._logged):
            log.warning("Redis is unavailable; trying again", during=self._activity, redis=self._url, error=reason)
            self._logged.add(reason)
        self.is_on = True
        return self._backoff.next()

    def count(self) -> None:
        self._faults.inc()

    def note_refusal(self, error: BaseException) -> str:
        """Record that Redis refuses a command. Return the reason without the command's content."""
        self.count()
        translated = unavailable(error, self._whole_url)
        self.refusal = translated if isinstance(translated, errors.BusExplained) else None
        # Otherwise only the first word: Redis may repeat the command's content after it.
        return str(self.refusal or str(error).partition(" ")[0])

    def end(self) -> None:
        if self.is_on:
            self.is_on = False
            self.reason = None
            self._logged.clear()
            self._backoff.reset()
            log.info("Redis has recovered", during=self._activity, redis=self._url)


@contextlib.asynccontextmanager
async def tried_again(
    log: BoundLogger, outage: RedisOutage, metrics: telemetry.Metrics, loop: str, waits: str, failed: str, **about: str
) -> AsyncIterator[None]:
    """Log a failure within, and return when to try again."""
    try:
        yield
    except FAULTS as error:
        await asyncio.sleep(outage.begin(error))
    except errors.StoreUnavailable as error:  # The store is unavailable, or the fence: another server is the leader.
        log.warning(waits, **about, reason=str(error))
        await asyncio.sleep(_AGAIN_SECONDS)
    except Exception:  # A connection can fail in ways for which redis-py has no error.
        metrics.loop_errors.labels(loop=loop).inc()
        log.exception(failed, **about)
        await asyncio.sleep(_AGAIN_SECONDS)


def new_backoff() -> Backoff:
    return Backoff(0.05, 2.0, jitter=True)


def unavailable(error: BaseException, url: str | None = None) -> errors.BusUnavailable:
    if takes_no_clients(error):
        return _full()
    if explanation := explained(error, url) or unreachable(error):
        # The text goes to clients of the API and into runs, where nothing else names Redis.
        return errors.BusExplained(explanation if "Redis" in explanation else f"Redis: {explanation}")
    return errors.BusUnavailable(f"Redis does not answer ({type(error).__name__})")


def _full() -> errors.BusFull:
    return errors.BusFull(NO_MORE_CLIENTS.replace("it", "Redis", 1))
