"""Newest value and range of each metric in the events ``job_evaluated``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from trainmedic.wire import evaluations as wire
from trainmedic.wire.evaluations import EvaluatedMetric
from trainmedic_server.domain.event_codec import content_of, name_of
from trainmedic_server.domain.event_kinds import JobEvaluated
from trainmedic_server.domain.run import Event

EVALUATED = name_of(JobEvaluated)
NONE_REPORTED = "the job has reported no evaluation in that time"
NOT_A_NUMBER = "not a finite number"


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    metric: str
    value: float | None  # None if it is not a finite number, as ``problem`` states.
    problem: str | None
    step: int | None
    at: datetime
    reports: int  # At most one a minute.
    lowest: float | None
    highest: float | None


def evaluation_records(events: Sequence[Event]) -> tuple[EvaluationRecord, ...]:
    """Return one record per metric, by name. A repeated report counts once."""
    by_name: dict[str, dict[datetime, EvaluatedMetric]] = {}
    for event in events:
        content = content_of(event)
        for metric in wire.read(content.metrics) if isinstance(content, JobEvaluated) else ():
            by_name.setdefault(metric.name, {})[metric.at] = metric
    return tuple(_record(name, list(by_name[name].values())) for name in sorted(by_name))


def _record(name: str, reported: Sequence[EvaluatedMetric]) -> EvaluationRecord:
    newest = max(reported, key=lambda metric: metric.at)
    values = [metric.value for metric in reported if metric.value is not None]
    return EvaluationRecord(
        metric=name,
        value=newest.value,
        problem=None if newest.value is not None else NOT_A_NUMBER,
        step=newest.step,
        at=newest.at,
        reports=len(reported),
        lowest=min(values, default=None),
        highest=max(values, default=None),
    )
