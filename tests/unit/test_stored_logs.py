"""What a reader of a store of logs is told, and shown, when the store goes away in between."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

import pytest
from msgspec.structs import replace

from tests.support.clocks import START, ManualClock
from trainmedic_logs.domain.log_search import FoundLine, LogQuery, left_out
from trainmedic_server.adapters.log_stores.paging import LARGEST_PAGE, StoredLine, StoredLogs, StoredPage, nanoseconds
from trainmedic_server.errors import LogsUnavailable

QUERY = LogQuery("llm-1", START - timedelta(minutes=10))


class Store:
    """One that answers so many more queries, and has the lines that were put into it."""

    greps = True

    def __init__(self) -> None:
        self.lines: list[StoredLine] = []
        self.answers = 1_000
        self.gaps: Sequence[str] = ()
        self.resolution = 1

    def put(self, at: datetime, text: str) -> None:
        self.lines.append(StoredLine(nanoseconds(at), text, FoundLine(at, text, "n1", "training")))

    def parts(self, query: LogQuery, nodes: Collection[str]) -> Sequence[str]:
        return ("all",)

    async def page(self, part: str, query: LogQuery, begin: int, end: int, most: int) -> StoredPage:
        self.answers -= 1
        if self.answers < 0:
            raise LogsUnavailable("the log store does not answer (ConnectError)")
        begin -= begin % self.resolution
        lines = sorted((line for line in self.lines if begin <= line.at < end), key=lambda line: line.identity)
        return StoredPage(lines[:most], self.gaps)


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


async def test_a_search_cut_between_two_pages_names_the_last_line_shown() -> None:
    """The limit is often a multiple of the page."""
    store = Store()
    for second in range(10):
        store.put(START - timedelta(seconds=60 - second), f"line {second}")
    batches = [batch async for batch in StoredLogs(store, ManualClock(), page=4).search(QUERY, (), 4)]
    last = batches[0].lines[-1]
    assert last.text == "line 3"
    assert batches[-1].notes == (left_out(4, last.at),)


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


async def test_a_partial_answer_is_not_shown_as_the_whole() -> None:
    """A search says so once. One that follows reads the missing lines when they are there."""
    store, clock = Store(), ManualClock()
    for second in range(10):
        store.put(START - timedelta(seconds=60 - second), f"line {second}")
    store.gaps = ("1 of 5 shards of the log store failed: lines may be missing",)
    batches = [batch async for batch in StoredLogs(store, clock, page=4).search(QUERY, (), 100)]
    assert [note for batch in batches for note in batch.notes] == list(store.gaps)
    assert sum(len(batch.lines) for batch in batches) == 10
    store.lines.clear()
    batches = [batch async for batch in StoredLogs(store, clock).search(QUERY, (), 100)]
    assert [batch.notes for batch in batches] == [list(store.gaps)], "nor is its emptiness"
    notes, texts = [], []
    async for batch in StoredLogs(store, clock).follow(QUERY, ()):
        texts += [line.text for line in batch.lines]
        notes += batch.notes
        if clock.now() == START + timedelta(seconds=60):
            store.gaps = ()
            store.put(START + timedelta(seconds=10), "of the failed shard")
        if clock.now() >= START + timedelta(seconds=120):
            break
    assert texts == ["of the failed shard"]
    assert notes == ["1 of 5 shards of the log store failed: lines may be missing"]


@pytest.mark.parametrize("resolution", [1, 1_000_000])
async def test_lines_of_one_moment_beyond_the_largest_page_are_not_lost_silently(resolution: int) -> None:
    """Also where the store rounds the times of a query to its own, milliseconds."""
    store, clock = Store(), ManualClock()
    store.resolution = resolution
    moment = START - timedelta(seconds=60)
    for number in range(LARGEST_PAGE + 10):
        store.put(moment, f"line {number:06}")
    store.put(moment + timedelta(seconds=1), "after")
    batches = [batch async for batch in StoredLogs(store, clock).search(QUERY, (), 2 * LARGEST_PAGE)]
    lines = [line.text for batch in batches for line in batch.lines]
    assert (len(lines), lines[-1]) == (LARGEST_PAGE + 1, "after")
    (note,) = [note for batch in batches for note in batch.notes]
    assert note.startswith("at least 5000 lines have the time ")


async def test_the_millisecond_after_a_full_one_that_the_search_begins_in_is_read() -> None:
    store, clock = Store(), ManualClock()
    store.resolution = 1_000_000
    for number in range(LARGEST_PAGE):
        store.put(QUERY.since, f"line {number:06}")
    store.put(QUERY.since + timedelta(milliseconds=1), "after")
    query = replace(QUERY, since=QUERY.since + timedelta(microseconds=500))
    batches = [batch async for batch in StoredLogs(store, clock).search(query, (), 10)]
    assert [line.text for batch in batches for line in batch.lines] == ["after"]
    (note,) = [note for batch in batches for note in batch.notes]
    assert note.startswith("at least 5000 lines have the time ")
