from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from trainmedic_agent.health.checks import HealthVerdict, Level, worst
from trainmedic_agent.health.record import HealthRecord

_OUTDATED = timedelta(minutes=15)  # age of a quick result that is no longer shown: later checks have not ended


def families(record: HealthRecord, now: datetime | None = None) -> Iterator[Metric]:
    verdicts = GaugeMetricFamily(
        "trainmedic_agent_health", "1 for the last verdict of a check.", labels=["level", "check", "part", "verdict"]
    )
    ended = GaugeMetricFamily(
        "trainmedic_agent_health_timestamp_seconds", "End of the last checks of a level.", labels=["level"]
    )
    moment = now or datetime.now(UTC)
    for level, result in sorted(record.results.items()):
        ended.add_metric([level], result.at.timestamp())
        if level is Level.QUICK and moment - result.at > _OUTDATED:
            verdicts.add_metric([level, "health", "", HealthVerdict.UNKNOWN], 1)
            continue
        by_check: dict[tuple[str, str], list[HealthVerdict]] = {}
        for check in result.checks:
            by_check.setdefault((check.name, check.part), []).append(check.verdict)
        for (name, part), checked in sorted(by_check.items()):
            verdicts.add_metric([level, name, part, worst(checked)], 1)
    yield from (verdicts, ended)
