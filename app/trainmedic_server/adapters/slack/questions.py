"""Messages in Slack, one for each question, edited after any decision."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from msgspec.structs import replace

from trainmedic_server import telemetry
from trainmedic_server.adapters.slack import question_blocks
from trainmedic_server.adapters.slack.people import SlackFile
from trainmedic_server.adapters.slack.web_api import SlackApi
from trainmedic_server.domain.approval import Terms
from trainmedic_server.domain.event_codec import content_of, names
from trainmedic_server.domain.event_kinds import (
    ApprovalEnded,
    ApprovalRequested,
    CancelOrdered,
    Closed,
    QuestionEvent,
    RunApproved,
    RunRejected,
)
from trainmedic_server.domain.run import Event, OperatorOrder, Run, Status, StepState
from trainmedic_server.errors import ChatRefused, ConfigurationError
from trainmedic_server.ports.chat import ShownQuestion
from trainmedic_server.ports.fence import Fence, no_fence
from trainmedic_server.ports.store import History, HistoryFilter, RunStore

LOOK_EVERY = timedelta(minutes=1)  # between calls of `show_waiting`, which retries questions that could not be shown
_MOST_RUNS = 1_000  # of those that wait, the newest
_MOST_PAGES = 20  # of a channel's messages, 200 each

log = telemetry.logger(__name__)


class Asked(NamedTuple):
    run: Run
    step: StepState
    orders: Sequence[OperatorOrder]
    shown: ShownQuestion | None  # None before the posting has begun; without a message ID until it is known.


class SlackQuestions:  # an `engine.event_dispatch.EventListener`
    name = "slack"
    kinds = names(QuestionEvent, RunApproved, RunRejected, ApprovalEnded, CancelOrdered, Closed)
    at_once = 20

    def __init__(
        self,
        api: SlackApi,
        store: RunStore,
        history: History,
        settings: Callable[[], SlackFile],
        external_url: str,
        on_left_out: Callable[[], None],
        fence: Fence = no_fence,
    ) -> None:
        self._api = api
        self._store = store
        self._history = history
        self._settings = settings
        self._external_url = external_url
        self._on_left_out = on_left_out
        self._fence = fence
        self._turn = asyncio.Lock()
        self._reminded = 0  # Newest event with a sent reminder: a repeated `take` sends no second one.

    async def take(self, events: Sequence[Event]) -> None:
        """Raises TemporaryFailure, OutcomeUnknown, StoreUnavailable: the events are taken again."""
        await self.show({event.run_id for event in events if event.run_id is not None})
        for event in events:
            asking = content_of(event)
            if isinstance(asking, QuestionEvent) and event.run_id is not None and (event.seq or 0) > self._reminded:
                await self._remind(event.run_id, asking)
                self._reminded = event.seq or self._reminded

    async def show_waiting(self) -> None:
        runs, _ = await self._history.page(HistoryFilter(status=Status.AWAITING_APPROVAL), _MOST_RUNS, None)
        await self.show({run.id for run in runs})

    async def show(self, run_ids: Collection[str]) -> None:
        async with self._turn:  # Otherwise a click and an event could both post a new question.
            for asked in await self._asked(run_ids):
                try:
                    await self._show_one(*asked)
                except (ChatRefused, ConfigurationError) as error:  # This question fails; the others are shown.
                    self._on_left_out()
                    log.error("cannot show question in Slack", run_id=asked.run.id, error=str(error))

    async def question_of(self, run_id: str, step_id: str) -> tuple[Run, StepState] | None:
        run = await self._store.transact(lambda tx: tx.run(run_id))
        step = (
            next((step for step in run.steps if step.kind == "approve" and step.id == step_id), None) if run else None
        )
        return (run, step) if run is not None and step is not None else None

    async def update_duplicate(self, run_id: str, step_id: str, channel: str, message: str) -> None:
        """Update a duplicate that a kill may have left. Raises as `take`, and ChatRefused."""
        for run, step, orders, shown in await self._asked([run_id]):
            if step.id == step_id and shown is not None and (shown.channel, shown.message) != (channel, message):
                document = question_blocks.message(run, step, orders, self._external_url)
                await self._call("chat.update", {**document, "channel": channel, "ts": message})

    async def _asked(self, run_ids: Collection[str]) -> list[Asked]:
        if not run_ids:
            return []
        runs, orders, shown = await self._store.transact(
            lambda tx: (tx.runs(run_ids), tx.orders_of(run_ids), tx.shown_questions.of_runs(run_ids))
        )
        messages = {(each.run_id, each.step): each for each in shown}

        def asked() -> Iterator[Asked]:
            for run in runs:
                of_run = orders.get(run.id, ())
                for step in run.steps:
                    kept = messages.get((run.id, step.id))
                    if step.kind == "approve" and (kept or question_blocks.is_open(run, step, of_run)):
                        yield Asked(run, step, of_run, kept)

        return list(asked())

    async def _show_one(
        self, run: Run, step: StepState, orders: Sequence[OperatorOrder], kept: ShownQuestion | None
    ) -> None:
        document = question_blocks.message(run, step, orders, self._external_url)
        digest = question_blocks.digest(document)
        if kept is None or not kept.message:
            posted = await self._post_once(run, step, document, kept, question_blocks.is_open(run, step, orders))
            if posted is None:
                return
            kept = posted
            await self._save(kept)
        if kept.shown == digest:
            return
        try:
            await self._call("chat.update", {**document, "channel": kept.channel, "ts": kept.message})
        except ChatRefused as error:  # deleted by a user, for example
            self._on_left_out()
            log.warning("cannot edit Slack message", run_id=run.id, error=str(error))
        await self._save(replace(kept, shown=digest))

    async def _post_once(
        self, run: Run, step: StepState, document: dict[str, Any], intent: ShownQuestion | None, is_open: bool
    ) -> ShownQuestion | None:
        """Persist the intent, then post. After an unknown outcome, search for the earlier message first.

        Return None if there is none and the question is closed.
        """
        if intent is None:
            channel = self._settings().channel_for(Terms.of(step).to)
            intent = ShownQuestion(run.id, step.id, channel, "", "")
            await self._save(intent)
        elif (earlier := await self._find_message(intent, run)) is not None:
            return replace(intent, message=earlier)
        if not is_open:
            return None
        answer = await self._call("chat.postMessage", {**document, "channel": intent.channel})
        return replace(intent, message=str(answer.get("ts", "")), shown=question_blocks.digest(document))

    async def _find_message(self, intent: ShownQuestion, run: Run) -> str | None:
        # A minute earlier, because clocks differ.
        query = {"channel": intent.channel, "oldest": str(int(run.created_at.timestamp()) - 60), "limit": 200}
        question = {"run_id": intent.run_id, "step": intent.step}
        for _ in range(_MOST_PAGES):
            try:
                answer = await self._call("conversations.history", {**query, "include_all_metadata": True})
            except ChatRefused as error:  # A scope is missing, or the channel was deleted.
                log.warning("cannot check whether Slack shows a question already", error=str(error))
                return None
            for message in answer.get("messages", ()):
                about = message.get("metadata") or {}
                if (about.get("event_type"), about.get("event_payload")) == (question_blocks.METADATA, question):
                    return str(message.get("ts", ""))
            query["cursor"] = (answer.get("response_metadata") or {}).get("next_cursor") or ""
            if not query["cursor"]:
                return None
        log.warning("cannot check whether Slack shows a question already", error="the channel has too many messages")
        return None

    async def _save(self, shown: ShownQuestion) -> None:
        await self._store.transact(lambda tx: tx.shown_questions.save(shown))

    async def _remind(self, run_id: str, asking: QuestionEvent) -> None:
        if isinstance(asking, ApprovalRequested) and asking.asked in (None, 1):
            return  # Asked for the first time: the new message is enough.
        for run, step, orders, shown in await self._asked([run_id]):
            if shown is None or step.id != asking.step or not question_blocks.is_open(run, step, orders):
                continue
            text = question_blocks.reminder(run, step, type(asking))
            below = {"thread_ts": shown.message, "reply_broadcast": True, "text": text, "parse": "none"}
            try:
                await self._call("chat.postMessage", {**below, "channel": shown.channel, "unfurl_links": False})
            except ChatRefused as error:
                self._on_left_out()
                log.error("cannot send reminder to Slack", run_id=run.id, error=str(error))

    async def _call(self, method: str, document: dict[str, Any]) -> dict[str, Any]:
        self._fence()
        return await self._api.call(method, document)
