"""Paged reading of a log store. Following looks back some seconds for late lines."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from trainmedic_core.expressions.regexes import SearchPattern
from trainmedic_logs.domain.log_search import FoundLine, LogQuery, left_out, written
from trainmedic_server.errors import LogsUnavailable
from trainmedic_server.ports.logs import LogBatch
from trainmedic_server.ports.outside import Clock

PAGE = 1000  # Lines of one request.
LARGEST_PAGE = 5000  # Loki's maximum
_POLL_SECONDS = 2.0
_LATE = timedelta(seconds=15)  # How far following looks back.
_LATE_AFTER_OUTAGE = timedelta(seconds=90)
"""The same after an outage or gaps: agents push again within a minute."""
_MOST_KNOWN = 100_000  # Lines remembered as shown.
_OPTIONAL_FIELDS = ("rank", "local_rank", "node_rank", "attempt")
NANOSECONDS = 1_000_000_000
_MILLISECOND = 1_000_000  # in nanoseconds


class StoredLine(NamedTuple):
    at: int  # Nanoseconds since 1970.
    key: str  # Equal only for copies of a line.
    line: FoundLine

    @property
    def identity(self) -> tuple[int, str]:
        return self.at, self.key


class StoredPage(NamedTuple):
    lines: Sequence[StoredLine]
    gaps: Sequence[str] = ()  # Sentences about lines that may be missing.


class LineStore(Protocol):
    @property
    def greps(self) -> bool:
        """True if the store applies patterns; otherwise the server does."""
        ...

    def parts(self, query: LogQuery, nodes: Collection[str]) -> Sequence[str]:
        """Return queries in the store's language, whose results together answer `query`. `nodes` are those of kernel
        lines, unless `query` names one. Raises LogQueryRefused.
        """
        ...

    async def page(self, part: str, query: LogQuery, begin: int, end: int, most: int) -> StoredPage:
        """Return the first `most` lines of a part in any order. Times are nanoseconds since 1970, `end` is excluded.
        Raises LogsUnavailable, LogQueryRefused.
        """
        ...


class StoredLogs:
    def __init__(self, store: LineStore, clock: Clock, page: int = PAGE) -> None:
        self._store = store
        self._clock = clock
        self._page = page

    async def search(self, query: LogQuery, nodes: Collection[str], most: int) -> AsyncGenerator[LogBatch, None]:
        left, last = most, query.since
        nodes = () if query.is_search else nodes  # Without known nodes of the job, kernel lines are not searched.
        try:
            async for lines, gaps in self._new_lines(query, nodes, self._end(query), set()):
                shown = [each.line for each in lines[:left]]
                last = shown[-1].at if shown else last
                if len(lines) > left:
                    yield LogBatch(shown, (*gaps, left_out(most, last)))
                    return
                left -= len(shown)
                yield LogBatch(shown, gaps)
            asked = [name for name in _OPTIONAL_FIELDS if getattr(query, name) is not None]
            if asked:
                names = " or ".join(name.replace("_", " ") for name in asked)
                yield LogBatch(notes=(f"lines without {names} in the store are excluded",))
        except LogsUnavailable as error:
            if left == most:
                raise
            yield LogBatch(notes=(f"{error}: lines after these are missing",))

    async def follow(self, query: LogQuery, nodes: Collection[str]) -> AsyncGenerator[LogBatch, None]:
        nodes = () if query.is_search else nodes
        shown: set[tuple[int, str]] = set()
        order: deque[tuple[int, str]] = deque()
        begin = look_back_until = query.since  # Until then `begin` stays, and old lines may still arrive.
        is_away = has_answered = False
        noted: Collection[str] = ()  # gaps of the poll before
        while True:
            now = self._clock.now()
            present: set[str] = set()
            try:
                async for lines, gaps in self._new_lines(replace(query, since=begin), nodes, self._end(query), shown):
                    for each in lines:
                        shown.add(each.identity)
                        order.append(each.identity)
                    has_answered = True
                    yield LogBatch([each.line for each in lines], [gap for gap in gaps if gap not in noted])
                    present.update(gaps)
                has_answered = True
                noted = present
                yield LogBatch(notes=("the log store answers again",) if is_away else ())
                is_away = False
            except LogsUnavailable as error:
                if not has_answered:
                    raise
                yield LogBatch(notes=() if is_away else (f"{error}; trying again",))
                is_away, look_back_until = True, now + _LATE_AFTER_OUTAGE
            while len(order) > _MOST_KNOWN:
                shown.discard(order.popleft())
            if query.is_over(now):
                return
            if now > look_back_until:
                begin = max(begin, now - (_LATE_AFTER_OUTAGE if noted else _LATE))
            await self._clock.sleep_until(now + timedelta(seconds=_POLL_SECONDS))

    def _end(self, query: LogQuery) -> int:
        # Five minutes from now: some nodes' clocks are ahead.
        return nanoseconds(query.until or self._clock.now() + timedelta(minutes=5))

    async def _new_lines(
        self, query: LogQuery, nodes: Collection[str], end: int, shown: Collection[tuple[int, str]]
    ) -> AsyncGenerator[tuple[list[StoredLine], Sequence[str]], None]:
        pattern = SearchPattern(query.grep) if query.grep and not self._store.greps else None
        parts = [_PagedPart(self._store, part, query, end, self._page) for part in self._store.parts(query, nodes)]
        noted: set[str] = set()
        while True:
            for part in parts:
                await part.fill()
            gaps = [gap for gap in dict.fromkeys(gap for part in parts for gap in part.gaps) if gap not in noted]
            noted.update(gaps)
            open_parts = [part for part in parts if not part.is_end]
            # A part with more lines can still have one before the later lines of the others.
            horizon = min((part.last for part in open_parts), default=end)
            # A killed shipper may have pushed a line twice, and not every store removes duplicates.
            lines = {each.identity: each for part in parts for each in part.take(horizon, not open_parts)}
            fresh = [lines[each] for each in sorted(lines) if each not in shown]
            if pattern is not None:
                fresh = [each for each in fresh if pattern.search(each.line.text.encode()) is not None]
            if fresh or gaps:
                yield fresh, gaps
            if not open_parts:
                return


class _PagedPart:
    def __init__(self, store: LineStore, part: str, query: LogQuery, end: int, page: int) -> None:
        self._store, self._part, self._query = store, part, query
        self._begin, self._end, self._page = nanoseconds(query.since), end, page  # The next page starts at `_begin`.
        self._seen: set[tuple[int, str]] = set()  # Lines of earlier pages with the time `_begin`.
        self._waiting: list[StoredLine] = []  # Oldest first, until `take`.
        self.gaps: list[str] = []
        self.is_end = False

    @property
    def last(self) -> int:
        return self._waiting[-1].at if self._waiting else self._begin

    async def fill(self) -> None:
        if self._waiting or self.is_end:
            return
        most = self._page
        while True:
            page = await self._store.page(self._part, self._query, self._begin, self._end, most)
            self.gaps += page.gaps
            # By identity: copies, as in a reindexed index, may differ in what they say of the line.
            lines = sorted((each for each in page.lines if each.at >= self._begin), key=lambda line: line.identity)
            self._waiting = [each for each in lines if each.identity not in self._seen]
            self.is_end = len(page.lines) < most
            if self._waiting or self.is_end:
                break
            if most < LARGEST_PAGE:  # More lines of one moment than a page holds.
                most = min(2 * most, LARGEST_PAGE)
            else:
                at = written(moment(self._begin))
                self.gaps.append(f"at least {most} lines have the time {at}; any more are missing")
                if lines:
                    self._begin, self._seen = self._begin + 1, set()
                else:  # A store whose times are milliseconds returns those before `_begin` again.
                    self._begin = (self._begin // _MILLISECOND + 1) * _MILLISECOND
                most = self._page
        if self._waiting:
            # A store may return lines of one moment in another order, so those of earlier pages stay known.
            known = self._seen if self._waiting[-1].at == self._begin else set()
            self._begin = self._waiting[-1].at
            self._seen = known | {each.identity for each in lines if each.at == self._begin}

    def take(self, horizon: int, everything: bool) -> list[StoredLine]:
        taken = [each for each in self._waiting if everything or each.at <= horizon]
        self._waiting = self._waiting[len(taken) :]
        return taken


def nanoseconds(at: datetime) -> int:
    return int((at - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(microseconds=1)) * 1000


def moment(at: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=at // 1000)
