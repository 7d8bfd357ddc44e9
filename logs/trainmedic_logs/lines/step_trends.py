"""Statistics over a stream's last steps, added to step records: `data_share`, `loss_before`, `loss_now`, `loss_rise`.

A loss has risen if nearly all recent losses are far above the lowest level and do not fall.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from math import inf, isfinite
from statistics import median
from typing import Any

from msgspec import Struct, field

# Kinds of records per stream.
_MOST_WINDOWS = 64  # further kinds get no statistics
# Losses per level.
_STEPS_PER_LEVEL = 10
_RECENT_LOSSES = 2 * _STEPS_PER_LEVEL
# Losses before the first judgement.
_FEWEST_LOSSES = 2 * _RECENT_LOSSES
# Low losses allowed in a rise.
_MOST_LOW_LOSSES = _RECENT_LOSSES // 5
# A risen loss exceeds the lowest level by a margin, spreads, a factor, and a share of the progress since the first
# level.
_MARGIN, _SPREADS, _TIMES, _OF_PROGRESS = 1.0, 6.0, 1.5, 0.25
# A rise ends when only this share of it remains. The next one must be larger by this factor.
_RECOVERED, _SWINGS = 0.3, 1.2
# Losses that have fallen below this share of those before are recovering.
_RECOVERING_SHARE = 0.95
_RATE_RAISED_FACTOR = 2.0
# Levels after a raised learning rate in which the loss may rise.
_SETTLING_LEVELS = 5
# In adversarial and reinforcement learning, a rising loss is normal.
_LOSSES_THAT_MAY_RISE = re.compile(
    r"(?i)loss[ _]?(?:d|g|dis\w*|gen\w*|adv\w*|actor|critic|policy|value|kl|pg|vf)\b"
    r"|\b(?:d|g|dis\w*|gen\w*|adv\w*|actor|critic|policy|value|kl|pg|vf)[ _/-]?loss|reward|\bkl\b|entropy|advantage"
)
# Member of SDK records, which have their own alerts.
_SDK_MEMBER = "attempt"


_NOT_RISEN: Mapping[str, float] = {"loss_rise": 0.0}


class _LossLevel(Struct, frozen=True):
    """Median of consecutive losses."""

    loss: float
    spread: float  # standard deviation, by the median absolute deviation
    rate: float | None  # learning rate


class _Losses(Struct):
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_LOSSES))
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS_PER_LEVEL))
    block: list[float] = field(default_factory=list)
    count: int = 0  # losses since the start, or since the loss settled after a raised learning rate
    settling: int = 0  # remaining levels in which the loss may rise
    first: _LossLevel | None = None
    best: _LossLevel | None = None
    peak: float = 0.0  # largest rise since the last recovery
    swing: float = 0.0  # largest recovered rise
    limit: float = inf  # losses above it have risen

    def add(self, loss: float, rate: float | None) -> None:
        self.count += 1
        self.recent.append(loss)
        self.block.append(loss)
        if rate is not None:
            self.rates.append(rate)
        if len(self.block) < _STEPS_PER_LEVEL:
            return
        middle = median(self.block)
        # The factor makes it the standard deviation of normally distributed losses.
        spread = 1.4826 * median(abs(each - middle) for each in self.block)
        level = _LossLevel(middle, spread, median(self.rates) if self.rates else None)
        self.block.clear()
        self.first = self.first or level
        if self.best is not None and _was_raised(self.best.rate, level.rate):
            self.settling = _SETTLING_LEVELS
        if self.settling:
            self.settling, self.count, self.best = self.settling - 1, 0, level
        elif self.best is None or level.loss < self.best.loss:
            self.best = level
        if self.best is None:
            return
        above = level.loss - self.best.loss
        self.peak = max(self.peak, above)
        if above < self.peak * _RECOVERED:
            self.swing, self.peak = max(self.swing, self.peak), 0.0
        self.limit = max(_limit(self.first, self.best), self.best.loss + _SWINGS * self.swing)

    def risen(self) -> Mapping[str, float]:
        """Return the rise, 0 without one; empty while unknown."""
        best, limit = self.best, self.limit
        # Factors mean nothing for a loss that can be negative.
        if best is None or self.count < _FEWEST_LOSSES or best.loss <= 0:
            return {}
        if sum(loss <= limit for loss in self.recent) > _MOST_LOW_LOSSES:
            return _NOT_RISEN
        losses = list(self.recent)
        now, before = median(losses[_STEPS_PER_LEVEL:]), median(losses[:_STEPS_PER_LEVEL])
        if now < _RECOVERING_SHARE * before:
            return _NOT_RISEN
        return {"loss_before": _short(best.loss), "loss_now": _short(now), "loss_rise": _short(now - best.loss)}


def _limit(first: _LossLevel, best: _LossLevel) -> float:
    return max(
        best.loss + max(_MARGIN, _SPREADS * best.spread),
        best.loss * _TIMES,
        best.loss + _OF_PROGRESS * (first.loss - best.loss),
    )


class _Window(Struct):
    losses: _Losses = field(default_factory=_Losses)
    shares: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS_PER_LEVEL))
    step: float = -1
    epoch: float = -1
    is_judged: bool = True  # False if the loss need not fall


class StepTrends:
    def __init__(self) -> None:
        self._windows: dict[tuple[Any, ...], _Window] = {}

    def add(self, rank: int | None, record: Mapping[str, Any], text: str) -> dict[str, float]:
        """Return the members to be added to the record."""
        if _SDK_MEMBER in record:
            return {}
        loss, data, whole = (_number(record.get(name)) for name in ("loss", "data_s", "step_s"))
        if loss is None and (data is None or whole is None):
            return {}
        # Records of the same kind have the same names of members.
        key = (rank, *record)
        window = self._windows.get(key)
        if window is None:
            if len(self._windows) >= _MOST_WINDOWS:
                return {}
            window = self._windows[key] = _Window(is_judged=not _LOSSES_THAT_MAY_RISE.search(text[:1024]))
        if _begins_again(window, record):
            window = self._windows[key] = _Window(is_judged=window.is_judged)
        window.step = _number(record.get("step")) or window.step
        window.epoch = _number(record.get("epoch")) or window.epoch
        trends: dict[str, float] = {}
        if data is not None and whole is not None and whole > 0:
            window.shares.append(min(data / whole, 1.0))
            if len(window.shares) == _STEPS_PER_LEVEL:
                trends["data_share"] = _short(median(window.shares))
        if loss is not None and window.is_judged:
            window.losses.add(loss, _number(record.get("learning_rate")))
            trends |= window.losses.risen()
        return trends


def _begins_again(window: _Window, record: Mapping[str, Any]) -> bool:
    step, epoch = _number(record.get("step")), _number(record.get("epoch"))
    if step is None:
        return epoch is not None and epoch < window.epoch
    return step < window.step and (epoch is None or epoch <= window.epoch)


def _was_raised(before: float | None, now: float | None) -> bool:
    return before is not None and now is not None and now > before * _RATE_RAISED_FACTOR


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and isfinite(value) else None


def _short(value: float) -> float:
    return float(f"{value:.4g}")
