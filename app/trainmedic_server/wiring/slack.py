"""The parts by which people are asked in Slack, and answer there. Who calls it: ``wiring.server``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Coroutine
from typing import Any

from trainmedic_server import telemetry
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.engine import loops
from trainmedic_server.engine.event_dispatch import EventDispatcher
from trainmedic_server.engine.service import Engine
from trainmedic_server.errors import ConfigurationError
from trainmedic_server.settings.server import ServerSettings


def slack_loops(
    settings: ServerSettings,
    store: SqlStore,
    engine: Engine,
    metrics: telemetry.Metrics,
    stack: contextlib.AsyncExitStack,
) -> list[tuple[Coroutine[Any, Any, None], str]]:
    """The loops to run, each with its name; none where Slack is not set. `stack` closes what they use.

    Raises ConfigurationError.
    """
    if settings.slack is None:
        return []
    # Imported here, because it is an extra, and most servers have none.
    try:
        from trainmedic_server.adapters.slack.socket_mode import SocketMode
    except ImportError as error:
        raise ConfigurationError("--slack needs the extra: pip install 'trainmedic-server[slack]'") from error
    from trainmedic_server.adapters.slack import people
    from trainmedic_server.adapters.slack.button_clicks import SlackButtonClicks
    from trainmedic_server.adapters.slack.questions import LOOK_EVERY, SlackQuestions
    from trainmedic_server.adapters.slack.web_api import SlackApi

    read = functools.partial(people.read, settings.slack)
    api = SlackApi(read().api, *settings.slack_tokens())
    stack.push_async_callback(api.close)
    left_out = metrics.slack_left_out.inc
    questions = SlackQuestions(api, store, store, read, settings.external_url, left_out, store.fence)
    presses = SlackButtonClicks(
        api, engine, questions, read, lambda outcome: metrics.slack_presses.labels(outcome).inc()
    )
    socket = SocketMode(api.open_socket, presses.handle, metrics.slack_connected.set)
    teller = EventDispatcher(store, store, questions, metrics)
    waiting = "waiting questions in Slack"
    return [
        (teller.run(), "questions in Slack"),
        # Again and again, because a channel that refused a message may take it by now.
        (loops.repeat(questions.show_waiting, LOOK_EVERY, waiting, metrics), waiting),
        (socket.run(), "presses in Slack"),
    ]
