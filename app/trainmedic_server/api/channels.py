"""``GET /channels`` and ``POST /channels/{name}/test``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from fastapi import Depends, Request
from msgspec import Struct, field
from pydantic import ConfigDict, Field

from trainmedic_server.api.view import ApiModel, View
from trainmedic_server.auth.auth import Principal
from trainmedic_server.domain.event_codec import recorded
from trainmedic_server.domain.event_kinds import ChannelTested
from trainmedic_server.domain.message import MessageKind, MessageRule
from trainmedic_server.domain.message_routes import MessageRoutes
from trainmedic_server.errors import ActionFailure, Conflict, NotFound
from trainmedic_server.http.api_routes import ApiRoutes, RouteParts
from trainmedic_server.ports.outside import Clock, Notifier
from trainmedic_server.ports.store import RunStore

_SECONDS = 30.0  # for a test message; Apprise's services wait some 8 s


class ChannelsApi(Struct, frozen=True):
    """Configured channels by name, with the kind of each service, such as ``slack``."""

    store: RunStore
    clock: Clock
    services: Mapping[str, Sequence[str]] = field(default_factory=dict)
    rules: Mapping[MessageKind, MessageRule] = field(default_factory=dict)
    notifier: Notifier | None = None
    routes: MessageRoutes = field(default_factory=MessageRoutes)


class ChannelView(View):
    name: str
    services: list[str] = Field(description="The kind of each of its services, from the beginning of its URL.")
    messages: list[MessageKind] = Field(description="Messages that the server sends there by itself.")
    routes: list[str] = Field(
        default_factory=list,
        description="The channel's routes: field:value,value;field:value, `all`, or `default` for messages that no "
        "other channel takes. Empty if no routes are set.",
    )


class ChannelList(View):
    items: list[ChannelView]


class TestBody(ApiModel):
    """Note for the message."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"note": "the room was renamed"}]})

    note: str = Field("", max_length=500, pattern=r"^[^\x00]*$")


class SentTestView(View):
    channel: str
    sent: bool = Field(description="Whether every service of the channel accepted it.")
    detail: str = Field(description="The error; empty on success.")


def router(messaging: ChannelsApi, parts: RouteParts) -> ApiRoutes:
    routes = ApiRoutes("operations", parts.auth)
    turn = asyncio.Lock()

    @routes.read("/channels", summary="Notification channels")
    async def listed() -> ChannelList:
        """Addresses are omitted, because they contain secrets."""
        items = [
            ChannelView(
                name=name,
                services=list(services),
                messages=_kinds_sent_to(name, messaging),
                routes=messaging.routes.described(name),
            )
            for name, services in sorted(messaging.services.items())
        ]
        return ChannelList(items=items)

    @routes.act("/channels/{name}/test", TestBody, 404, 409, summary="Send a test message to a channel")
    async def test(request: Request, name: str, actor: Principal = Depends(routes.operator)) -> SentTestView:
        """Record the sender and the outcome. One test runs at a time."""
        body = await parts.bodies.read_model(request, TestBody)
        if messaging.notifier is None or name not in messaging.services:
            there = ", ".join(sorted(messaging.services)) or "none"
            raise NotFound(f"There is no channel of that name. Known channels: {there}.")
        if turn.locked():
            raise Conflict("Another test message is being sent; try again later.")
        async with turn:
            detail = await _sent(messaging.notifier, name, actor.name, body.note.strip())
        content = ChannelTested(name, not detail, detail)
        event = recorded(content, messaging.clock.now(), actor=actor.name)
        await messaging.store.transact(lambda unit: unit.append([event]))
        return SentTestView(channel=name, sent=not detail, detail=detail)

    return routes


def _kinds_sent_to(name: str, messaging: ChannelsApi) -> list[MessageKind]:
    return [kind for kind, rule in messaging.rules.items() if rule.is_on and _can_get(name, kind, rule, messaging)]


def _can_get(name: str, kind: MessageKind, rule: MessageRule, messaging: ChannelsApi) -> bool:
    routes = messaging.routes
    if rule.channels:
        return name in rule.channels
    return not routes.are_set or routes.may_get(name, kind)


async def _sent(notifier: Notifier, name: str, actor: str, note: str) -> str:
    """Return why it failed, "" on success."""
    text = f"Sent by {actor} to check that messages arrive here. Nothing has happened."
    try:
        async with asyncio.timeout(_SECONDS):
            await notifier.notify("Test message from Trainmedic", f"{text} {note}".strip(), name)
    except TimeoutError:
        return f"no answer within {_SECONDS:g} s"
    except ActionFailure as error:
        return str(error)
    return ""
