"""At-least-once messages to people, from history events through an outbox.

After a kill, only a message that was being sent is repeated.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta

from trainmedic.wire.backoff import Backoff
from trainmedic_core.problems import FileProblem
from trainmedic_server import errors, telemetry
from trainmedic_server.domain import event_kinds as kinds
from trainmedic_server.domain import links
from trainmedic_server.domain.event_codec import names
from trainmedic_server.domain.message import Message, MessageKind, MessageRule
from trainmedic_server.domain.message_routes import MessageRoutes
from trainmedic_server.domain.run import Event
from trainmedic_server.engine import loops, message_texts
from trainmedic_server.engine.event_dispatch import EventDispatcher
from trainmedic_server.engine.loops import sleeping_by
from trainmedic_server.engine.message_texts import Draft, channels_notified_by
from trainmedic_server.ports.fence import Fence, no_fence
from trainmedic_server.ports.outside import Clock, Notifier
from trainmedic_server.ports.store import History, RunStore, Transaction

MOST_WAITING = 1_000  # Per channel. Older ones are dropped, counted and logged.
GROUP_EVERY = timedelta(minutes=1)  # Minimum time between two texts on one kind and topic to a channel
KEPT_WAITING = timedelta(days=1)  # Age at which a message is no longer stored, or is dropped if it cannot be sent
KEPT = timedelta(days=7)  # Time for which sent messages are remembered, to repeat none
_LOOK_EVERY = timedelta(seconds=2)
_FIRST_RETRY, _LONGEST_RETRY = 5.0, 300.0  # seconds
_CLOSED = names(kinds.Closed)
_TOO_LATE = "not sent for a day"  # the reason after `KEPT_WAITING`
_BROKEN_FOR = timedelta(seconds=30)  # How long a playbook file must be invalid. Saving twice takes less.

log = telemetry.logger(__name__)


class MessageDelivery:
    """Outbox of messages, filled by events."""

    name = "messages"
    kinds = message_texts.KINDS
    at_once = 200  # most events of one `take`

    def __init__(
        self,
        store: RunStore,
        history: History,
        notifier: Notifier,
        clock: Clock,
        metrics: telemetry.Metrics,
        rules: Mapping[MessageKind, MessageRule],
        routes: MessageRoutes,
        *,
        external_url: str = "",
        problems: Callable[[], Sequence[FileProblem]] = tuple,
        fence: Fence = no_fence,
    ) -> None:
        self._store = store
        self._notifier = notifier
        self._clock = clock
        self._metrics = metrics
        self._rules = rules
        self._routes = routes
        self._channels = routes.channels
        self._external_url = external_url
        self._broken = _BrokenPlaybooks(problems)
        self._fence = fence
        self._events = EventDispatcher(store, history, self, metrics, sleeping_by(clock))
        # Channels that may have waiting messages; the store is not queried for others.
        self._may_have_waiting = set(self._channels)
        self._last_sent: dict[tuple[str, str, str], datetime] = {}  # by channel, kind and topic
        # When failed messages are retried, by the same key: a refused message must not delay others.
        self._retries: dict[tuple[str, str, str], tuple[datetime, Backoff]] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._events.run())
            tasks.create_task(self._repeat(self.look_at_playbooks, "messages about playbooks"))
            for channel in self._channels:
                tasks.create_task(self._repeat(functools.partial(self.send, channel), f"messages to {channel}"))

    async def _repeat(self, work: Callable[[], Awaitable[object]], name: str) -> None:
        retries, sleep = Backoff(_FIRST_RETRY, _LONGEST_RETRY), sleeping_by(self._clock)
        await loops.repeat(work, _LOOK_EVERY, name, self._metrics, retries=retries, sleep=sleep)

    # --- from events to messages ----------------------------------------------------------------

    async def begin(self) -> None:
        """Fix the start position: later events are certainly reported. Raises StoreUnavailable."""
        await self._events.begin()

    async def take(self, events: Sequence[Event]) -> None:
        """Store messages on these events; repeats add none."""
        await self._add(lambda tx: self._messages_on(tx, events))

    async def look_at_playbooks(self) -> None:
        """Store a message if a playbook file has been invalid for `_BROKEN_FOR`. A recovery allows its repetition."""
        now = self._clock.now()
        problems = self._broken.to_report(now)
        if self._broken.take_recovery():
            await self._store.transact(lambda tx: tx.messages.forget_sent(MessageKind.PLAYBOOK_BROKEN))
        if problems:
            digest = hashlib.sha256("\n".join(problems).encode()).hexdigest()[:32]
            draft = message_texts.of_broken_playbooks(problems)
            await self._add(
                lambda tx: self._without_known(tx, self._messages_of(draft, f"playbooks/{digest}", now), only_sent=True)
            )
            self._broken.note_reported(problems)

    async def _add(self, make: Callable[[Transaction], Sequence[Message]]) -> None:
        now = self._clock.now()
        given_up = await self._store.transact(lambda tx: _store_messages(tx, make(tx), now))
        self._may_have_waiting.update(self._channels)
        for (channel, why), count in given_up.items():
            self._count_given_up(channel, count, why)

    def _messages_on(self, tx: Transaction, events: Sequence[Event]) -> list[Message]:
        run_ids = {event.run_id for event in events if event.run_id is not None}
        runs = {run.id: run for run in tx.runs(run_ids)} if run_ids else {}
        kinds_sent = dict(tx.messages.kinds_sent(run_ids)) if run_ids else {}
        channels = dict(tx.messages.channels_addressed(run_ids)) if run_ids and self._routes.are_set else {}
        closed = {event.run_id for event in events if event.kind in _CLOSED and event.run_id is not None}
        summaries = _summaries(tx, closed)
        made: list[Message] = []
        for event in events:
            summary = summaries.get(event.run_id or "", "")
            draft = message_texts.draft_of(event, runs.get(event.run_id or ""), kinds_sent, summary)
            if draft is None:
                continue
            run = runs.get(event.run_id or "")
            before = channels.get(event.run_id or "", set()) | (channels_notified_by(run) if run is not None else set())
            messages = self._messages_of(draft, draft.once or f"{event.seq}", event.at, before)
            made += messages
            if messages and draft.run_id is not None and draft.kind is MessageKind.RUN_FAILED:
                # Treat it as sent, so that repeating these events gives the same result.
                kinds_sent.setdefault(draft.run_id, set()).add(draft.kind)
                channels.setdefault(draft.run_id, set()).update(message.channel for message in messages)
        return self._without_known(tx, made)

    def _without_known(self, tx: Transaction, made: Sequence[Message], *, only_sent: bool = False) -> list[Message]:
        """Omit messages that are stored for any channel (`only_sent`: and sent), so that new routes repeat none."""
        # IDs end with the channel (`_messages_of`).
        names = {message.id: message.id.removesuffix(message.channel) for message in made}
        if not names:
            return []
        kept = tx.messages.sent_states(
            [f"{name}{channel}" for name in set(names.values()) for channel in self._channels]
        )
        known = {
            message_id.rpartition("/")[0] + "/" for message_id, is_sent in kept.items() if is_sent or not only_sent
        }
        return [message for message in made if names[message.id] not in known]

    def _channels_for(self, draft: Draft, rule: MessageRule, before: Collection[str]) -> Sequence[str]:
        """`before` are channels with messages on the run."""
        if draft.to is not None and draft.to in self._channels:
            return [draft.to]
        if rule.channels:
            return rule.channels
        chosen = self._routes.choose(draft.component, rule.severity, draft.kind)
        # A follow-up goes where its run was reported, too: its severity may select other channels.
        reported_in = set(before) & set(self._channels) if draft.kind is MessageKind.FOLLOW_UP else set()
        if reported_in:
            return sorted(reported_in | set(chosen.names if chosen.is_taken else ()))
        if not chosen.is_taken:
            self._metrics.messages_unrouted.labels(draft.kind).inc()
        return chosen.names

    def _messages_of(self, draft: Draft, name: str, at: datetime, before: Collection[str] = ()) -> list[Message]:
        rule = self._rules[draft.kind]
        if not rule.is_on:
            return []
        channels = self._channels_for(draft, rule, before)
        link = links.run_link(self._external_url, draft.run_id) if draft.run_id else self._external_url
        return [
            Message(
                id=f"{name}/{draft.kind}/{channel}",
                channel=channel,
                kind=draft.kind,
                severity=rule.severity,
                topic=draft.topic,
                title=draft.title,
                text=draft.text,
                at=at,
                due_at=at + draft.hold,
                run_id=draft.run_id,
                link=link,
            )
            for channel in channels
        ]

    # --- from messages to people ----------------------------------------------------------------

    async def send(self, channel: str) -> int:
        """Send or drop due messages. Return their number. Raises StoreUnavailable."""
        if channel not in self._may_have_waiting:
            return 0
        now = self._clock.now()
        waiting = await self._store.transact(lambda tx: tx.messages.waiting(channel, MOST_WAITING))
        self._metrics.messages_waiting.labels(channel).set(len(waiting))
        if not waiting:
            self._may_have_waiting.discard(channel)
        left = {(message.kind, message.topic) for message in waiting}
        for key in [key for key in self._retries if key[0] == channel and key[1:] not in left]:
            del self._retries[key]
        count = 0
        too_old: list[Message] = []
        for due in self._due(channel, waiting, now):
            try:
                count += await self._send_together(channel, due)
            except errors.TemporaryFailure as error:
                self._note_failure(channel, due[0], error)
                too_old += [message for message in due if message.at < now - KEPT_WAITING]
        await self._give_up(too_old, channel)
        if count:
            await self._store.transact(lambda tx: tx.messages.forget_before(now - KEPT))
        return count

    def _note_failure(self, channel: str, message: Message, error: errors.TemporaryFailure) -> None:
        self._metrics.message_errors.labels(channel).inc()
        key, now = (channel, message.kind, message.topic), self._clock.now()
        is_first = key not in self._retries
        backoff = Backoff(_FIRST_RETRY, _LONGEST_RETRY) if is_first else self._retries[key][1]
        wait = backoff.next()
        self._retries[key] = now + timedelta(seconds=wait), backoff
        if is_first:  # as `loops.repeat` logs an outage
            loop = f"messages to {channel}"
            concerned = {"kind": message.kind, "topic": message.topic}
            log.warning("background loop delayed; retrying", loop=loop, error=str(error), retry_in=wait, **concerned)

    def _due(self, channel: str, waiting: Sequence[Message], now: datetime) -> list[list[Message]]:
        groups: dict[tuple[str, str], list[Message]] = defaultdict(list)
        for message in waiting:
            groups[message.kind, message.topic].append(message)
        due = []
        for (kind, topic), messages in groups.items():
            last = self._last_sent.get((channel, kind, topic))
            ready = [message for message in messages if message.due_at <= now]
            # A later time stems from a wrong clock.
            is_recent = last is not None and last <= now < last + GROUP_EVERY
            retry_at = self._retries[channel, kind, topic][0] if (channel, kind, topic) in self._retries else now
            is_early = now < retry_at <= now + timedelta(seconds=_LONGEST_RETRY)
            if ready and not is_recent and not is_early:
                # Messages that become due very soon are sent in the same text.
                due.append([message for message in messages if message.due_at <= now + message_texts.SOON])
        return due

    async def _send_together(self, channel: str, messages: Sequence[Message]) -> int:
        """Send those not outdated as one text. Return the number of all."""
        over = await self._store.transact(lambda tx: _outdated(tx, messages))
        left = [message for message in messages if message.id not in over]
        kind, ids = messages[0].kind, [message.id for message in left]
        outcome = "sent"
        if left:
            try:
                await self._notify(channel, left)
            except errors.PermanentFailure as error:
                # Do not retry: some services have it, or the failure is permanent.
                outcome = "failed"
                self._metrics.message_errors.labels(channel).inc()
                log.error("cannot send message", channel=channel, kind=kind, error=str(error))
        at, topic = self._clock.now(), messages[0].topic
        if left:
            self._last_sent[channel, kind, topic] = at
        had_failed = self._retries.pop((channel, kind, topic), None) is not None
        if had_failed and left and outcome == "sent":
            log.info("background loop recovered", loop=f"messages to {channel}", kind=kind, topic=topic)

        def work(tx: Transaction) -> None:
            if over:
                tx.messages.drop(over)
            if ids:
                tx.messages.note_sent(ids, at)

        await self._store.transact(work)
        self._metrics.messages.labels(kind, outcome).inc(len(ids))
        self._metrics.messages.labels(kind, "needless").inc(len(over))
        return len(messages)

    async def _give_up(self, messages: Sequence[Message], channel: str) -> None:
        if messages:
            ids = [message.id for message in messages]
            await self._store.transact(lambda tx: tx.messages.drop(ids))
            self._count_given_up(channel, len(ids), _TOO_LATE)

    def _count_given_up(self, channel: str, count: int, why: str) -> None:
        self._metrics.messages.labels("any", "given_up").inc(count)
        log.error("dropped messages", channel=channel, messages=count, why=why)

    async def _notify(self, channel: str, messages: Sequence[Message]) -> None:
        title, text, severity = message_texts.combined(messages, self._clock.now())
        self._fence()
        # No time limit here: only the notifier knows whether a silent service may have the message.
        await self._notifier.notify(title, text or title, channel, severity)


def _summaries(tx: Transaction, run_ids: Collection[str]) -> Mapping[str, str]:
    alerts = tx.alerts_of(run_ids) if run_ids else {}
    return {
        run_id: records[0].alert.annotations.get("summary", "").strip() for run_id, records in alerts.items() if records
    }


def _outdated(tx: Transaction, messages: Sequence[Message]) -> list[str]:
    run_ids = {message.run_id for message in messages if message.run_id is not None}
    if not run_ids:
        return []
    runs = {run.id: run for run in tx.runs(run_ids)}
    refused = messages[0].kind is MessageKind.NOT_STARTED
    alerts = tx.alerts_of(run_ids) if refused else {}
    linked = tx.linked_runs({run.alert for run in runs.values()}) if refused else {}

    def is_over(message: Message) -> bool:
        run = runs.get(message.run_id or "")
        others = linked.get(run.alert, ()) if run is not None else ()
        return message_texts.is_outdated(message, run, alerts.get(message.run_id or "", ()), others)

    return [message.id for message in messages if is_over(message)]


class _BrokenPlaybooks:
    def __init__(self, problems: Callable[[], Sequence[FileProblem]]) -> None:
        self._problems = problems
        self._since: dict[str, datetime] = {}  # first check with each present problem
        self._reported: set[str] = set()
        self._was_free = False  # at the last check: no problems

    def to_report(self, now: datetime) -> list[str]:
        """Return all problems if any must be reported."""
        current = [str(problem) for problem in self._problems()]
        self._since = {problem: self._since.get(problem, now) for problem in current}
        self._reported &= set(current)
        new = {problem: since for problem, since in self._since.items() if problem not in self._reported}
        return current if any(now - since >= _BROKEN_FOR for since in new.values()) else []

    def take_recovery(self) -> bool:
        """Return True at the first check without problems, once per recovery. Call it after `to_report`."""
        was_free, self._was_free = self._was_free, not self._since
        return self._was_free and not was_free

    def note_reported(self, problems: Collection[str]) -> None:
        self._reported |= set(problems)


def _store_messages(tx: Transaction, made: Sequence[Message], now: datetime) -> Mapping[tuple[str, str], int]:
    """Return the number of dropped ones by channel and reason."""
    timely = [message for message in made if message.at > now - KEPT_WAITING]
    tx.messages.add(timely)
    given_up = Counter((message.channel, _TOO_LATE) for message in made if message.at <= now - KEPT_WAITING)
    for channel in {message.channel for message in timely}:
        surplus = tx.messages.count_waiting(channel) - MOST_WAITING
        if surplus > 0:
            tx.messages.drop(tx.messages.oldest_waiting(channel, surplus))
            given_up[channel, "too many waiting"] = surplus
    return given_up
