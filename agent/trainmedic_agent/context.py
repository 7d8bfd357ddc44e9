from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from trainmedic.wire.connection import OutageLog, RedisConnection
from trainmedic.wire.signing import Signer
from trainmedic.wire.steady_time import utc_now
from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.journal import Journal
from trainmedic_agent.policy import Policy


@dataclass(frozen=True, slots=True)
class AgentContext:
    node: str  # name in commands
    find_redis: Callable[[], str | None] = field(repr=False)  # returns Redis's URL; None if not known yet
    signer: Signer | None = field(repr=False)  # None without a signing key
    policy: Policy
    journal: Journal
    counters: AgentCounters
    now: Callable[[], datetime] = utc_now  # does not jump when the clock is set
    redis: RedisConnection = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # All threads lose Redis at the same time, so they share one outage log.
        outage = OutageLog(f"node {self.node}", "running commands continue")
        object.__setattr__(self, "redis", RedisConnection(self.find_redis, outage))
