"""Comparison of a node pair's measurement with earlier ones.

The baseline is the median of the last good ones, so that a degrading pair does not lower it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

from trainmedic.errors import ConfigurationError
from trainmedic.probe.measuring import Measurement

OK = "ok"
NEW = "new"
"""No baseline exists yet."""
SLOW = "slow"
WRONG = "wrong"  # Incorrect sums, which trainings do not check
WORST_FIRST = (WRONG, SLOW, NEW, OK)

KEPT = 10
"""Good measurements per pair."""
# Multiple of the usual latency above which a barrier is slow.
_SLOW_BARRIER = 2.0
# Seconds; a busy CPU causes smaller differences.
_SMALLEST_DIFFERENCE_S = 100e-6
# Share of the usual bandwidth below which an all-reduce is slow.
_SLOW_REDUCE = 0.7


@dataclass(frozen=True)
class PairBaseline:
    measurements: int
    barrier_seconds: float
    bytes_per_s: Mapping[int, float]  # By bytes of the all-reduce


@dataclass(frozen=True)
class Judgement:
    """One of `WORST_FIRST` and the reasons."""

    word: str
    reasons: tuple[str, ...] = ()


def judged(measured: Measurement, usual: PairBaseline | None, least_bytes_per_s: float | None = None) -> Judgement:
    """Judge a pair. `least_bytes_per_s`: minimum for the largest all-reduce."""
    if not measured.is_right:
        sizes = ", ".join(_size(each.bytes) for each in measured.all_reduce if not each.is_right)
        return Judgement(WRONG, (f"incorrect sums of {sizes} on at least one rank",))
    reasons = []
    largest = max(measured.all_reduce, key=lambda each: each.bytes, default=None)
    if least_bytes_per_s is not None and largest is not None and largest.bytes_per_s < least_bytes_per_s:
        reasons.append(
            f"all-reduce of {_size(largest.bytes)}: {_rate(largest.bytes_per_s)}, at least "
            f"{_rate(least_bytes_per_s)} is required"
        )
    if usual is not None:
        reasons += _slower(measured, usual)
    if reasons:
        return Judgement(SLOW, tuple(reasons))
    return Judgement(OK if usual is not None else NEW)


def _slower(measured: Measurement, usual: PairBaseline) -> Iterator[str]:
    latency = measured.barrier.median
    if latency > _SLOW_BARRIER * usual.barrier_seconds and latency - usual.barrier_seconds > _SMALLEST_DIFFERENCE_S:
        yield f"barrier: {latency * 1e6:.0f} µs, usually {usual.barrier_seconds * 1e6:.0f} µs"
    for each in measured.all_reduce:
        before = usual.bytes_per_s.get(each.bytes)
        if before is not None and each.bytes_per_s < _SLOW_REDUCE * before:
            yield f"all-reduce of {_size(each.bytes)}: {_rate(each.bytes_per_s)}, usually {_rate(before)}"


def worst(words: Sequence[str]) -> str:
    return min(words, key=WORST_FIRST.index, default=OK)


def _size(size: int) -> str:
    return f"{size / 1e6:g} MB"


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"


# Errors of a file without baselines.
_UNREADABLE = (AttributeError, LookupError, TypeError, ValueError, OverflowError, RecursionError)


class BaselineFile:
    """JSON file with many pairs' baselines. Raises ConfigurationError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def baselines(self) -> dict[str, PairBaseline]:
        return {key: _baseline(samples) for key, samples in self._read().items()}

    def add(self, measured: Mapping[str, Measurement]) -> None:
        """Append good measurements, safely for concurrent programs."""
        with self._locked():
            samples = self._read()
            for key, measurement in measured.items():
                sample = {
                    "barrier_seconds": measurement.barrier.median,
                    "bytes_per_s": {str(each.bytes): each.bytes_per_s for each in measurement.all_reduce},
                }
                samples[key] = [*samples.get(key, []), sample][-KEPT:]
            self._write(samples)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path.with_name(f"{self._path.name}.lock"), "a", opener=_no_link) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise ConfigurationError(f"{self._path}: cannot be written: {error.strerror or error}") from error

    def _read(self) -> dict[str, list[dict[str, Any]]]:
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
            pairs = document["pairs"]
            for samples in pairs.values():
                _baseline(samples)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ConfigurationError(f"{self._path}: cannot be read: {error.strerror or error}") from error
        except _UNREADABLE as error:
            raise ConfigurationError(f"{self._path}: not a baseline file; move it away or name another") from error
        return dict(pairs)

    def _write(self, samples: Mapping[str, Any]) -> None:
        unfinished = self._path.with_name(f"{self._path.name}.new")
        text = json.dumps({"version": 1, "pairs": samples}, indent=1, sort_keys=True)
        unfinished.unlink(missing_ok=True)
        with open(unfinished, "x", encoding="utf-8", opener=_no_link) as file:
            file.write(text)
        unfinished.replace(self._path)


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _baseline(samples: Sequence[Mapping[str, Any]]) -> PairBaseline:
    sizes = {size for sample in samples for size in sample["bytes_per_s"]}
    rates = {
        int(size): statistics.median(
            _measured(sample["bytes_per_s"][size]) for sample in samples if size in sample["bytes_per_s"]
        )
        for size in sizes
    }
    seconds = statistics.median(_measured(sample["barrier_seconds"]) for sample in samples)
    return PairBaseline(len(samples), seconds, rates)


def _measured(value: Any) -> float:
    """Raise ValueError for impossible values."""
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError("not a finite number")
    return number
