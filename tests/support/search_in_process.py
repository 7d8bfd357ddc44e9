"""The agent's executor of log searches, with a reader in the same process.

The link between them is a stand-in: it models no frames, no timeouts and no reader that ends. Tests of
``log_link`` have the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import tzinfo
from typing import Any, cast

from msgspec import Struct

from trainmedic_agent.log_link.agent_end import AgentEnd
from trainmedic_agent.log_link.linked_reading import LinkedSearch
from trainmedic_agent.log_opening.node_files import NodeFiles
from trainmedic_agent.log_opening.own_files import OwnFiles
from trainmedic_agent.log_reading.arrivals import ArrivalIndex
from trainmedic_agent.log_reading.discovery import Discovery
from trainmedic_agent.log_reading.log_policy import LogsPolicy
from trainmedic_agent.log_search.searcher import LogSearcher


class LinkInProcess(Struct):
    """Passes a search to the pages of this process."""

    searcher: LogSearcher

    def search(self, params: Mapping[str, Any], is_stopping: Callable[[], bool]) -> list[str]:
        return self.searcher.packed_page(params, is_stopping)


def search_executor(searcher: LogSearcher) -> LinkedSearch:
    """Return the executor that an agent has, for a searcher of this process."""
    return LinkedSearch(cast(AgentEnd, LinkInProcess(searcher)))


def searcher_of(
    policy: LogsPolicy,
    node: str,
    discovery: Discovery | None = None,
    *,
    files: NodeFiles = OwnFiles(),
    arrivals: ArrivalIndex | None = None,
    zone: tzinfo | None = None,
) -> LogSearcher:
    """A searcher that scans by itself, as no reader of this process does."""
    scans = discovery or Discovery(policy, node, files=files)
    return LogSearcher(
        policy, node, lambda stops, seconds: scans.scan((), stops, seconds), arrivals=arrivals, zone=zone, files=files
    )
