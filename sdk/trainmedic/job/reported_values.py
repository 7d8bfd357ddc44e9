"""Reported losses and gradient norms, which stay on their device until they are read."""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache
from typing import Any, NamedTuple

_NAN = float("nan")
_MOST_STEPS = 2**63  # no counter holds more, and Python cannot divide by a whole number beyond a float's range
_LONGEST = 2000  # at least 100 s of reports: an alert may begin that long before its rollback


class ReportedValues(NamedTuple):
    step: int
    at: float
    loss: Any
    grad_norm: Any


class ReportRecord:
    __slots__ = ("_reports", "_unread")

    def __init__(self) -> None:
        self._reports: deque[ReportedValues] = deque(maxlen=_LONGEST)
        self._unread = 0  # number of last reports whose values were not read

    def add(self, step: int, at: float, loss: Any, grad_norm: Any) -> None:
        """Add a report with copies of tensors, which scripts reuse.

        A step before the last one starts another course.
        """
        if self._reports and step < self._reports[-1].step:
            self.forget_after(step - 1)
        self._reports.append(ReportedValues(step, at, _copied(loss), _copied(grad_norm)))
        self._unread += 1

    def read(self) -> list[ReportedValues]:
        """Return all reports, oldest first; NaN if not finite. Waits for their device."""
        reports = deque(self._reports, maxlen=_LONGEST)  # replaced as a whole, for `last` in another thread
        unread = [reports.pop() for _ in range(min(self._unread, len(reports)))]
        reports.extend(ReportedValues(step, at, number(loss), number(norm)) for step, at, loss, norm in unread[::-1])
        self._reports, self._unread = reports, 0
        return list(reports)

    @property
    def newest(self) -> ReportedValues | None:
        reports = self._reports
        return reports[-1] if reports else None

    def last(self, count: int) -> list[ReportedValues]:
        return list(self._reports)[-count:]

    def forget_after(self, step: int) -> None:
        reports = deque((values for values in self._reports if values.step <= step), maxlen=_LONGEST)
        self._unread = max(self._unread - (len(self._reports) - len(reports)), 0)
        self._reports = reports


def is_one_number(value: Any) -> bool:
    """Check for one real number, without waiting for a device."""
    if getattr(value, "is_meta", False) or "complex" in str(getattr(value, "dtype", "")):
        return False
    shape = getattr(value, "shape", None)
    return hasattr(type(value), "__float__") if shape is None else math.prod(shape) == 1


def number(value: Any) -> float | None:
    """Return a float; NaN if not finite or no number."""
    if value is None:
        return None
    try:
        read = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return _NAN
    return read if math.isfinite(read) else _NAN


def finite(value: Any) -> float | None:
    """Return a float; None if not finite or no number."""
    read = number(value)
    return None if read is None or math.isnan(read) else read


def whole(step: Any) -> int | None:
    try:
        read = int(step)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return read if abs(read) < _MOST_STEPS else None


def detached(value: Any) -> Any:
    """Return a tensor without its graph, CPU tensors as numbers, None if ranks hold parts; other values as they are."""
    is_tensor, is_spread = _kind_of(type(value))  # type: ignore[arg-type]  # a type can be hashed
    if not is_tensor:
        return value
    if is_spread:  # reading it could wait for other ranks
        return value.to_local() if all(placement.is_replicate() for placement in value.placements) else None
    return _item(value) if getattr(value, "is_cpu", False) else value.detach()


@lru_cache(maxsize=64)
def _kind_of(kind: type) -> tuple[bool, bool]:
    return callable(getattr(kind, "detach", None)), hasattr(kind, "placements")


def kept(value: Any) -> Any:
    """Copy a value, because the script may reuse its tensor."""
    return value if value is None or type(value) is float else _copied(detached(value))


def _item(tensor: Any) -> float | None:
    try:
        return number(tensor.item())
    except (RuntimeError, ValueError):  # several numbers, or none
        return _NAN


def _copied(value: Any) -> Any:
    if value is None or type(value) is float:
        return value
    clone = getattr(value, "clone", None)
    try:
        return clone() if callable(clone) else value
    except RuntimeError:  # a failed device; reports do not raise that
        return None


def deviation(rate: float | None, expected: float | None) -> float | None:
    """Return two rates' difference as a fraction of the larger; 1 if one is no number."""
    if rate is None or expected is None:
        return None
    larger = max(abs(rate), abs(expected))
    if larger == 0.0:
        return 0.0
    part = abs(rate - expected) / larger
    return 1.0 if math.isnan(part) else min(part, 1.0)
