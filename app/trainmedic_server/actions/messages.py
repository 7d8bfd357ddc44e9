"""Telling people: the action ``notify``.

Not here: the channels and how they are reached (a `ports.Notifier`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict, Field

from trainmedic_server.domain.target import TargetKind
from trainmedic_server.errors import OutcomeUnknown, PermanentFailure
from trainmedic_server.ports.actions import Action, Call, Services

TITLE_LIMIT = 250
MESSAGE_LIMIT = 16_000
"""Characters. What is longer is cut, not refused: the people must hear of it all the same."""


class NotifyParams(BaseModel):
    """What is sent, and to which channel."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    message: str = Field(min_length=1, description="What people are told.")
    title: str = Field("Trainmedic", description="The line above it.")
    to: str | None = Field(None, description="The name of a notification channel; all channels without it.")


class Notify:
    """Sends a message once. What cannot be known to have been sent is told, not sent twice."""

    name: ClassVar[str] = "notify"
    summary: ClassVar[str] = "Tell people, through the notification channels that the server knows."
    targets: ClassVar[frozenset[TargetKind]] = frozenset(TargetKind)
    harmful: ClassVar[bool] = False
    default_timeout: ClassVar[timedelta] = timedelta(seconds=30)
    Params: ClassVar[type[BaseModel]] = NotifyParams

    def __init__(self, services: Services) -> None:
        self._clock = services.clock
        self._notifier = services.notifier

    async def perform(self, call: Call) -> Mapping[str, Any]:
        params = cast(NotifyParams, call.params)
        if self._notifier is None:
            raise PermanentFailure("no notification channel is configured")
        if call.resumed:
            raise OutcomeUnknown("the message may or may not have been sent before the server stopped")
        try:
            async with asyncio.timeout((call.deadline - self._clock.now()).total_seconds()):
                await self._notifier.notify(
                    _cut(params.title, TITLE_LIMIT), _cut(params.message, MESSAGE_LIMIT), params.to
                )
        except TimeoutError as error:
            raise OutcomeUnknown("sending the message took too long; it may or may not have been sent") from error
        return {"to": params.to or "all"}

    def outcome_saved(self, command_id: str) -> None:
        """Nothing is held for it."""

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> None:
        """A message cannot be taken back."""


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


ACTIONS: tuple[type[Action], ...] = (Notify,)
