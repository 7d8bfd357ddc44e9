"""Lines of jobs in memory, searched as the API's port says: for tests of what shows them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field

import re2

from trainmedic_logs.domain.log_search import FoundLine, LogQuery, left_out
from trainmedic_server.ports.logs import LogBatch


@dataclass
class FiledLogs:
    """Searches `lines`, in the order of their times. `notes` come with every answer; `error` in place of one."""

    lines: list[FoundLine] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: Exception | None = None
    asked: list[tuple[LogQuery, int | None]] = field(default_factory=list)
    followers: int = 0
    poll_seconds: float = 0.05

    async def search(self, query: LogQuery, nodes: Collection[str], most: int) -> AsyncGenerator[LogBatch, None]:
        self.asked.append((query, most))
        if self.error is not None:
            raise self.error
        matches = self._matching(query)
        notes = [*self.notes, *([left_out(most, matches[most - 1].at)] if len(matches) > most else [])]
        yield LogBatch(matches[:most], notes)

    async def follow(self, query: LogQuery, nodes: Collection[str]) -> AsyncGenerator[LogBatch, None]:
        self.asked.append((query, None))
        if self.error is not None:
            raise self.error
        self.followers += 1
        try:
            count = 0
            yield LogBatch(notes=self.notes)
            while True:
                matches = self._matching(query)
                yield LogBatch(matches[count:])
                count = len(matches)
                await asyncio.sleep(self.poll_seconds)
        finally:
            self.followers -= 1

    def _matching(self, query: LogQuery) -> list[FoundLine]:
        pattern = re2.compile(query.grep) if query.grep else None
        return sorted(
            (
                line
                for line in self.lines
                if line.job == query.job
                and line.at >= query.since
                and (query.until is None or line.at < query.until)
                and query.rank in (None, line.rank)
                and query.node in (None, line.node)
                and (query.level is None or line.level in query.level.at_least)
                and (query.kernel or line.source != "kernel")
                and (pattern is None or pattern.search(line.text))
            ),
            key=lambda line: line.at,
        )
