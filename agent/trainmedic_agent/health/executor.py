"""Executor of ``node.health``, and the regular quick check, in their own worker queue: a load test takes minutes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from trainmedic.wire.steady_time import since_boot, utc_now
from trainmedic_agent.errors import CommandInterrupted, CommandRejected
from trainmedic_agent.executors import AcceptedCommand
from trainmedic_agent.gpu_record import GpuRecord
from trainmedic_agent.health.checker import Examination, RecordedHealth
from trainmedic_agent.health.checks import Level
from trainmedic_agent.health.health_policy import HealthPolicy

CHECK_EVERY = 300.0  # seconds
MOST_BURN_SECONDS = 540.0  # below the server's limit of ten minutes
_REPLY_SECONDS = 5.0  # reserved for the reply before the command expires
_MOST_GPUS = 1024
_MOST_GBPS = 100_000  # Gbit/s, above any link


class NodeHealthExecutor(Struct, frozen=True):
    node: str
    health: RecordedHealth
    gpu_record: GpuRecord
    policy: HealthPolicy
    action: str = "node.health"
    queue: str = "health"

    def perform(self, accepted: AcceptedCommand) -> Mapping[str, Any]:
        params = accepted.command.params
        level, gpus = params.get("level", Level.QUICK), params.get("gpus", 0)
        if level not in list(Level) or not isinstance(gpus, int) or not 0 <= gpus <= _MOST_GPUS:
            raise CommandRejected(f"level must be {' or '.join(Level)}, and gpus from 0 to {_MOST_GPUS}")
        min_gbps = params.get("min_gbps", 0.0)
        if not isinstance(min_gbps, (int, float)) or not 0 <= min_gbps <= _MOST_GBPS:
            raise CommandRejected(f"min_gbps must be a number from 0 to {_MOST_GBPS}")
        if level == Level.BURN and not self.policy.probe:
            raise CommandRejected("this node's policy names no health.probe, so it allows no load test")
        left = (accepted.command.expires_at - utc_now()).total_seconds() - _REPLY_SECONDS
        report = self.health.examine(
            Examination(
                Level(level),
                max(gpus, expected_gpus(self.policy, self.gpu_record)),
                self.policy.probe,
                max(min(left, MOST_BURN_SECONDS), 0.0),
                min_gbps,
                lambda: accepted.is_over,
            )
        )
        if accepted.is_stopping():
            raise CommandInterrupted("the agent stops during the check")
        return {"node": self.node, **report.as_output()}


class RegularCheck(Struct):
    """Quick check every `CHECK_EVERY`. `next_at`: in seconds since boot."""

    health: RecordedHealth
    gpu_record: GpuRecord
    policy: HealthPolicy
    queue: str = "health"
    next_at: float = field(default_factory=since_boot)

    def due(self) -> float:
        return self.next_at - since_boot()

    def run(self) -> None:
        self.next_at = since_boot() + CHECK_EVERY
        self.health.examine(Examination(gpus=expected_gpus(self.policy, self.gpu_record)))


def expected_gpus(policy: HealthPolicy, record: GpuRecord) -> int:
    return max(policy.gpus, len(record.gpus()))
