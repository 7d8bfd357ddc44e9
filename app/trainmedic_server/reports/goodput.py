"""How much of a job's time went into training, and where the rest went. Pure.

What is lost is counted, and what is left is productive: slow steps are steps. The parts do not overlap. Not here: how
well the GPUs were used meanwhile (``efficiency``), why steps are slow (``bottleneck``).
"""

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
"""Seconds before the process is missed within which a failure is what ended it."""


@dataclass(frozen=True, slots=True)
class LostTime:
    """Seconds that went into no training step which still counts."""

    failures: float = 0.0
    """The job was down, after it had failed or was gone."""
    restarts: float = 0.0
    """It was down without a failure that somebody told of, or had begun and not completed a step yet."""
    redone: float = 0.0
    """Steps of this time that had to be done again, because a rollback or a restart went back behind them."""
    checkpoints: float = 0.0
    evaluations: float = 0.0
    repairs: float = 0.0
    """Repairs and pauses, in the words of the SDK's windows."""
    stalls: float = 0.0
    """No step was completed for longer than the job's own limit."""
    other: float = 0.0
    """Windows of other names."""

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
    """``ratio`` is productive by wall time, 0 to 1: the effective training time ratio."""

    ratio: float
    wall_seconds: float
    """From when the job was first there to when it ended, or was last there; without time that nobody measured."""
    productive_seconds: float
    lost: LostTime
    unmeasured_seconds: float = 0.0
    """Prometheus itself has nothing of this time."""
    resolution_seconds: float = 0.0
    """Of an interval. What is shorter than two may be missed."""


@dataclass(frozen=True, slots=True)
class ProgressPoints:
    """What was measured of a job's progress: points that lie `every` seconds apart. Counters begin at 0."""

    steps: Points
    """Steps since its process began."""
    step: Points = ()
    """The number of its step."""
    step_seconds: Points = ()
    stall: Points = ()
    """The longest stall of each interval, in seconds."""
    stall_limit: Points = ()
    windows: Mapping[str, Points] = field(default_factory=dict)
    """The seconds in each kind of window since its process began."""
    measured: Sequence[Stretch] = ()
    """When Prometheus had anything at all."""


@dataclass(frozen=True, slots=True)
class JobMoments:
    """When a job has failed, or ended as it should; seconds since 1970."""

    failed: Sequence[float] = ()
    ended: Sequence[float] = ()
    restarted: Sequence[Stretch] = ()
    """From each failure that was told to the start that was told after it. They do not overlap."""


def goodput(progress: ProgressPoints, moments: JobMoments, begin: float, end: float, every: float) -> Goodput | None:
    """What the time from `begin` to `end` came to; None where the job was not there."""
    present = figures.stretches(progress.steps, every)
    if not present:
        return None
    measured = progress.measured or [Stretch(begin, end)]
    down = _down(present, moments, end, every)
    span = Stretch(present[0].begin, max([present[-1].end, *(stretch.end for stretch, _ in down)]))
    unused = sum(figures.overlap(gap, measured) for gap in _ended_between(present, moments))
    wall = figures.overlap(span, measured) - unused
    lost = _lost(progress, down, measured, _ended_between(present, moments), begin, every)
    # Where the parts are more than there was, as where each is a little too long, nothing was productive.
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
    """The gaps in which nobody waited for the job: it had ended as it should, and was started again later."""
    return [gap for gap in figures.gaps(present) if _last_word(gap, moments)[0] == "ended"]


def _down(present: Sequence[Stretch], moments: JobMoments, end: float, every: float) -> list[tuple[Stretch, bool]]:
    """When the job was down although it had not ended, and whether by a failure. After the last point it is down only
    where somebody has told that it failed. What is too short to show as a gap counts as it was told."""
    down = [(stretch, True) for stretch in _too_short_to_show(present, moments, every)]
    for gap in figures.gaps(present):
        word, at = _last_word(gap, moments)
        if word != "ended":
            # The last interval of the process that failed was not full of it.
            down.append((Stretch(min(at, gap.begin), gap.end), word == "failed"))
    rest = Stretch(present[-1].end, end)
    word, at = _last_word(rest, moments)
    if rest.seconds > 0 and word == "failed":
        down.append((Stretch(min(at, rest.begin), rest.end), True))
    return down


def _too_short_to_show(present: Sequence[Stretch], moments: JobMoments, every: float) -> list[Stretch]:
    """The times from a failure to the next start that need not leave any interval empty, and did not."""
    short = [told for told in moments.restarted if told.seconds < 2 * every]
    return [told for told in short if any(there.begin <= told.begin and told.end <= there.end for there in present)]


def _last_word(gap: Stretch, moments: JobMoments) -> tuple[str | None, float]:
    """What was told last of the process that was there before the gap, and when something was first; None and the gap's
    beginning where nothing was."""
    told = [(at, "failed") for at in moments.failed] + [(at, "ended") for at in moments.ended]
    within = [(at, word) for at, word in told if gap.begin - _SOON <= at <= gap.end]
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
    """The seconds of those steps within this time that lie behind a point to which the training went back: those that
    were made and brought it no further, each as long as steps were just before it went back. What begins anew after an
    end as it should be has not gone back."""
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
    """Whether the first of these points is not just the first that was asked for: then the process began there."""
    return bool(points) and points[0][0] > begin + 1.5 * every


def _starting(steps: Points, every: float) -> list[Stretch]:
    """When a process was there and had not completed a step yet."""
    return figures.stretches([(at, value) for at, value in steps if value == 0], every)


def _stalled(progress: ProgressPoints, starting: Sequence[Stretch], every: float) -> float:
    """The length of each stall that was over the limit then. What belongs to a start is counted there."""
    limits = dict(progress.stall_limit)
    over = [(at, value) for at, value in progress.stall if value > limits.get(at, float("inf"))]
    stalls = figures.excursions(over, every, lambda _: True)
    return sum(stall.worst - figures.overlap(Stretch(stall.end - stall.worst, stall.end), starting) for stall in stalls)
