"""Step times, throughput and loss from a job's log."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import isfinite
from statistics import median
from typing import Any

from msgspec import Struct, field

from trainmedic_logs.diagnosis.slow import RankStep, ThroughputDrop

_LAST_STEPS = 5  # the current figure
# Earlier steps for the usual throughput, at most and at least.
_USUAL, _FEWEST = 200, 20
_DROPPED_SHARE = 0.7  # of the usual throughput
_RATE_MEMBERS = ("tokens_per_s", "samples_per_s", "throughput")
_MOST_FORMS = 16
_ROSE_BY, _ROSE_TIMES = 1.0, 2.0  # over the lowest loss; both must hold


class LossRise(Struct, frozen=True):
    lowest: float
    last: float
    line: str


class OwnTimes(Struct):
    """Figures of one stream."""

    parts: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_LAST_STEPS))
    """Total and data waiting seconds."""
    lowest: float | None = None
    """Lowest loss."""
    rise: LossRise | None = None
    """None if the last loss has not risen."""
    rates: dict[tuple[Any, ...], deque[float]] = field(default_factory=dict)
    """By form, because forms have different units."""

    def step_record(self, record: Mapping[str, Any], text: str, *, has_words: bool) -> None:
        """Read a step record. `has_words`: as `Line.has_words`."""
        data, whole = _not_negative(record.get("data_s")), _not_negative(record.get("step_s"))
        if data is not None and whole is not None:
            self.parts.append((whole, min(data, whole)))
        if (rate := _rate(record)) is not None:
            # Without the members that `lines.step_trends` adds to some records.
            form = tuple(name for name in record if name not in ("data_share", "loss_before", "loss_now", "loss_rise"))
            if form in self.rates or len(self.rates) < _MOST_FORMS:
                self.rates.setdefault(form, deque(maxlen=_USUAL + _LAST_STEPS)).append(rate)
        if "loss_rise" in record:  # by `step_trends`; 0 without a rise
            self.rise = None
            before, now = record.get("loss_before"), record.get("loss_now")
            # A job may print a member of this name too, with anything.
            if record["loss_rise"] and isinstance(before, float) and isinstance(now, float):
                self.rise = LossRise(before, now, text[:500])
        elif isinstance(loss := record.get("loss"), float) and isfinite(loss) and not has_words:
            self._compare(loss, text)

    def _compare(self, loss: float, text: str) -> None:
        lowest = self.lowest = loss if self.lowest is None else min(self.lowest, loss)
        has_risen = lowest >= 0 and loss > lowest + _ROSE_BY and loss > lowest * _ROSE_TIMES
        self.rise = LossRise(lowest, loss, text[:500]) if has_risen else None

    def median_step(self) -> RankStep | None:
        if len(self.parts) < _LAST_STEPS:
            return None
        whole, data = (median(part) for part in zip(*self.parts, strict=True))
        return RankStep(data, max(whole - data, 0.0), 0.0)  # waits for others are not known, and count as computing

    def throughput_drop(self) -> ThroughputDrop | None:
        for rates in self.rates.values():
            if len(rates) < _FEWEST + _LAST_STEPS:
                continue
            before, last = list(rates)[:-_LAST_STEPS], list(rates)[-_LAST_STEPS:]
            usual, now = median(before), median(last)
            if now < _DROPPED_SHARE * usual and max(last) < usual:
                return ThroughputDrop(now / usual)
        return None


def _rate(record: Mapping[str, Any]) -> float | None:
    """Return the throughput in any unit, None if not stated."""
    stated = next((value for name in _RATE_MEMBERS if (value := _not_negative(record.get(name)))), None)
    if stated is not None:
        return stated
    seconds = _not_negative(record.get("step_s")) or _not_negative(record.get("elapsed_time_per_iteration_(ms)"))
    return 1 / seconds if seconds else None


def _not_negative(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e15 else None
