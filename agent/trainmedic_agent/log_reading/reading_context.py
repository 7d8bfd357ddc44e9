from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from trainmedic.wire.steady_time import utc_now
from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.database import AgentDatabase


@dataclass(frozen=True, slots=True)
class ReadingContext:
    """``database`` is the reader's, not the agent's journal."""

    node: str
    database: AgentDatabase
    counters: AgentCounters
    now: Callable[[], datetime] = utc_now
