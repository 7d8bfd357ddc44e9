"""Comparison of values with this node's earlier ones. Pure.

The baseline is the median of healthy results, and their spread the median absolute deviation: single outliers change
neither. A counter's growth is taken over one to two hours.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_agent.health.checks import Check, Kind, Value, Verdict, worst

LEAST_SAMPLES = 5
"""Fewer are not compared."""
KEPT = 100
SAMPLE_EVERY = timedelta(hours=1)
"""Of counters and states, which are read often. Each measured speed is a sample."""
_LESS, _LEAST = 0.8, 0.5
"""Shares of the usual speed. Below the first it is slow, below the second also if it always varies."""
_SPREADS = 5
"""Deviations above the median from which growth is noticed, if it is also above the next."""
LEAST_GROWTH: Mapping[str, float] = {"link_downs": 3, "link_errors": 100, "pcie_replays": 10, "nvlink_errors": 10}
"""Additional errors in an hour, by default `_LEAST_GROWTH`. Fewer occur on good links."""
_LEAST_GROWTH = 10.0
_NORMAL = 1.4826
"""Standard deviations of a normal distribution in its median absolute deviation."""


class Mark(Struct, frozen=True):
    at: datetime
    amount: float


class History(Struct, frozen=True):
    """Earlier readings of a value.

    - ``samples``: amounts in healthy results, for a counter its growth in an hour
    - ``sampled_at``: time of the last sample
    - ``marks``: for a counter the last two readings an hour apart
    """

    samples: tuple[float, ...] = ()
    sampled_at: datetime | None = None
    marks: tuple[Mark, ...] = ()


Histories = Mapping[str, History]
"""By `Value.key`."""


class Comparison(Struct, frozen=True):
    """- ``learning``: keys without enough samples
    - ``histories``: changed ones
    """

    checks: list[Check]
    learning: list[str]
    histories: dict[str, History]


def compare(values: Sequence[Value], known: Histories, checks: Sequence[Check], now: datetime) -> Comparison:
    """Compare values with the record, and add them to it: only to the record of a node without a failed or unknown
    check, and not what is degraded itself.
    """
    compared: dict[str, Check | None] = {}
    amounts: dict[str, float | None] = {}
    histories: dict[str, History] = {}
    for value in values:
        history = _marked(value, known.get(value.key, History()), now)
        amounts[value.key] = amount = _amount(value, history, now)
        compared[value.key] = None if amount is None else _judged(value, amount, history.samples)
        histories[value.key] = history
    made = [check for check in compared.values() if check is not None]
    is_healthy = worst([Verdict.OK, *(check.verdict for check in (*checks, *made))]) in (Verdict.OK, Verdict.DEGRADED)
    learning = []
    for value in values:
        amount, check, history = amounts[value.key], compared[value.key], histories[value.key]
        if check is None and len(history.samples) < LEAST_SAMPLES:
            learning.append(value.key)
        if is_healthy and amount is not None and (check is None or check.verdict is Verdict.OK):
            histories[value.key] = _sampled(value, amount, history, now)
    changed = {key: history for key, history in histories.items() if history != known.get(key)}
    return Comparison(made, learning, changed)


def _marked(value: Value, history: History, now: datetime) -> History:
    """Begin again with a counter that was reset, or if the clock was set back."""
    if value.kind is not Kind.COUNTER:
        return history
    newest = Mark(now, value.amount)
    marks = history.marks
    if not marks or value.amount < marks[-1].amount or now < marks[-1].at:
        return replace(history, marks=(newest,))
    if now - marks[-1].at >= SAMPLE_EVERY:
        return replace(history, marks=(marks[-1], newest))
    return history


def _amount(value: Value, history: History, now: datetime) -> float | None:
    """Return the comparable amount. None for a counter that was read once."""
    if value.kind is not Kind.COUNTER:
        return value.amount
    first = history.marks[0]
    if first.at >= now:
        return None
    return (value.amount - first.amount) / max((now - first.at) / timedelta(hours=1), 1.0)


def _judged(value: Value, amount: float, samples: Sequence[float]) -> Check | None:
    if len(samples) < LEAST_SAMPLES:
        return None
    usual = statistics.median(samples)
    spread = _NORMAL * statistics.median(abs(sample - usual) for sample in samples)
    if value.kind is Kind.COUNTER:
        most = usual + max(_SPREADS * spread, LEAST_GROWTH.get(value.name, _LEAST_GROWTH))
        verdict = Verdict.OK if amount <= most else Verdict.DEGRADED
        return _check(value, verdict, f"{amount:.3g} an hour", f"{most:.3g} at most, usually {usual:.3g}")
    if usual == 0:
        return None
    unit = f" {value.unit}" if value.unit else ""
    lowest = usual if value.kind is Kind.STATE else max(min(_LESS * usual, usual - 3 * spread), _LEAST * usual)
    verdict = Verdict.OK if amount >= lowest else Verdict.DEGRADED if amount > 0 else Verdict.FAILED
    return _check(value, verdict, f"{amount:.4g}{unit}", f"{lowest:.4g}{unit} or more, usually {usual:.4g}{unit}")


def _check(value: Value, verdict: Verdict, observed: str, expected: str) -> Check:
    return Check(value.name, value.part, verdict, observed, expected)


def _sampled(value: Value, amount: float, history: History, now: datetime) -> History:
    last = history.sampled_at
    is_recent = last is not None and timedelta() <= now - last < SAMPLE_EVERY
    if is_recent and value.kind is not Kind.SPEED:
        return history
    if value.kind is Kind.COUNTER and now - history.marks[0].at < SAMPLE_EVERY:
        return history
    return replace(history, samples=(*history.samples, amount)[-KEPT:], sampled_at=now)
