"""Pages of ``logs.read``, packed by ``trainmedic_logs.domain.log_pages``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from trainmedic_agent.errors import CommandInterrupted, CommandRejected
from trainmedic_agent.log_search.searcher import (
    MOST_LINES,
    LogPage,
    LogSearcher,
    Places,
    places_json,
    places_of_json,
)
from trainmedic_logs.domain import log_pages
from trainmedic_logs.domain.log_search import LogQuery


class SearchPages(Struct, frozen=True):
    searcher: LogSearcher

    def page(self, params: Mapping[str, Any], is_stopping: Callable[[], bool]) -> list[str]:
        """Return the page in pieces.

        Raises CommandRejected for an invalid query, CommandInterrupted once `is_stopping` returns true.
        """
        try:
            query = LogQuery.of_wire(params)
            cursor = params.get("cursor")
            places = places_of_json(log_pages.unpacked(cursor)["places"]) if cursor is not None else {}
            most = params.get("most")
            most = most if isinstance(most, int) and 0 < most <= MOST_LINES else MOST_LINES
            while True:
                page = self.searcher.page(query, places, is_stopping, most)
                if is_stopping():
                    raise CommandInterrupted("the search was stopped")
                pieces = _pieces(page)
                if log_pages.fits(pieces) or most == 1:
                    return pieces
                most = max(len(page.lines) // 2, 1)  # too large for an answer: search again for half
        except (ValueError, KeyError) as error:
            raise CommandRejected(f"the query cannot be answered: {error}") from error


def _pieces(page: LogPage) -> list[str]:
    return log_pages.packed(
        {
            "lines": [line.to_json() for line in page.lines],
            "cursor": cursor_of(page.places),
            "end": page.is_end,
            "notes": list(page.notes),
            "left_out": {name: each.to_json() for name, each in page.left_out.items()},
            "job_files": page.job_files,
        }
    )


def cursor_of(places: Places) -> list[str]:
    return log_pages.packed({"places": places_json(places)})
