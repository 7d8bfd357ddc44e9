"""Messages to people by Apprise; implements `ports.outside.Notifier`.

A channel is a name and the notification URLs behind it, which hold secrets: none is ever logged or
part of an error. Apprise blocks, so it works in a thread; its services wait some 4 seconds to
connect and 4 for an answer.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainmedic_server.domain.message import NO_CHANNEL, Severity
from trainmedic_server.errors import ChannelMissing, ConfigurationError, PermanentFailure, TemporaryFailure

if TYPE_CHECKING:
    from apprise import Apprise


_TYPES = {Severity.INFO: "info", Severity.WARNING: "warning", Severity.CRITICAL: "failure"}
"""Apprise's words, which its services show as colours or signs."""


class AppriseNotifier:
    """Sends to one channel, to several, or to all.

    What reached only some is not sent again, since those would get it twice; the failure is then a
    permanent one, and names the channels that missed it.
    """

    def __init__(self, channels: Mapping[str, Sequence[str]]) -> None:
        """Raises ConfigurationError where a channel has no URL."""
        for name, urls in channels.items():
            if not urls:
                raise ConfigurationError(f"notification channel {name!r} has no URL")
        self._channels = {name: tuple(urls) for name, urls in channels.items()}
        self._loading = threading.Lock()
        self._loaded: dict[str, tuple[Apprise, ...]] = {}

    async def notify(
        self, title: str, message: str, to: str | Sequence[str] | None, severity: Severity = Severity.INFO
    ) -> None:
        if not self._channels:
            raise ChannelMissing(NO_CHANNEL)
        names = sorted(self._channels if to is None else [to] if isinstance(to, str) else to)
        missing = [name for name in names if name not in self._channels]
        if missing:
            raise ChannelMissing(f"there is no channel {missing[0]!r}; there are: {', '.join(sorted(self._channels))}")
        await asyncio.to_thread(self._send, title, message, names, _TYPES[severity])

    def _send(self, title: str, message: str, names: Sequence[str], notify_type: str) -> None:
        services = [(name, service) for name in names for service in self._load(name)]
        # As text: what an alert says must not become a service's markup, a mention of everyone for example.
        missed = [
            name
            for name, service in services
            if not service.notify(body=message, title=title, notify_type=notify_type, body_format="text")
        ]
        if not missed:
            return
        reason = f"could not be sent to {', '.join(sorted(set(missed)))}"
        if len(missed) == len(services):
            raise TemporaryFailure(reason)
        raise PermanentFailure(f"{reason}; the others have it, so it is not sent again")

    def _load(self, name: str) -> tuple[Apprise, ...]:
        """Return the services behind a channel, each by itself, so that each one's outcome is known."""
        with self._loading:
            if name not in self._loaded:
                self._loaded[name] = tuple(
                    _service(url, f"URL {number} of channel {name!r}")
                    for number, url in enumerate(self._channels[name], 1)
                )
            return self._loaded[name]


def _service(url: str, label: str) -> Apprise:
    # Imported here because it takes 0.1 s, and 0.2 s more to load its plugins: a server is to be
    # ready within a second, and most never send a message.
    import apprise

    # Its log lines contain URLs, whole ones where it cannot read them.
    logging.getLogger("apprise").disabled = True
    service = apprise.Apprise(asset=apprise.AppriseAsset(app_id="Trainmedic", async_mode=False))
    if not service.add(url):
        raise PermanentFailure(f"{label} is not one that Apprise can use")
    return service
