"""The values that training loops report: keeping them as they come, and reading them as numbers later.

A tensor is kept where it is, without its graph, and costs the training thread no wait for its device; it becomes a
float when somebody reads it. Who calls it: ``progress``, and all who show or judge what was reported.
"""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache
from typing import Any, NamedTuple

_NAN = float("nan")
_LONGEST = 2000  # reports, which are at least 100 s: so long before a rollback an alert may have begun


class ReportedValues(NamedTuple):
    """The loss and the gradient norm of one report."""

    step: int
    at: float
    """When it came, by ``time.perf_counter``."""
    loss: Any
    """As it was reported, or a float where it has been read; None where it was not reported."""
    grad_norm: Any


class ReportRecord:
    """The last reports of a job, for its training thread."""

    __slots__ = ("_reports", "_unread")

    def __init__(self) -> None:
        self._reports: deque[ReportedValues] = deque(maxlen=_LONGEST)
        self._unread = 0  # so many of the last ones have values as they were reported

    def add(self, step: int, at: float, loss: Any, grad_norm: Any) -> None:
        """Add a report. Tensors are copied on their device: scripts reuse theirs, for a running sum or a CUDA graph.

        A step from before the last one is of another course, such as the next training of a process.
        """
        if self._reports and step < self._reports[-1].step:
            self.forget_after(step - 1)
        self._reports.append(ReportedValues(step, at, _copied(loss), _copied(grad_norm)))
        self._unread += 1

    def read(self) -> list[ReportedValues]:
        """All of them, oldest first, with floats for values, NaN for what is not finite. It waits for their device."""
        reports = deque(self._reports, maxlen=_LONGEST)  # replaced whole, for `last` in another thread
        unread = [reports.pop() for _ in range(min(self._unread, len(reports)))]
        reports.extend(ReportedValues(step, at, number(loss), number(norm)) for step, at, loss, norm in unread[::-1])
        self._reports, self._unread = reports, 0
        return list(reports)

    @property
    def newest(self) -> ReportedValues | None:
        """The last one, with values as they are kept. Any thread may call it."""
        reports = self._reports
        return reports[-1] if reports else None

    def last(self, count: int) -> list[ReportedValues]:
        """The last so many, oldest first, with values as they are kept. Any thread may call it."""
        return list(self._reports)[-count:]

    def forget_after(self, step: int) -> None:
        """Forget the reports of later steps, because training went back to that one."""
        reports = deque((values for values in self._reports if values.step <= step), maxlen=_LONGEST)
        self._unread = max(self._unread - (len(self._reports) - len(reports)), 0)
        self._reports = reports


def is_one_number(value: Any) -> bool:
    """Return whether it is a real number, finite or not: no tensor of several, for one. It waits for no device."""
    if getattr(value, "is_meta", False) or "complex" in str(getattr(value, "dtype", "")):
        return False
    shape = getattr(value, "shape", None)
    return hasattr(type(value), "__float__") if shape is None else math.prod(shape) == 1


def number(value: Any) -> float | None:
    """`value` as a float; NaN for anything that is not a finite number, None for None."""
    if value is None:
        return None
    try:
        read = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return _NAN
    return read if math.isfinite(read) else _NAN


def whole(step: Any) -> int | None:
    """A step as an int, whatever type the loop counts in; None for a value that is no number."""
    try:
        return int(step)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def detached(value: Any) -> Any:
    """A tensor without its graph, which would otherwise stay in memory until the next report.

    Of one in main memory its number: to read it there costs less than any other call on a tensor.
    """
    is_tensor, is_spread = _kind_of(type(value))  # type: ignore[arg-type]  # a type can be hashed
    if not is_tensor:
        return value
    if is_spread:  # over ranks: to ask for its number could mean to wait for the others
        return value.to_local() if all(placement.is_replicate() for placement in value.placements) else None
    return _item(value) if getattr(value, "is_cpu", False) else value.detach()


@lru_cache(maxsize=64)
def _kind_of(kind: type) -> tuple[bool, bool]:
    """Whether values of that type are tensors, and whether they are spread over ranks."""
    return callable(getattr(kind, "detach", None)), hasattr(kind, "placements")


def kept(value: Any) -> Any:
    """A value as it is now, for somebody who reads it later."""
    return value if value is None or type(value) is float else _copied(detached(value))


def _item(tensor: Any) -> float | None:
    try:
        return number(tensor.item())
    except (RuntimeError, ValueError):  # it has several numbers, or none
        return _NAN


def _copied(value: Any) -> Any:
    if value is None or type(value) is float:
        return value
    clone = getattr(value, "clone", None)
    try:
        return clone() if callable(clone) else value
    except RuntimeError:  # its device has failed, which is not for a report to say
        return None


def deviation(rate: float | None, expected: float | None) -> float | None:
    """The difference of two rates as a fraction of the larger one: 0 to 1, the same up and down.

    It is 1 if one of them is not a number.
    """
    if rate is None or expected is None:
        return None
    larger = max(abs(rate), abs(expected))
    if larger == 0.0:
        return 0.0
    part = abs(rate - expected) / larger
    return 1.0 if math.isnan(part) else min(part, 1.0)
