"""Lookup of job log lines, from node agents or a log store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from typing import Protocol

from msgspec import Struct, field

from trainmedic_logs.domain.log_search import FoundLine, LogQuery


class LogBatch(Struct, frozen=True):
    lines: Sequence[FoundLine] = field(default=())
    notes: Sequence[str] = field(default=())  # Sentences about silent sources and omitted lines.


class LogSource(Protocol):
    def search(self, query: LogQuery, nodes: Collection[str], most: int) -> AsyncIterator[LogBatch]:
        """Yield matching lines in batches, oldest first, at most `most`; notes report more lines and partial failures.

        `nodes` are those where the job ran or, with `LogQuery.is_search`, may have files. A store needs only the first,
        for kernel lines. Raises LogsUnavailable if nothing can be read, NotFound without required nodes,
        LogQueryRefused.
        """
        ...

    def follow(self, query: LogQuery, nodes: Collection[str]) -> AsyncIterator[LogBatch]:
        """Like `search`, then yield new lines until `LogQuery.is_over`. An empty batch is a sign of life.

        A note reports when a source stops or resumes answering. Lines of different nodes may be out of order.
        """
        ...
