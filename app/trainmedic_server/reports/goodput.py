"""Use of a job's time: losses by kind, without overlap; the rest is productive, including slow steps."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainmedic_server.ports.metric_history import Points
from trainmedic_server.reports import points as figures
from trainmedic_server.reports.points import Stretch

_SOON = 120.0
"""A failure this many seconds before a gap is its cause."""


@dataclass(frozen=True, slots=True)
class LostTime:
    """Seconds that went into no training step that still counts."""

    failures: float = 0.0
    restarts: float = 0.0
    """Downtime without a reported failure, and time before the first completed step."""
    redone: float = 0.0
    """Steps repeated after a rollback or restart."""
    checkpoints: float = 0.0
    evaluations: float = 0.0
    repairs: float = 0.0
    """The SDK's windows ``repair`` and ``pause``."""
    stalls: float = 0.0
    """No completed step beyond the job's own limit."""
    other: float = 0.0

    @property
    def total(self) -> float:
        return (
            self.failures
            + self.restarts
            + self.redone
            + self.checkpoints
            + self.evaluations
            + self.repairs
            + self.stalls
            + self.other
        )


@dataclass(frozen=True, slots=True)
class Goodput:
    """``ratio`` is productive time divided by wall time, 0 to 1: the effective training time ratio."""

    ratio: float
    wall_seconds: float
    """From the first appearance to the end, without unmeasured time."""
    productive_seconds: float
    lost: LostTime
    unmeasured_seconds: float = 0.0
    resolution_seconds: float = 0.0
    """Losses shorter than two intervals may be missed."""


@dataclass(frozen=True, slots=True)
class ProgressPoints:
    """Points `every` seconds apart. Counters begin at 0."""

    steps: Points
    step: Points = ()
    step_seconds: Points = ()
    stall: Points = ()
    stall_limit: Points = ()
    windows: Mapping[str, Points] = field(default_factory=dict)
    measured: Sequence[Stretch] = ()


@dataclass(frozen=True, slots=True)
class JobMoments:
    """Failures and regular ends of a job, in seconds since 1970."""

    failed: Sequence[float] = ()
    ended: Sequence[float] = ()
    restarted: Sequence[Stretch] = ()
    """From a reported failure to the next reported start, without overlaps."""


def goodput(progress: ProgressPoints, moments: JobMoments, begin: float, end: float, every: float) -> Goodput | None:
    """Return None if the job did not run from `begin` to `end`."""
    present = figures.stretches(progress.steps, every)
    if not present:
        return None
    measured = progress.measured or [Stretch(begin, end)]
    down = _down(present, moments, end, every)
    span = Stretch(present[0].begin, max([present[-1].end, *(stretch.end for stretch, _ in down)]))
    unused = sum(figures.overlap(gap, measured) for gap in _ended_between(present, moments))
    wall = figures.overlap(span, measured) - unused
    lost = _lost(progress, down, measured, _ended_between(present, moments), begin, every)
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


def _ended_between(present: Sequence[Stretch], moments: JobMoments) -> list[Stretch]:
    return [gap for gap in figures.gaps(present) if _last_word(gap, moments)[0] == "ended"]


def _down(present: Sequence[Stretch], moments: JobMoments, end: float, every: float) -> list[tuple[Stretch, bool]]:
    """Return downtimes, and whether a failure caused each.

    After the last point the job is down only if a failure was reported. Downtimes too short for a gap in the points
    come from reports.
    """
    down = [(stretch, True) for stretch in _too_short_to_show(present, moments, every)]
    for gap in figures.gaps(present):
        word, at = _last_word(gap, moments)
        if word != "ended":
            # The failed process did not fill its last interval.
            down.append((Stretch(min(at, gap.begin), gap.end), word == "failed"))
    rest = Stretch(present[-1].end, end)
    word, at = _last_word(rest, moments)
    if rest.seconds > 0 and word == "failed":
        down.append((Stretch(min(at, rest.begin), rest.end), True))
    return down


def _too_short_to_show(present: Sequence[Stretch], moments: JobMoments, every: float) -> list[Stretch]:
    short = [restart for restart in moments.restarted if restart.seconds < 2 * every]
    return [gone for gone in short if any(there.begin <= gone.begin and gone.end <= there.end for there in present)]


def _last_word(gap: Stretch, moments: JobMoments) -> tuple[str | None, float]:
    endings = [(at, "failed") for at in moments.failed] + [(at, "ended") for at in moments.ended]
    within = [(at, word) for at, word in endings if gap.begin - _SOON <= at <= gap.end]
    return (max(within)[1], min(within)[0]) if within else (None, gap.begin)


def _lost(
    progress: ProgressPoints,
    down: Sequence[tuple[Stretch, bool]],
    measured: Sequence[Stretch],
    ended: Sequence[Stretch],
    begin: float,
    every: float,
) -> LostTime:
    in_window = {name: _seconds_in(points, begin, every) for name, points in progress.windows.items()}
    starting = _starting(progress.steps, every)
    away = [stretch for stretch, _ in down]
    return LostTime(
        failures=sum(figures.overlap(stretch, measured) for stretch, by_failure in down if by_failure),
        restarts=sum(figures.overlap(stretch, measured) for stretch, by_failure in down if not by_failure)
        + sum(stretch.seconds - figures.overlap(stretch, away) for stretch in starting),
        redone=_redone(progress, ended),
        checkpoints=in_window.get("checkpoint", 0.0),
        evaluations=in_window.get("evaluation", 0.0),
        repairs=in_window.get("repair", 0.0) + in_window.get("pause", 0.0),
        stalls=_stalled(progress, starting, every),
        other=in_window.get("other", 0.0),
    )


def _redone(progress: ProgressPoints, ended: Sequence[Stretch]) -> float:
    counts = dict(progress.steps)
    lengths = {at: seconds for at, seconds in progress.step_seconds if math.isfinite(seconds)}
    usual = statistics.median(lengths.values()) if lengths else 0.0
    done = redone = 0.0
    for (before_at, before), (after_at, after) in itertools.pairwise(progress.step):
        if any(before_at < gap.end and gap.begin < after_at for gap in ended):
            done = 0.0
            continue
        further = after - before
        steps = max(figures.rise([(at, counts.get(at, math.nan)) for at in (before_at, after_at)], False), further)
        lost = min(steps - further, done + steps)
        done, redone = done + steps - lost, redone + lost * lengths.get(before_at, usual)
    return redone


def _seconds_in(points: Points, begin: float, every: float) -> float:
    return figures.rise(points, is_from_zero=_is_new(points, begin, every))


def _is_new(points: Points, begin: float, every: float) -> bool:
    return bool(points) and points[0][0] > begin + 1.5 * every


def _starting(steps: Points, every: float) -> list[Stretch]:
    return figures.stretches([(at, value) for at, value in steps if value == 0], every)


def _stalled(progress: ProgressPoints, starting: Sequence[Stretch], every: float) -> float:
    """Exclude starts, which count separately."""
    limits = dict(progress.stall_limit)
    over = [(at, value) for at, value in progress.stall if value > limits.get(at, float("inf"))]
    stalls = figures.excursions(over, every, lambda _: True)
    return sum(stall.worst - figures.overlap(Stretch(stall.end - stall.worst, stall.end), starting) for stall in stalls)
