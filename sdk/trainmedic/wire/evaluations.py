"""Newest value of each of a job's evaluation metrics, in its presence: untrusted input for the server."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Iterable, Mapping

from trainmedic.wire import envelope

FIELD = "evaluations"
MOST = 32  # metrics per job; the first reported ones are kept
NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_./@:+-]{0,99}\Z")
NOT_FINITE = "NaN"
_MOST_STEP = 10**15  # exact as a float


@dataclass(frozen=True)
class EvaluatedMetric:
    name: str
    value: float | None  # None if not finite
    step: int | None
    at: datetime


def as_plain(metrics: Iterable[EvaluatedMetric]) -> list[dict[str, Any]]:
    return [
        {
            "metric": metric.name,
            "value": NOT_FINITE if metric.value is None else metric.value,
            "at": envelope.write_time(metric.at),
            **({} if metric.step is None else {"step": metric.step}),
        }
        for metric in metrics
    ]


def read(content: Any) -> tuple[EvaluatedMetric, ...]:
    # Invalid entries are skipped.
    if not isinstance(content, (list, tuple)):
        return ()
    by_name: dict[str, EvaluatedMetric] = {}
    for each in content[:MOST]:
        metric = _read_one(each) if isinstance(each, Mapping) else None
        if metric is not None:
            by_name[metric.name] = metric
    return tuple(by_name.values())


def _read_one(fields: Mapping[str, Any]) -> EvaluatedMetric | None:
    name, value, step = fields.get("metric"), fields.get("value"), fields.get("step")
    if not isinstance(name, str) or not NAME.match(name):
        return None
    if value == NOT_FINITE:
        value = math.nan
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        at = envelope.read_time(str(fields.get("at")))
        number = float(value)
    except (envelope.EnvelopeError, OverflowError):
        return None
    is_step = isinstance(step, int) and not isinstance(step, bool) and abs(step) <= _MOST_STEP
    return EvaluatedMetric(name, number if math.isfinite(number) else None, step if is_step else None, at)
