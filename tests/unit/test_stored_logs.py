"""What a reader of a store of logs is told, and shown, when the store goes away in between."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

import pytest
from msgspec.structs import replace

from tests.support.clocks import START, ManualClock
from trainmedic_logs.domain.log_search import FoundLine, LogQuery
from trainmedic_server.adapters.log_stores.paging import StoredLine, StoredLogs, nanoseconds
from trainmedic_server.errors import LogsUnavailable

QUERY = LogQuery("llm-1", START - timedelta(minutes=10))


class Store:
    """One that answers so many more queries, and has the lines that were put into it."""

    greps = True

    def __init__(self) -> None:
        self.lines: list[StoredLine] = []
        self.answers = 1_000

    def put(self, at: datetime, text: str) -> None:
        self.lines.append(StoredLine(nanoseconds(at), text, FoundLine(at, text, "n1", "training")))

    def parts(self, query: LogQuery, nodes: Collection[str]) -> Sequence[str]:
        return ("all",)

    async def page(self, part: str, query: LogQuery, begin: int, end: int, most: int) -> Sequence[StoredLine]:
        self.answers -= 1
        if self.answers < 0:
            raise LogsUnavailable("the log store does not answer (ConnectError)")
        return sorted((line for line in self.lines if begin <= line.at < end), key=lambda line: line.identity)[:most]


async def test_who_follows_is_told_of_an_outage_and_misses_nothing_that_comes_after_it() -> None:
    """Agents push what was written meanwhile once the store is back, which can be a minute later."""
    store, clock = Store(), ManualClock()
    texts, notes = [], []
    outage = START + timedelta(minutes=1)
    async for batch in StoredLogs(store, clock).follow(QUERY, ()):
        texts += [line.text for line in batch.lines]
        notes += batch.notes
        now = clock.now()
        store.answers = 0 if outage <= now < outage + timedelta(minutes=10) else 1_000
        if now == START:
            store.put(now, "before")
        elif now == outage + timedelta(minutes=11):
            store.put(outage + timedelta(minutes=1), "meanwhile")
        elif now >= outage + timedelta(minutes=12):
            break
    assert texts == ["before", "meanwhile"]
    assert notes == [
        "the log store does not answer (ConnectError); trying again",
        "the log store answers again",
    ]


async def test_who_searches_is_told_where_the_answer_breaks_off() -> None:
    """What was read is shown. Where nothing could be read at all there is no answer, for who follows neither."""
    store, clock = Store(), ManualClock()
    for second in range(10):
        store.put(START - timedelta(seconds=60 - second), f"line {second}")
    store.answers = 1
    logs = StoredLogs(store, clock, page=4)
    batches = [batch async for batch in logs.search(QUERY, (), 100)]
    assert [line.text for batch in batches for line in batch.lines] == ["line 0", "line 1", "line 2", "line 3"]
    assert batches[-1].notes == ("the log store does not answer (ConnectError): lines after these are missing",)
    for answer in (logs.search(QUERY, (), 100), logs.follow(QUERY, ())):
        with pytest.raises(LogsUnavailable):
            await anext(answer)


async def test_copies_of_a_line_that_differ_are_one() -> None:
    """As in an index and its reindexed copy."""
    store = Store()
    store.put(START - timedelta(seconds=1), "x")
    store.lines.append(store.lines[0]._replace(line=replace(store.lines[0].line, node="n2")))
    batches = [batch async for batch in StoredLogs(store, ManualClock()).search(QUERY, (), 100)]
    assert [line.text for batch in batches for line in batch.lines] == ["x"]


async def test_who_follows_until_a_time_is_not_kept_waiting_after_it() -> None:
    """What comes late is still shown."""
    store, clock = Store(), ManualClock()
    store.put(START, "before")
    until = START + timedelta(minutes=1)
    texts = []
    async for batch in StoredLogs(store, clock).follow(replace(QUERY, until=until), ()):
        texts += [line.text for line in batch.lines]
        if clock.now() == until + timedelta(seconds=10):
            store.put(until - timedelta(seconds=1), "late")
    assert texts == ["before", "late"]
    assert clock.now() <= until + timedelta(seconds=20)
