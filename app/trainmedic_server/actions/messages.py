"""Action ``notify``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar, cast

from pydantic import BaseModel, Field

from trainmedic_server.actions.base import ActionParams, BasicAction, Irreversible
from trainmedic_server.domain import links
from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.component import component_of
from trainmedic_server.domain.message import NO_CHANNEL, Severity
from trainmedic_server.domain.message_routes import NOTIFY
from trainmedic_server.errors import ChannelMissing, NotSetUp, OutcomeUnknown
from trainmedic_server.ports.actions import Action, Call

TITLE_LIMIT = 250  # characters
MESSAGE_LIMIT = 16_000  # characters


class NotifyParams(ActionParams):
    message: str = Field(min_length=1, description="Text of the message.")
    title: str = Field("Trainmedic", description="Title line.")
    severity: Severity | None = Field(
        None, description="Severity shown. By default the alert's label severity, otherwise warning."
    )
    to: str | None = Field(
        None,
        description="Name of a notification channel. By default the channels whose routes match the message; all "
        "channels if no routes are set.",
    )


class Notify(Irreversible, BasicAction):
    """Sent at most once: after a restart or timeout the outcome is unknown. Without the channel the step is skipped."""

    name: ClassVar[str] = "notify"
    summary: ClassVar[str] = "Send a message through the server's notification channels."
    harmful: ClassVar[bool] = False
    leaves_results: ClassVar[bool] = True
    default_timeout: ClassVar[timedelta] = timedelta(seconds=30)
    Params: ClassVar[type[BaseModel]] = NotifyParams

    async def perform(self, call: Call) -> Mapping[str, Any]:
        params = cast(NotifyParams, call.params)
        notifier = self.services.notifier
        if notifier is None:
            raise NotSetUp(f"not sent: {NO_CHANNEL}")
        if call.resumed:
            raise OutcomeUnknown("the message may or may not have been sent before the server stopped")
        severity = params.severity or _severity_of(call.alert)
        to = params.to or self._chosen_channels(call, severity)
        try:
            async with asyncio.timeout((call.deadline - self.services.clock.now()).total_seconds()):
                await notifier.notify(
                    _shortened(params.title, TITLE_LIMIT), self._with_handle(params.message, call), to, severity
                )
        except ChannelMissing as error:
            raise NotSetUp(f"not sent: {error}") from error
        except TimeoutError as error:
            raise OutcomeUnknown("sending the message took too long; it may or may not have been sent") from error
        return {"to": (to if isinstance(to, str) else ", ".join(to)) if to else "all"}

    def _chosen_channels(self, call: Call, severity: Severity) -> tuple[str, ...] | None:
        """Return None for all channels if no routes are set."""
        routes = self.services.routes
        if not routes.are_set:
            return None
        component = component_of(call.alert.every_label, call.playbook, call.target)
        return routes.choose(component, severity, NOTIFY).names

    def _with_handle(self, message: str, call: Call) -> str:
        link = links.run_link(self.services.external_url, call.run_id)
        handle = f"run {links.short_id(call.run_id)}{f' · {link}' if link else ''}"
        return f"{_shortened(message, MESSAGE_LIMIT - len(handle) - 1)}\n{handle}"


def _severity_of(alert: Alert) -> Severity:
    label = alert.labels.get("severity", "").lower()
    return Severity(label) if label in list(Severity) else Severity.WARNING


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


ACTIONS: tuple[type[Action], ...] = (Notify,)
