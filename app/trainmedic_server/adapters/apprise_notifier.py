"""Messages by Apprise. Notification URLs contain secrets and appear in no log and no error.

A slow service can hold its thread permanently: each has a few daemon threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from msgspec import Struct, field

from trainmedic_server.domain.message import NO_CHANNEL, Severity
from trainmedic_server.errors import ChannelMissing, ConfigurationError, PermanentFailure, TemporaryFailure

if TYPE_CHECKING:
    from apprise import Apprise


_TYPES = {Severity.INFO: "info", Severity.WARNING: "warning", Severity.CRITICAL: "failure"}
_SENDS_WITHIN = 60.0  # Seconds, waiting included.
_MOST_SENDING = 4  # Threads of one service at a time.


class AppriseNotifier:
    """A message that some services received is not repeated."""

    def __init__(self, channels: Mapping[str, Sequence[str]]) -> None:
        for name, urls in channels.items():
            if not urls:
                raise ConfigurationError(f"notification channel {name!r} has no URL")
        self._channels = {name: tuple(urls) for name, urls in channels.items()}
        self._loading = threading.Lock()
        self._loaded: dict[str, _Channel] = {}

    async def notify(
        self, title: str, message: str, to: str | Sequence[str] | None, severity: Severity = Severity.INFO
    ) -> None:
        if not self._channels:
            raise ChannelMissing(NO_CHANNEL)
        chosen = [to] if isinstance(to, str) else to
        names = sorted(self._channels if chosen is None else chosen)
        missing = [name for name in names if name not in self._channels]
        if missing:
            raise ChannelMissing(f"there is no channel {missing[0]!r}; there are: {', '.join(sorted(self._channels))}")
        channels = await asyncio.to_thread(lambda: [self._load(name) for name in names])
        services = [service for channel in channels for service in channel.services]
        reasons = [reason for channel in channels for reason in channel.unusable]
        if reasons and not services:
            raise PermanentFailure("; ".join(reasons))
        outcomes = await asyncio.gather(*(service.send(title, message, _TYPES[severity]) for service in services))
        missed = {service.channel for service, sent in zip(services, outcomes, strict=True) if sent is _Sent.NO}
        unknown = {service.channel for service, sent in zip(services, outcomes, strict=True) if sent is _Sent.UNKNOWN}
        if missed:
            reasons.append(f"could not be sent to {', '.join(sorted(missed))}")
        if unknown:
            reasons.append(
                f"no answer of {', '.join(sorted(unknown))} within {_SENDS_WITHIN:g} s, which may have received it"
            )
        if missed and set(outcomes) == {_Sent.NO}:
            raise TemporaryFailure("; ".join(reasons))
        if reasons:
            if _Sent.YES in outcomes:
                reasons.append("the others received it")
            raise PermanentFailure(f"{'; '.join(reasons)}, so it is not sent again")

    def _load(self, name: str) -> _Channel:
        with self._loading:
            if name not in self._loaded:
                channel = _Channel()
                for number, url in enumerate(self._channels[name], 1):
                    try:
                        channel.services.append(_Service(name, _apprise_of(url, f"URL {number} of channel {name!r}")))
                    except PermanentFailure as error:  # the other URLs still get each message
                        channel.unusable.append(str(error))
                self._loaded[name] = channel
            return self._loaded[name]


class _Channel(Struct):
    services: list[_Service] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)  # Why, by URL.


class _Sent(Enum):
    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


class _Service:
    def __init__(self, channel: str, sender: Apprise) -> None:
        self.channel = channel
        self._sender = sender
        self._turns = asyncio.Semaphore(_MOST_SENDING)

    async def send(self, title: str, message: str, notify_type: str) -> _Sent:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[bool] = loop.create_future()

        def work() -> None:
            sent = False
            try:
                # As text: an alert's text must not become markup, such as a mention of everyone.
                sent = bool(self._sender.notify(message, title, notify_type, body_format="text"))
            finally:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(done, sent)

        def done(sent: bool) -> None:
            self._turns.release()
            if not answered.done():
                answered.set_result(sent)

        is_called = False
        try:
            async with asyncio.timeout(_SENDS_WITHIN):
                await self._turns.acquire()
                try:
                    threading.Thread(target=work, name=f"message to {self.channel}", daemon=True).start()
                except RuntimeError:  # no more threads on this machine
                    self._turns.release()
                    return _Sent.NO
                is_called = True
                return _Sent.YES if await answered else _Sent.NO
        except TimeoutError:
            return _Sent.UNKNOWN if is_called else _Sent.NO


def _apprise_of(url: str, label: str) -> Apprise:
    # Imported here because it takes 0.3 s with its plugins, and most servers never send a message.
    import apprise

    # Its log lines contain URLs.
    logging.getLogger("apprise").disabled = True
    # A redirected POST becomes a GET without the message, whose answer would count. It also leads to an unconfigured
    # destination.
    asset = apprise.AppriseAsset(app_id="Trainmedic", async_mode=False, http_redirects=False)
    service = apprise.Apprise(asset=asset)
    if not service.add(url):
        raise PermanentFailure(f"{label} is not one that Apprise can use")
    return service
