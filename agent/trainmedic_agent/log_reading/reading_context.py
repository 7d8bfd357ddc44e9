"""What all parts of reading logs share. ``trainmedic_agent.wiring.agent_logs`` makes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from trainmedic.wire.steady_time import utc_now
from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.database import AgentDatabase


@dataclass(frozen=True, slots=True)
class ReadingContext:
    """The node that is read, and what its reader remembers and counts.

    ``database``: the reader's own file. The agent's journal is another one.
    """

    node: str
    database: AgentDatabase
    counters: AgentCounters
    now: Callable[[], datetime] = utc_now
