"""Comparison of values with this node's earlier ones. Pure.

The baseline is the median of healthy results, the spread their median absolute deviation: outliers change neither. A
counter's growth in an hour is taken over the last one to two hours, or longer if it was not read for so long.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_agent.health.checks import HealthCheck, HealthValue, HealthVerdict, ValueKind, is_usable

LEAST_SAMPLES = 5  # values with fewer samples are not compared
KEPT_SAMPLES = 100  # the last of each value
SAMPLE_EVERY = timedelta(hours=1)
"""For counters and states. Each measured speed is a sample."""
# Shares of the usual speed. Below the first it is degraded unless it usually varies as much; below the second always.
_SLOW_SHARE, _TOO_SLOW_SHARE = 0.8, 0.5
_GROWTH_DEVIATIONS, _SPEED_DEVIATIONS = 5, 3  # standard deviations from the median that count as usual
LEAST_GROWTH: Mapping[str, float] = {"link_downs": 3, "link_errors": 100, "pcie_replays": 10, "nvlink_errors": 10}
"""Errors in an hour. As many occur on good links."""
_OTHER_LEAST_GROWTH = 10.0
_LASTING_KEYS = ("port_rate ",)  # beginnings of keys whose parts must stay
_PER_MEDIAN_DEVIATION = 1.4826  # standard deviation of a normal distribution per median absolute deviation


class CounterMark(Struct, frozen=True):
    at: datetime
    amount: float


class ValueHistory(Struct, frozen=True):
    """Earlier readings of a value.

    - ``samples``: amounts in healthy results, for a counter its growth in an hour
    - ``sampled_at``: time of the last sample
    - ``marks``: for a counter the last two readings an hour apart
    """

    samples: tuple[float, ...] = ()
    sampled_at: datetime | None = None
    marks: tuple[CounterMark, ...] = ()

    @property
    def changed_at(self) -> datetime:
        times = [mark.at for mark in self.marks] + ([self.sampled_at] if self.sampled_at else [])
        return max(times, default=datetime.min.replace(tzinfo=UTC))


Histories = Mapping[str, ValueHistory]
"""By `HealthValue.key`."""


class RecordComparison(Struct, frozen=True):
    """- ``learning``: keys without enough samples
    - ``histories``: the changed ones
    """

    checks: list[HealthCheck]
    learning: list[str]
    histories: dict[str, ValueHistory]


def compare(
    values: Sequence[HealthValue], record: Histories, checks: Sequence[HealthCheck], now: datetime
) -> RecordComparison:
    """Compare, and sample values that are ok unless a check is failed or unknown."""
    compared: dict[str, HealthCheck | None] = {}
    amounts: dict[str, float | None] = {}
    updated: dict[str, ValueHistory] = {}
    for value in values:
        history = _with_mark(value, record.get(value.key, ValueHistory()), now)
        amounts[value.key] = amount = _comparable_amount(value, history, now)
        compared[value.key] = None if amount is None else _compared(value, amount, history.samples)
        updated[value.key] = history
    made = [*(check for check in compared.values() if check is not None), *_missing(record, compared.keys())]
    is_healthy = is_usable((*checks, *made))
    learning = []
    for value in values:
        amount, check, history = amounts[value.key], compared[value.key], updated[value.key]
        if check is None and len(history.samples) < LEAST_SAMPLES:
            learning.append(value.key)
        if is_healthy and amount is not None and (check is None or check.verdict is HealthVerdict.OK):
            updated[value.key] = _with_sample(value, amount, history, now)
    changed = {key: history for key, history in updated.items() if history != record.get(key)}
    return RecordComparison(made, learning, changed)


def _missing(record: Histories, present: Collection[str]) -> Iterator[HealthCheck]:
    for key, history in record.items():
        if key.startswith(_LASTING_KEYS) and key not in present and len(history.samples) >= LEAST_SAMPLES:
            name, _, part = key.partition(" ")
            if (usual := statistics.median(history.samples)) > 0:
                yield HealthCheck(name, part, HealthVerdict.UNKNOWN, "no longer there", f"usually {usual:.4g}")


def _with_mark(value: HealthValue, history: ValueHistory, now: datetime) -> ValueHistory:
    """Begin again if the counter was reset or the clock set back."""
    if value.kind is not ValueKind.COUNTER:
        return history
    newest = CounterMark(now, value.amount)
    marks = history.marks
    if not marks or value.amount < marks[-1].amount or now < marks[-1].at:
        return replace(history, marks=(newest,))
    if now - marks[-1].at >= SAMPLE_EVERY:
        return replace(history, marks=(marks[-1], newest))
    return history


def _comparable_amount(value: HealthValue, history: ValueHistory, now: datetime) -> float | None:
    """Return the value, or a counter's growth in an hour. None for a counter that was read once."""
    if value.kind is not ValueKind.COUNTER:
        return value.amount
    first = history.marks[0]
    if first.at >= now:
        return None
    return (value.amount - first.amount) / max((now - first.at) / timedelta(hours=1), 1.0)


def _compared(value: HealthValue, amount: float, samples: Sequence[float]) -> HealthCheck | None:
    """Return None without enough samples, or if a state or speed is usually 0."""
    if len(samples) < LEAST_SAMPLES:
        return None
    usual = statistics.median(samples)
    spread = _PER_MEDIAN_DEVIATION * statistics.median(abs(sample - usual) for sample in samples)
    if value.kind is ValueKind.COUNTER:
        most = usual + max(_GROWTH_DEVIATIONS * spread, LEAST_GROWTH.get(value.name, _OTHER_LEAST_GROWTH))
        verdict = HealthVerdict.OK if amount <= most else HealthVerdict.DEGRADED
        return _check(value, verdict, f"{amount:.3g} an hour", f"{most:.3g} at most, usually {usual:.3g}")
    if usual == 0:
        return None
    unit = f" {value.unit}" if value.unit else ""
    lowest = usual
    if value.kind is ValueKind.SPEED:
        lowest = max(min(_SLOW_SHARE * usual, usual - _SPEED_DEVIATIONS * spread), _TOO_SLOW_SHARE * usual)
    verdict = HealthVerdict.OK
    if amount < lowest:
        verdict = HealthVerdict.DEGRADED if amount > 0 else HealthVerdict.FAILED
    return _check(value, verdict, f"{amount:.4g}{unit}", f"{lowest:.4g}{unit} or more, usually {usual:.4g}{unit}")


def _check(value: HealthValue, verdict: HealthVerdict, observed: str, expected: str) -> HealthCheck:
    return HealthCheck(value.name, value.part, verdict, observed, expected)


def _with_sample(value: HealthValue, amount: float, history: ValueHistory, now: datetime) -> ValueHistory:
    last = history.sampled_at
    is_recent = last is not None and timedelta() <= now - last < SAMPLE_EVERY
    if is_recent and value.kind is not ValueKind.SPEED:
        return history
    if value.kind is ValueKind.COUNTER and now - history.marks[0].at < SAMPLE_EVERY:
        return history
    return replace(history, samples=(*history.samples, amount)[-KEPT_SAMPLES:], sampled_at=now)
