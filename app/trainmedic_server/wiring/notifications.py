"""Assembly of notification channels, messages, and approvals in Slack."""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Callable, Sequence

from trainmedic_core.problems import FileProblem
from trainmedic_server import telemetry
from trainmedic_server.adapters.apprise_notifier import AppriseNotifier
from trainmedic_server.adapters.sql_store import postgresql
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.api.channels import ChannelsApi
from trainmedic_server.domain.message import NO_CHANNEL
from trainmedic_server.domain.missing_channels import unset_channels
from trainmedic_server.engine import loops
from trainmedic_server.engine.event_dispatch import EventDispatcher
from trainmedic_server.engine.message_delivery import MessageDelivery
from trainmedic_server.engine.service import Engine
from trainmedic_server.errors import ConfigurationError
from trainmedic_server.ports.outside import Clock, Notifier
from trainmedic_server.ports.playbooks import Catalog
from trainmedic_server.settings.server import ServerSettings
from trainmedic_server.wiring.background import Loop

log = telemetry.logger(__name__)


def notifier_of(settings: ServerSettings) -> AppriseNotifier | None:
    settings.message_rules, settings.routes  # noqa: B018  # read for their checks
    channels = {name: tuple(url.get_secret_value() for url in urls) for name, urls in settings.notify_urls.items()}
    return AppriseNotifier(channels) if channels else None


def channels_of(settings: ServerSettings, store: SqlStore, notifier: Notifier | None, clock: Clock) -> ChannelsApi:
    services = {name: [_kind(url.get_secret_value()) for url in urls] for name, urls in settings.notify_urls.items()}
    return ChannelsApi(store, clock, services, settings.message_rules, notifier, settings.routes)


def _kind(url: str) -> str:  # the service, such as slack, without the secrets after it
    kind, colon, _ = url.partition("://")
    return kind if colon and kind.isascii() and kind.isalnum() and len(kind) <= 20 else "unknown"


def name_among_several(settings: ServerSettings) -> str | None:
    """Return this server's name in messages. None if it shares no database with other servers."""
    if not postgresql.is_postgresql(settings.database_url):
        return None
    return settings.advertise or platform.node()


def missing_channels(settings: ServerSettings) -> str:
    """Return a sentence if there is no channel, or if routes need a missing default channel. Otherwise empty."""
    return settings.routes.caveat if settings.notify_urls else NO_CHANNEL


def warn_of_missing_channels(settings: ServerSettings, catalog: Catalog) -> None:
    unset = unset_channels((compiled.definition for compiled in catalog.all()), settings.notify_urls)
    if unset:
        log.warning("playbooks notify channels that are not set", why=unset)
    if caveat := settings.routes.caveat:
        log.warning("no default channel for messages", why=caveat)


async def message_loops(
    settings: ServerSettings,
    store: SqlStore,
    notifier: Notifier | None,
    clock: Clock,
    metrics: telemetry.Metrics,
    problems: Callable[[], Sequence[FileProblem]],
) -> list[Loop]:
    if notifier is None:
        return []
    delivery = MessageDelivery(
        store,
        store,
        notifier,
        clock,
        metrics,
        settings.message_rules,
        settings.routes,
        external_url=settings.external_url,
        problems=problems,
        fence=store.fence,
    )
    await delivery.begin()
    return [(delivery.run(), "messages")]


def slack_loops(
    settings: ServerSettings,
    store: SqlStore,
    engine: Engine,
    metrics: telemetry.Metrics,
    stack: contextlib.AsyncExitStack,
) -> list[Loop]:
    if settings.slack is None:
        return []
    # Imported here, because it is an extra, and most servers have none.
    try:
        from trainmedic_server.adapters.slack.socket_mode import SocketMode
    except ImportError as error:
        raise ConfigurationError(
            "--slack needs the extra slack of trainmedic-server (docs/how-to/install.md#extras)"
        ) from error
    from trainmedic_server.adapters.slack import people
    from trainmedic_server.adapters.slack.button_clicks import SlackButtonClicks
    from trainmedic_server.adapters.slack.questions import LOOK_EVERY, SlackQuestions
    from trainmedic_server.adapters.slack.web_api import SlackApi

    read = functools.partial(people.read, settings.slack)
    api = SlackApi(read().api, *settings.slack_tokens())
    stack.push_async_callback(api.close)
    left_out = metrics.slack_left_out.inc
    questions = SlackQuestions(api, store, store, read, settings.external_url, left_out, store.fence)
    clicks = SlackButtonClicks(
        api, engine, questions, read, lambda outcome: metrics.slack_presses.labels(outcome).inc()
    )
    socket = SocketMode(api.open_socket, clicks.handle, metrics.slack_connected.set)
    dispatcher = EventDispatcher(store, store, questions, metrics)
    waiting = "waiting questions in Slack"
    return [
        (dispatcher.run(), "questions in Slack"),
        # Again and again, because a channel that refused a message may take it by now.
        (loops.repeat(questions.show_waiting, LOOK_EVERY, waiting, metrics), waiting),
        (socket.run(), "presses in Slack"),
    ]
