"""The agent's executor of log searches, with a reader in the same process.

The link between them is a stand-in: it models no frames, no timeouts and no reader that ends. Tests of
``log_link`` have the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from msgspec import Struct

from trainmedic_agent.log_link.agent_end import AgentEnd
from trainmedic_agent.log_link.linked_reading import LinkedSearch
from trainmedic_agent.log_search.search_pages import SearchPages
from trainmedic_agent.log_search.searcher import LogSearcher


class LinkInProcess(Struct):
    """Passes a search to the pages of this process."""

    pages: SearchPages

    def search(self, params: Mapping[str, Any], is_stopping: Callable[[], bool]) -> list[str]:
        return self.pages.page(params, is_stopping)


def search_executor(searcher: LogSearcher) -> LinkedSearch:
    """Return the executor that an agent has, for a searcher of this process."""
    return LinkedSearch(cast(AgentEnd, LinkInProcess(SearchPages(searcher))))
