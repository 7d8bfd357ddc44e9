"""Evidence whether a rate that the loop has changed still has a command's factor.

A loop may derive its next rate from the present one, or set it without the factor.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from typing import Any

_SAME = 1e-6  # largest difference of equal changes; all changes are logarithms
_SMALL = 0.02  # share of the factor: a change without the factor is about the whole
_SHARE = 0.1  # share of the factor: largest difference of similar changes


class Fate(enum.Enum):
    """Of the factor."""

    KEPT = enum.auto()
    LOST = enum.auto()
    UNCLEAR = enum.auto()


class OwnChanges:
    """The loop's own changes of its first group's rate, and by group those since a command."""

    def __init__(self) -> None:
        self._last: Any = None
        self._recent: deque[float] = deque(maxlen=3)  # by step
        self._usual: float | None = None  # the last one without a factor
        self._unclear: dict[int, tuple[float, float]] = {}  # by group: the rate, and its first change
        self._repeated: set[int] = set()  # groups whose scaled rate the loop has set to the same number

    @property
    def is_unclear(self) -> bool:
        return bool(self._unclear)

    def restart(self, rate: Any) -> None:
        """Begin at a rate that the loop has not set."""
        self._last = rate
        self._unclear.clear()
        self._repeated.clear()

    def observe(self, rate: Any, is_scaled: bool) -> None:
        """Record a step's rate. A tensor's is not read: its device would be waited for."""
        last, self._last = self._last, rate
        if type(rate) is not float or type(last) is not float or min(rate, last) <= 0.0:
            self._recent.clear()
            return
        change = 0.0 if rate == last else math.log(rate / last)
        self._recent.append(change)
        if change and not is_scaled:
            self._usual = change

    def repeats(self, change: float) -> bool:
        """Return whether each of the last steps made this change."""
        return len(self._recent) == 3 and all(abs(change - each) <= _SAME for each in self._recent)

    def expected_instead(self, number: int, written: float, raw: float) -> float | None:
        """Return the usual next rate if the loop has set the scaled one again, as its own next; else None."""
        self._repeated.add(number)
        if self._usual is None or min(written, raw) <= 0.0:
            return None
        is_lost = self._compared(number, 0.0, self._usual, math.log(raw / written)) is Fate.LOST
        return written * math.exp(self._usual) if is_lost else None

    def judge(self, number: int, rate: float, written: float, raw: float) -> Fate:
        """Return what a changed ``rate`` says of the factor in ``written``, of the unscaled ``raw``."""
        if min(rate, written, raw) <= 0.0:
            return Fate.UNCLEAR
        change, whole = math.log(rate / written), math.log(raw / written)
        fate = self._fate(number, change, whole)
        if fate is Fate.UNCLEAR and number in self._unclear:
            last, first = self._unclear[number]
            second = math.log(rate / last)
            if second:
                change, fate = first, self._compared(number, first, second, whole)
                if fate is Fate.KEPT:
                    self._usual = second
        if fate is Fate.UNCLEAR:
            self._unclear[number] = rate, change
        else:
            self._unclear.pop(number, None)
        return fate

    def _fate(self, number: int, change: float, whole: float) -> Fate:
        if number not in self._unclear:
            if self._usual is not None:
                fate = self._compared(number, change, self._usual, whole)
                if fate is not Fate.UNCLEAR:
                    return fate
            if abs(change) <= _SMALL * abs(whole) and number not in self._repeated:
                return Fate.KEPT
        # A fall may be the loop's own, of the scaled rate; so may a small rise.
        return Fate.LOST if 0.0 < whole < 2 * change else Fate.UNCLEAR

    def _compared(self, number: int, change: float, other: float, whole: float) -> Fate:
        is_as_before = abs(change - whole) <= _SHARE * abs(whole)  # the loop may have set the unscaled rate again
        if abs(change - other) <= _SAME and not is_as_before and number not in self._repeated:
            return Fate.KEPT
        return Fate.LOST if abs(change - other - whole) <= _SHARE * abs(whole) else Fate.UNCLEAR
