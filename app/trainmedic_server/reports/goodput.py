"""Use of a job's time: losses by kind, without overlap; the rest is productive, including slow steps."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Literal

from trainmedic_server.ports.metric_history import Points
from trainmedic_server.reports import points as figures
from trainmedic_server.reports.points import Stretch

_FAILS_BEFORE_GAP = 120.0  # Seconds, at most, from a failure to the gap that it leaves in the points.


@dataclass(frozen=True, slots=True)
class LostTime:
    """Seconds without a training step that still counts."""

    failures: float = 0.0
    restarts: float = 0.0
    """Downtime without a reported failure, and time before the first completed step."""
    redone: float = 0.0  # Steps repeated after a rollback or restart.
    checkpoints: float = 0.0
    evaluations: float = 0.0
    repairs: float = 0.0  # The SDK's windows ``repair`` and ``pause``.
    stalls: float = 0.0  # No completed step beyond the job's own limit.
    other: float = 0.0

    @property
    def total(self) -> float:
        parts: tuple[float, ...] = astuple(self)
        return sum(parts)


@dataclass(frozen=True, slots=True)
class Goodput:
    """``ratio`` is productive time divided by wall time, 0 to 1: the effective training time ratio."""

    ratio: float
    wall_seconds: float
    """From the first appearance to the end, without unmeasured time and gaps after regular ends."""
    productive_seconds: float
    lost: LostTime
    unmeasured_seconds: float = 0.0
    resolution_seconds: float = 0.0
    """Interval of the points. Losses shorter than two may be missed."""


@dataclass(frozen=True, slots=True)
class ProgressPoints:
    """Points at regular intervals. Counters begin at 0."""

    steps: Points  # Completed steps, repeated ones included.
    step: Points = ()  # Number of the newest step, which a rollback lowers.
    step_seconds: Points = ()
    stall: Points = ()  # Seconds since the last completed step.
    stall_limit: Points = ()  # The job's own limit of `stall`, in seconds.
    windows: Mapping[str, Points] = field(default_factory=dict)
    """Counters of the seconds in the SDK's windows, such as ``checkpoint``."""
    measured: Sequence[Stretch] = ()  # Periods with any scrape; empty: all.


@dataclass(frozen=True, slots=True)
class JobMoments:
    """Failures and regular ends of a job, in seconds since 1970."""

    failed: Sequence[float] = ()
    ended: Sequence[float] = ()
    restarted: Sequence[Stretch] = ()
    """From a reported failure to the next reported start, without overlaps."""


@dataclass(frozen=True, slots=True)
class _Downtime:
    period: Stretch
    is_failure: bool


@dataclass(frozen=True, slots=True)
class _Endings:
    last: Literal["failed", "ended"] | None
    first_at: float  # Time of the first report; the gap's begin without one.


def goodput(progress: ProgressPoints, moments: JobMoments, begin: float, end: float, every: float) -> Goodput | None:
    """Return None if the job has no point between `begin` and `end`. `every`: interval of the points."""
    present = figures.stretches(progress.steps, every)
    if not present:
        return None
    measured = progress.measured or [Stretch(begin, end)]
    down = _downtimes(present, moments, end, every)
    span = Stretch(present[0].begin, max([present[-1].end, *(each.period.end for each in down)]))
    unused = [gap for gap in figures.gaps(present) if _endings_in(gap, moments).last == "ended"]
    wall = figures.overlap(span, measured) - sum(figures.overlap(gap, measured) for gap in unused)
    lost = _lost(progress, down, measured, unused, begin, every)
    # Parts that are each slightly too long may exceed the total.
    productive = max(wall - lost.total, 0.0)
    return Goodput(
        ratio=round(productive / wall, 4) if wall > 0 else 0.0,
        wall_seconds=wall,
        productive_seconds=productive,
        lost=lost,
        unmeasured_seconds=max(span.seconds - figures.overlap(span, measured), 0.0),
        resolution_seconds=every,
    )


def _downtimes(present: Sequence[Stretch], moments: JobMoments, end: float, every: float) -> list[_Downtime]:
    """After the last point the job is down only if a failure was reported."""
    down = [_Downtime(restart, is_failure=True) for restart in _restarts_without_gap(present, moments, every)]
    for gap in figures.gaps(present):
        endings = _endings_in(gap, moments)
        if endings.last != "ended":
            # The failed process did not fill its last interval.
            period = Stretch(min(endings.first_at, gap.begin), gap.end)
            down.append(_Downtime(period, is_failure=endings.last == "failed"))
    after = Stretch(present[-1].end, end)
    endings = _endings_in(after, moments)
    if after.seconds > 0 and endings.last == "failed":
        down.append(_Downtime(Stretch(min(endings.first_at, after.begin), after.end), is_failure=True))
    return down


def _restarts_without_gap(present: Sequence[Stretch], moments: JobMoments, every: float) -> list[Stretch]:
    # A longer one would leave a gap in the points.
    short = [restart for restart in moments.restarted if restart.seconds < 2 * every]
    return [each for each in short if any(run.begin <= each.begin and each.end <= run.end for run in present)]


def _endings_in(gap: Stretch, moments: JobMoments) -> _Endings:
    reported: list[tuple[float, Literal["failed", "ended"]]] = [(at, "failed") for at in moments.failed]
    reported += [(at, "ended") for at in moments.ended]
    within = [(at, kind) for at, kind in reported if gap.begin - _FAILS_BEFORE_GAP <= at <= gap.end]
    return _Endings(max(within)[1], min(within)[0]) if within else _Endings(None, gap.begin)


def _lost(
    progress: ProgressPoints,
    down: Sequence[_Downtime],
    measured: Sequence[Stretch],
    unused: Sequence[Stretch],
    begin: float,
    every: float,
) -> LostTime:
    in_window = {name: _seconds_in(points, begin, every) for name, points in progress.windows.items()}
    before_first_step = figures.stretches([(at, value) for at, value in progress.steps if value == 0], every)
    down_periods = [each.period for each in down]
    return LostTime(
        failures=sum(figures.overlap(each.period, measured) for each in down if each.is_failure),
        restarts=sum(figures.overlap(each.period, measured) for each in down if not each.is_failure)
        + sum(start.seconds - figures.overlap(start, down_periods) for start in before_first_step),
        redone=_redone(progress, unused),
        checkpoints=in_window.get("checkpoint", 0.0),
        evaluations=in_window.get("evaluation", 0.0),
        repairs=in_window.get("repair", 0.0) + in_window.get("pause", 0.0),
        stalls=_stalled(progress, before_first_step, every),
        other=in_window.get("other", 0.0),
    )


def _redone(progress: ProgressPoints, unused: Sequence[Stretch]) -> float:
    """Return the seconds of steps without progress. A regular end makes earlier steps final."""
    counts = dict(progress.steps)
    lengths = {at: seconds for at, seconds in progress.step_seconds if math.isfinite(seconds)}
    usual_length = statistics.median(lengths.values()) if lengths else 0.0
    kept_steps = redone_seconds = 0.0
    for (before_at, before), (after_at, after) in itertools.pairwise(progress.step):
        if any(before_at < gap.end and gap.begin < after_at for gap in unused):
            kept_steps = 0.0
            continue
        advance = after - before
        counted = [(at, counts.get(at, math.nan)) for at in (before_at, after_at)]
        steps = max(figures.rise(counted, is_from_zero=False), advance)
        lost = min(steps - advance, kept_steps + steps)  # At most all since the last regular end.
        kept_steps += steps - lost
        redone_seconds += lost * lengths.get(before_at, usual_length)
    return redone_seconds


def _seconds_in(points: Points, begin: float, every: float) -> float:
    # The first point that could exist is up to two intervals after `begin`. A later first one shows that the counter
    # began at 0 within the period.
    has_begun_within = bool(points) and points[0][0] > begin + 2.5 * every
    return figures.rise(points, is_from_zero=has_begun_within)


def _stalled(progress: ProgressPoints, before_first_step: Sequence[Stretch], every: float) -> float:
    # Starts count as restarts.
    limits = dict(progress.stall_limit)
    over = [(at, value) for at, value in progress.stall if value > limits.get(at, float("inf"))]
    stalls = figures.excursions(over, every, lambda _: True)
    return sum(
        stall.worst - figures.overlap(Stretch(stall.end - stall.worst, stall.end), before_first_step)
        for stall in stalls
    )
