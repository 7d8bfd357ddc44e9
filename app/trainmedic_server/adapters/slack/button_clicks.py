"""Operator commands from clicks on Slack buttons.

Only Slack's user ID is trusted. An answer counts only for the question that the message showed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from trainmedic_core.plain_text import visible
from trainmedic_server import errors, telemetry
from trainmedic_server.adapters.slack import question_blocks
from trainmedic_server.adapters.slack.people import Person, SlackFile
from trainmedic_server.adapters.slack.question_blocks import MessageId, RunQuestion
from trainmedic_server.adapters.slack.questions import SlackQuestions
from trainmedic_server.adapters.slack.web_api import SlackApi
from trainmedic_server.domain.approval import AskedQuestion
from trainmedic_server.domain.run import OrderKind, Run

log = telemetry.logger(__name__)

Payload = Mapping[str, Any]
_LONGEST_NOTICE = 1_000  # characters


class Orders(Protocol):  # of `engine.service.Engine`
    async def order(
        self,
        run_id: str,
        kind: OrderKind,
        actor: str,
        note: str = "",
        groups: frozenset[str] = frozenset(),
        question: AskedQuestion | None = None,
    ) -> Run: ...


class SlackButtonClicks:
    def __init__(
        self,
        api: SlackApi,
        orders: Orders,
        questions: SlackQuestions,
        settings: Callable[[], SlackFile],
        count: Callable[[str], object],
    ) -> None:
        self._api = api
        self._orders = orders
        self._questions = questions
        self._settings = settings
        self._count = count  # Counts clicks in the metrics, by outcome.

    async def handle(self, payload: Payload) -> None:
        match payload.get("type"):
            case "block_actions":
                for action in _members(payload.get("actions"))[:1]:
                    await self._handle_button(payload, action)
            case "view_submission":
                await self._handle_form(payload)
            case _:
                self._count("ignored")

    async def _handle_button(self, payload: Payload, action: Payload) -> None:
        action_id = action.get("action_id")
        if action_id not in (question_blocks.APPROVE, question_blocks.REJECT):
            return  # the button that opens the run's page
        container = _member(payload, "container")
        at = MessageId(str(container.get("channel_id", "")), str(container.get("message_ts", "")))
        asked = question_blocks.read_button_value(action.get("value"))
        if asked is None:
            self._count("unreadable")
            log.warning("ignoring Slack click without a question", user=_user(payload))
        elif action_id == question_blocks.APPROVE:
            await self._decide(payload, OrderKind.APPROVE, asked, "", at)
        else:
            await self._ask_why(payload, asked, at)

    async def _ask_why(self, payload: Payload, asked: RunQuestion, at: MessageId) -> None:
        if await self._person(payload, at) is None:
            return
        try:
            asking = await self._questions.question_of(asked.run_id, asked.question.step)
            if asking is None:
                raise errors.NotFound(f"there is no run {asked.run_id} that asks this")
            value = question_blocks.form_metadata(question_blocks.button_value(*asked), at)
            form = question_blocks.reason_form(value, *asking)
            await self._api.call("views.open", {"trigger_id": str(payload.get("trigger_id", "")), "view": form})
        except errors.TrainmedicError as error:
            self._count("failed")
            await self._notify_user(payload, at, f"The form could not be opened: {error}. Press again.")

    async def _handle_form(self, payload: Payload) -> None:
        view = _member(payload, "view")
        read = question_blocks.read_form_metadata(view.get("private_metadata"))
        if view.get("callback_id") != question_blocks.REJECT or read is None:
            self._count("unreadable")
            log.warning("ignoring unknown Slack form", user=_user(payload))
            return
        asked, at = read
        values = _member(_member(view, "state"), "values")
        text = _member(_member(values, question_blocks.REASON), question_blocks.REASON).get("value")
        reason = visible(str(text or "").replace("\0", ""), keep="\n").strip()[: question_blocks.LONGEST_REASON]
        await self._decide(payload, OrderKind.REJECT, asked, reason or "no reason given", at)

    async def _decide(self, payload: Payload, kind: OrderKind, asked: RunQuestion, reason: str, at: MessageId) -> None:
        person = await self._person(payload, at)
        if person is None:
            return
        run_id, question = asked
        note = f"{reason} (in Slack, {_user(payload)})" if reason else f"in Slack, {_user(payload)}"
        try:
            await self._orders.order(run_id, kind, person.name, note, person.groups, question)
        except (errors.NotFound, errors.Conflict, errors.NotEntitled) as error:
            self._count("refused")
            log.info("Slack click refused", by=person.name, user=_user(payload), error=str(error))
            await self._notify_user(payload, at, f"Nothing was done: {error}.")
        except errors.TrainmedicError as error:
            self._count("failed")
            log.warning("cannot perform Slack click", by=person.name, error=str(error))
            await self._notify_user(payload, at, f"It could not be recorded: {error}. Press again.")
        else:
            self._count("decided")
        await self._show(run_id, question, at)

    async def _show(self, run_id: str, question: AskedQuestion, at: MessageId) -> None:
        try:
            await self._questions.show([run_id])
            await self._questions.update_duplicate(run_id, question.step, *at)
        except errors.TrainmedicError as error:
            log.info("Slack shows the decision later", run_id=run_id, error=str(error))

    async def _person(self, payload: Payload, at: MessageId) -> Person | None:
        """Return None after notifying a user who may not decide."""
        user = _user(payload)
        try:
            settings = await asyncio.to_thread(self._settings)
        except errors.ConfigurationError as error:
            self._count("failed")
            log.error("no one can decide in Slack", error=str(error))
            await self._notify_user(payload, at, "Trainmedic cannot read who may decide. Its log says why.")
            return None
        person = settings.people.get(user)
        if person is None:
            self._count("unknown_person")
            log.warning("unknown user clicked in Slack", user=user)
            await self._notify_user(
                payload, at, f"You ({user}) may not decide: Trainmedic's file for Slack does not name you."
            )
        return person

    async def _notify_user(self, payload: Payload, at: MessageId, text: str) -> None:
        notice = {
            "channel": at.channel,
            "user": _user(payload),
            "text": question_blocks.escaped(question_blocks.cut(text, _LONGEST_NOTICE)),
            "parse": "none",
        }
        try:
            await self._api.call("chat.postEphemeral", notice)
        except errors.TrainmedicError as error:
            log.info("cannot notify Slack user", error=str(error))


def _user(payload: Payload) -> str:
    return str(_member(payload, "user").get("id", ""))[:30]


def _member(value: Any, name: str) -> Payload:
    member = value.get(name) if isinstance(value, dict) else None
    return member if isinstance(member, dict) else {}


def _members(value: Any) -> list[Payload]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
