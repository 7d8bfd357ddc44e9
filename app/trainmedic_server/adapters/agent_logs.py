"""Log lines from the nodes' agents, merged by time. Clocks differ, so close lines may be out of order.

If the caller leaves, agents receive `WITHDRAW` (earlier agents answer ``unsupported``). If a job's nodes are unknown,
up to `MOST_SEARCHED` agents that read logs are asked.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator, Collection, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from trainmedic.wire import envelope
from trainmedic_core import words
from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.domain import log_pages
from trainmedic_logs.domain.log_search import READ, WITHDRAW, FoundLine, LeftOut, LogQuery, left_out, left_out_notes
from trainmedic_server.adapters.foreign_answers import UNREADABLE
from trainmedic_server.errors import LogsUnavailable, NotFound
from trainmedic_server.ports.ending import end_tasks
from trainmedic_server.ports.logs import LogBatch
from trainmedic_server.ports.outside import Clock, CommandBus, final_replies, own_command

BATCH = 500  # lines
PATIENCE = timedelta(seconds=15)  # For one page.
_MOST_NODES_AT_ONCE = 32
_POLL_SECONDS = 2.0
_POLL_SECONDS_PER_NODE = 0.02  # at most 50 nodes a second
_MOST_NAMED = 5  # Nodes in a note.
MOST_SEARCHED = 500  # Nodes asked if those of the job are unknown.
_ASKED_WITHIN = timedelta(seconds=30)  # Of these, nodes not asked by then count as silent.
SEARCH_SECONDS = 60.0


class _NodeAnswer(Struct):
    node: str
    waiting: list[FoundLine] = field(default_factory=list)  # Newest first: the oldest is popped.
    cursor: Sequence[str] | None = None  # Where the agent continues; None for the beginning.
    is_end: bool = False  # True if the agent has no further lines for now.
    silence: str = ""  # Why the node gave no lines.
    is_reported_silent: bool = False  # A note has stated the silence.
    deadline: datetime | None = None  # For the request of the first page, if the job's nodes are unknown.
    ends_at: datetime | None = None  # For all pages; None when following.
    job_files: int | None = None
    """Number of files of the job on the node. None if the agent does not report it."""
    left_out: dict[str, LeftOut] = field(default_factory=dict)  # By attribute that the lines lack.
    notes: set[str] = field(default_factory=set)

    @property
    def wants_more(self) -> bool:
        return not (self.waiting or self.is_end or self.silence)


class AgentLogs:
    def __init__(self, bus: CommandBus, clock: Clock, patience: timedelta = PATIENCE) -> None:
        self._bus = bus
        self._clock = clock
        self._patience = patience
        self._turns = asyncio.Semaphore(_MOST_NODES_AT_ONCE)
        # Separate, so that silent nodes do not delay the others.
        self._turns_of_silent = asyncio.Semaphore(_MOST_NODES_AT_ONCE)

    async def search(self, query: LogQuery, nodes: Collection[str], most: int) -> AsyncGenerator[LogBatch, None]:
        left, last = most, query.since
        answers = self._begin(query, nodes, timedelta(seconds=SEARCH_SECONDS))
        async for batch in self._merged_batches(query, answers):
            lines = batch.lines[:left]
            last = lines[-1].at if lines else last
            if len(batch.lines) > left:
                notes = (*batch.notes, *_left_out_notes(answers), left_out(most, last))
                yield LogBatch(lines, notes)
                return
            left -= len(lines)
            yield batch
        if counted := _left_out_notes(answers):
            yield LogBatch(notes=counted)

    async def follow(self, query: LogQuery, nodes: Collection[str]) -> AsyncGenerator[LogBatch, None]:
        answers = self._begin(query, nodes)
        async for batch in self._merged_batches(query, answers):
            yield batch
        if counted := _left_out_notes(answers):
            yield LogBatch(notes=counted)
        if query.is_search:
            answers = [answer for answer in answers if answer.job_files != 0]
        asking: dict[str, asyncio.Task[list[str]]] = {}  # Requests to silent nodes, not awaited.
        try:
            while not query.is_over(self._clock.now()):
                pause = max(_POLL_SECONDS, _POLL_SECONDS_PER_NODE * len(answers))
                await self._clock.sleep_until(self._clock.now() + timedelta(seconds=pause))
                asked, notes = self._nodes_to_ask(query, answers, asking)
                has_lines = False
                if notes:
                    yield LogBatch(notes=notes)
                async for batch in self._merged_batches(query, asked, is_repeat=True):
                    has_lines = has_lines or bool(batch.lines)
                    yield batch
                if not has_lines:
                    yield LogBatch()
        finally:
            await end_tasks(list(asking.values()))

    def _nodes_to_ask(
        self, query: LogQuery, answers: Iterable[_NodeAnswer], asking: dict[str, asyncio.Task[list[str]]]
    ) -> tuple[list[_NodeAnswer], list[str]]:
        """Return the nodes to ask now, and notes of finished requests. Begin requests to nodes known to be silent."""
        due: list[_NodeAnswer] = []
        notes: list[str] = []
        for answer in answers:
            task = asking.get(answer.node)
            if task is not None and not task.done():
                continue
            if task is not None:
                notes += asking.pop(answer.node).result()
            has_answered = not answer.silence
            answer.is_end, answer.silence = False, ""
            if has_answered or not answer.is_reported_silent:
                due.append(answer)
            else:
                asking[answer.node] = asyncio.create_task(self._ask_node(query, answer, self._turns_of_silent))
        return due, notes

    def _begin(self, query: LogQuery, nodes: Collection[str], lasting: timedelta | None = None) -> list[_NodeAnswer]:
        asked = {query.node} if query.node is not None else set(nodes)
        if not asked:
            raise NotFound(f"the nodes of {query.job} are unknown, so no agent can be asked; name a node")
        now = self._clock.now()
        deadline = now + _ASKED_WITHIN if query.is_search else None  # `is_search`: the job's nodes are unknown.
        ends_at = now + lasting if lasting is not None else None
        asked_now = sorted(asked)[: MOST_SEARCHED if deadline else None]
        return [_NodeAnswer(node, deadline=deadline, ends_at=ends_at) for node in asked_now]

    async def _merged_batches(
        self, query: LogQuery, answers: Sequence[_NodeAnswer], is_repeat: bool = False
    ) -> AsyncGenerator[LogBatch, None]:
        """Ask the nodes and yield their lines in order of time. With `is_repeat`, all may be silent."""
        notes = await self._ask(query, answers)
        if not is_repeat and all(answer.silence for answer in answers):
            raise LogsUnavailable(_missing_lines(answers))
        if not is_repeat and query.is_search:
            if all(answer.job_files == 0 for answer in answers):
                raise NotFound(
                    f"the nodes of {query.job} are unknown, and none of the {_count(answers)} "
                    "whose agents were asked has files of it; name a node"
                )
            if len(answers) == MOST_SEARCHED:
                notes.append(f"only {_count(answers)} were asked for files of {query.job}; name a node to ask another")
        notes += _note_changes(answers)
        heap: list[tuple[datetime, int]] = []
        for number, answer in enumerate(answers):
            if answer.waiting:
                heapq.heappush(heap, (answer.waiting[-1].at, number))
        lines: list[FoundLine] = []
        while heap:
            _, number = heapq.heappop(heap)
            answer = answers[number]
            lines.append(answer.waiting.pop())
            if answer.wants_more:
                notes += await self._ask(query, [answer])
                notes += _note_changes([answer])
            if answer.waiting:
                heapq.heappush(heap, (answer.waiting[-1].at, number))
            if len(lines) >= BATCH:
                yield LogBatch(lines, notes)
                lines, notes = [], []
        if lines or notes:
            yield LogBatch(lines, notes)

    async def _ask(self, query: LogQuery, answers: Iterable[_NodeAnswer]) -> list[str]:
        answered = await asyncio.gather(*(self._ask_node(query, answer, self._turns) for answer in answers))
        return [note for notes in answered for note in notes]

    async def _ask_node(self, query: LogQuery, answer: _NodeAnswer, turns: asyncio.Semaphore) -> list[str]:
        """Read pages until `answer` has lines, is at its end or silent. Return new notes of the agent."""
        notes: list[str] = []
        while answer.wants_more:
            async with turns:
                now = self._clock.now()
                if answer.deadline is not None and now > answer.deadline:
                    answer.silence = "was not asked in time"
                    break
                if answer.ends_at is not None and now >= answer.ends_at:
                    answer.silence = f"its further lines were not read within {SEARCH_SECONDS:g} s"
                    break
                page = await self._page(query, answer, now)
            if page is not None:
                answer.deadline = None
                # The answering node counts, not the one that the lines name.
                lines = [replace(FoundLine.of_json(line), node=answer.node) for line in page["lines"]]
                answer.job_files = page.get("job_files")
                if query.is_search and answer.job_files is None:
                    # An earlier agent does not report whether it has files of the job, so its kernel lines may be
                    # unrelated.
                    lines = [line for line in lines if line.source != "kernel"]
                answer.waiting = lines[::-1]  # The oldest is popped first.
                answer.cursor, answer.is_end = page["cursor"], bool(page["end"])
                for name, counted in page.get("left_out", {}).items():
                    answer.left_out[name] = answer.left_out.get(name, LeftOut()) + LeftOut.of_json(counted)
                fresh = [str(note) for note in page["notes"] if str(note) not in answer.notes]
                answer.notes.update(fresh)
                notes += fresh
        return notes

    async def _page(self, query: LogQuery, answer: _NodeAnswer, now: datetime) -> dict[str, Any] | None:
        cursor = {"cursor": answer.cursor} if answer.cursor is not None else {}
        until = min(now + self._patience, answer.ends_at or now + self._patience)
        target = Target(TargetKind.NODE, node=answer.node)
        about = "a person or program searches the logs of a job"
        command = own_command(READ, target, {**query.to_wire(), **cursor}, about, now, until)
        try:
            reply = next(iter(await final_replies(self._bus, command)), None)
        except asyncio.CancelledError:
            withdrawn = {"command": command.id}
            self._bus.tell(own_command(WITHDRAW, target, withdrawn, "the caller of the search has left", now, until))
            raise
        if reply is None:
            answer.silence = "did not answer"
            return None
        reason = reply.output.get("reason")
        if reply.status != envelope.APPLIED:
            answer.silence = str(reason or reply.status)
            return None
        try:
            return _checked(log_pages.unpacked(reply.output.get("page")))
        except UNREADABLE as error:
            answer.silence = f"its answer cannot be read: {error}"
            return None


def _checked(page: dict[str, Any]) -> dict[str, Any]:
    if not all(isinstance(page.get(name), list) for name in ("lines", "cursor", "notes")) or "end" not in page:
        raise ValueError("it has no lines, cursor, notes or end")
    for line in page["lines"]:
        FoundLine.of_json(line)
    counts = page.get("left_out", {})
    if not isinstance(counts, dict) or not all(isinstance(each, dict) for each in counts.values()):
        raise ValueError("its counts of excluded lines are malformed")
    for each in counts.values():
        LeftOut.of_json(each)
    return page


def _left_out_notes(answers: Sequence[_NodeAnswer]) -> list[str]:
    counts: dict[str, LeftOut] = {}
    for answer in answers:
        for name, each in answer.left_out.items():
            counts[name] = counts.get(name, LeftOut()) + each
        answer.left_out = {}
    return left_out_notes(counts)


def _note_changes(answers: Sequence[_NodeAnswer]) -> list[str]:
    lost = [answer for answer in answers if answer.silence and not answer.is_reported_silent]
    recovered = [answer for answer in answers if answer.is_reported_silent and not answer.silence]
    for answer in (*lost, *recovered):
        answer.is_reported_silent = bool(answer.silence)
    notes = [_missing_lines(lost)] if lost else []
    if recovered:
        named = words.some([answer.node for answer in recovered], _MOST_NAMED)
        notes.append(f"lines of {_count(recovered)} are available again: {named}")
    return notes


def _missing_lines(silent: Sequence[_NodeAnswer]) -> str:
    named = words.some([f"{answer.node}: {answer.silence}" for answer in silent], _MOST_NAMED)
    return f"lines of {_count(silent)} are missing: {named}"


def _count(answers: Sequence[_NodeAnswer]) -> str:
    return words.count(len(answers), "node")
