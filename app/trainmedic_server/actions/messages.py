"""Telling people: the action ``notify``.

Not here: the channels and how they are reached (a `ports.outside.Notifier`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar, cast

from pydantic import BaseModel, Field

from trainmedic_server.actions.base import ActionParams, BasicAction, Irreversible
from trainmedic_server.errors import OutcomeUnknown, PermanentFailure
from trainmedic_server.ports.actions import Action, Call

TITLE_LIMIT = 250
MESSAGE_LIMIT = 16_000
"""Both in characters. A longer text is cut, not refused, so that the message is sent all the same."""


class NotifyParams(ActionParams):
    """What is sent, and to which channel."""

    message: str = Field(min_length=1, description="What people are told.")
    title: str = Field("Trainmedic", description="The line above it.")
    to: str | None = Field(None, description="The name of a notification channel; all channels without it.")


class Notify(Irreversible, BasicAction):
    """Sends a message once. Where it cannot be known whether it was sent, the step says so and sends nothing again."""

    name: ClassVar[str] = "notify"
    summary: ClassVar[str] = "Tell people, through the notification channels that the server knows."
    harmful: ClassVar[bool] = False
    default_timeout: ClassVar[timedelta] = timedelta(seconds=30)
    Params: ClassVar[type[BaseModel]] = NotifyParams

    async def perform(self, call: Call) -> Mapping[str, Any]:
        params = cast(NotifyParams, call.params)
        notifier = self.services.notifier
        if notifier is None:
            raise PermanentFailure("no notification channel is configured")
        if call.resumed:
            raise OutcomeUnknown("the message may or may not have been sent before the server stopped")
        try:
            async with asyncio.timeout((call.deadline - self.services.clock.now()).total_seconds()):
                await notifier.notify(_cut(params.title, TITLE_LIMIT), _cut(params.message, MESSAGE_LIMIT), params.to)
        except TimeoutError as error:
            raise OutcomeUnknown("sending the message took too long; it may or may not have been sent") from error
        return {"to": params.to or "all"}


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


ACTIONS: tuple[type[Action], ...] = (Notify,)
