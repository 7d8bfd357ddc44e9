"""Where the lines of jobs are looked up: the agents of their nodes, or a store of logs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from typing import Protocol

from msgspec import Struct, field

from trainmedic_logs.domain.log_search import FoundLine, LogQuery


class LogBatch(Struct, frozen=True):
    """Lines that were found, and what their reader should know of the answer."""

    lines: Sequence[FoundLine] = field(default=())
    notes: Sequence[str] = field(default=())
    """Sentences: who has not answered, what was left out."""


class LogSource(Protocol):
    """Looks up lines."""

    def search(self, query: LogQuery, nodes: Collection[str], most: int) -> AsyncIterator[LogBatch]:
        """Yield the lines that answer, oldest first, in batches, `most` of them altogether; where there are more, a
        note says so. `nodes` are those on which the job is known to have run, or with `LogQuery.is_search` those that
        may have files of it; a store needs none.

        What a source cannot read is a note, where others can; LogsUnavailable where nothing can be read, NotFound
        where `nodes` is empty and it needs them, LogQueryRefused where the query makes no sense to it.
        """
        ...

    def follow(self, query: LogQuery, nodes: Collection[str]) -> AsyncIterator[LogBatch]:
        """The same, and then what is new, without an end. A batch without lines is a sign of life. Lines of several
        nodes that arrive late come late. A node that stops answering is a note, and one that answers again."""
        ...
