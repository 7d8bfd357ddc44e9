"""What the evaluations of a job have shown: each metric's newest value, and the range of those before. Pure.

From the events ``job_evaluated``, so it needs no Prometheus, and goes back as far as the history does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from trainmedic.wire import evaluations as wire
from trainmedic.wire.evaluations import EvaluatedMetric
from trainmedic_server.domain.run import Event

EVALUATED = "job_evaluated"
NONE_REPORTED = "the job has reported no evaluation in that time"
NOT_A_NUMBER = "not a finite number"


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """One metric."""

    metric: str
    value: float | None
    """The newest. None where it is not a finite number; ``problem`` says so."""
    problem: str | None
    step: int | None
    """The training step that was evaluated; None if the job did not say."""
    at: datetime
    """When the job reported it."""
    reports: int
    """How many values are on record, of those not more than one a minute."""
    lowest: float | None
    highest: float | None
    """Of the finite ones."""


def evaluation_records(events: Sequence[Event]) -> tuple[EvaluationRecord, ...]:
    """The metrics by name, from events in the order of the history. A value that was told twice counts once."""
    by_name: dict[str, dict[datetime, EvaluatedMetric]] = {}
    for event in events:
        for metric in wire.read(event.data.get("metrics")):
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
