"""Reports of the training loop.

Values are converted when read, so that training never waits for a GPU.
"""

from __future__ import annotations

import math
import time
from datetime import datetime, timezone
from types import TracebackType
from typing import Any, Mapping, NamedTuple

from trainmedic.job.own_loss import OwnLoss
from trainmedic.job.pace import Interval, Pace
from trainmedic.job.reported_values import ReportRecord, detached, deviation, finite, kept, number, whole
from trainmedic.wire import evaluations
from trainmedic.wire.envelope import write_time
from trainmedic.wire.evaluations import EvaluatedMetric

HANG_FLOOR = 60.0
"""Seconds; slow reads from shared file systems take as long."""
STARTUP_FLOOR = 1800.0
"""Seconds; loading and compiling take minutes. Also the limit of a window, except a pause."""
HANG_FACTOR = 5.0  # Multiple of the usual interval between reports

CHECKPOINT = "checkpoint"
EVALUATION = "evaluation"
PAUSE = "pause"
REPAIR = "repair"
OTHER = "other"
WINDOWS = (CHECKPOINT, EVALUATION, PAUSE, REPAIR, OTHER)

TENSOR_INTERVAL = 0.05
"""Seconds between tensors: freeing a graph takes tens of microseconds."""
REPORT_INTERVAL = 0.25
"""Minimum seconds between full reports if values are tensors; steps between give only loss and gradient norm."""
OVERFLOWS = 20
"""Consecutive reports with overflowing gradients that a loss scaler no longer explains."""
_FEWEST_INTERVALS = 5  # before the usual interval counts
# Metrics in the presence, by their name there.
_SHOWN = {
    "learning_rate": "training_learning_rate",
    "samples_per_second": "training_throughput_samples_per_second",
    "tokens_per_second": "training_throughput_tokens_per_second",
}
_NAN = float("nan")


class Stall(NamedTuple):
    """Seconds since the last report, without windows, and the limit of a hang."""

    seconds: float
    limit: float

    @property
    def is_hang(self) -> bool:
        return self.seconds > self.limit


class OpenWindows(NamedTuple):
    names: tuple[str, ...]
    """Innermost last."""
    since: float
    """Last entry or exit."""
    before: float  # Seconds in windows until then


class Evaluation(NamedTuple):
    step: int | None
    loss: Any
    perplexity: Any


class Evaluated(NamedTuple):
    value: Any
    step: int | None
    at: float


class Progress:
    """Latest reported values. Only the training thread writes, except `checkpoint`."""

    __slots__ = (
        "_began",
        "_last_report",
        "_open_windows",
        "_reported_step",
        "checkpoint",
        "evaluated",
        "evaluation",
        "expected_learning_rate",
        "grad_norm",
        "hang_floor",
        "layer_norms",
        "learning_rate",
        "loss",
        "memory_bytes",
        "most_layers",
        "off_schedule_since",
        "own_loss",
        "pace",
        "ranks_differing",
        "reached",
        "record",
        "report_due_at",
        "rollback_not_held",
        "skips_overflows",
        "startup_floor",
        "step",
        "steps",
        "targets",
        "tensors_due_at",
        "window_seconds",
    )

    def __init__(
        self,
        now: float = 0.0,
        hang_floor: float = HANG_FLOOR,
        startup_floor: float = STARTUP_FLOOR,
        most_layers: int = 0,
    ) -> None:
        self.hang_floor = hang_floor
        self.startup_floor = startup_floor
        self.step: int | None = None
        self.steps = 0  # since the process began
        self._reported_step: int | None = None
        self.reached: tuple[int, int | None] = (0, None)
        """`steps` and last step, replaced as a whole."""
        self.loss: Any = None
        self.own_loss = OwnLoss()
        self.grad_norm: Any = None
        self.skips_overflows = False
        """True if a loss scaler skips updates whose gradients are not finite."""
        self.learning_rate: Any = None
        self.expected_learning_rate: Any = None
        self.off_schedule_since: float | None = None  # set by `recovery.health`
        self.memory_bytes: float | None = None
        self.evaluation: Evaluation | None = None  # last one with a loss or perplexity
        self.evaluated: Mapping[str, Evaluated] = {}  # newest value by metric
        self.targets: Mapping[str, float] = {}  # declared amounts per second, of `samples` and `tokens`
        self.most_layers = most_layers  # shown in metrics
        self.layer_norms: Mapping[str, Any] = {}  # gradient norms
        self.record = ReportRecord()  # at most one report per `TENSOR_INTERVAL`
        self.tensors_due_at = self.report_due_at = now  # next read of tensors; next whole report, see `torch.boundary`
        self.checkpoint: tuple[int, float] | None = None  # newest complete one: step, and Unix time
        self.rollback_not_held: bool | None = None
        """True if the last rollback, answered ``applied``, did not hold; None without a rollback."""
        self.ranks_differing: int | None = None  # ranks whose weights differ from most; None if not compared
        self.window_seconds = dict.fromkeys(WINDOWS, 0.0)
        self._began = now
        # Time of the last report and seconds in windows until then. Replaced as a whole for consistent reads.
        self._last_report: tuple[float, float] | None = None
        self.pace = Pace()
        self._open_windows = OpenWindows((), now, 0.0)

    # --- training thread --------------------------------------------------------------------------------

    def add_report(
        self,
        step: int | None,
        loss: Any,
        grad_norm: Any,
        learning_rate: Any,
        samples: float | None,
        now: float,
        expected_learning_rate: Any = None,
        memory_bytes: float | None = None,
        own_seconds: float | None = None,
        tokens: Any = None,
        data_seconds: float | None = None,
        wait_seconds: float | None = None,
    ) -> None:
        """Add a step's report, its tensors once per `TENSOR_INTERVAL`. A jump counts all steps in between."""
        if step is not None:
            step = whole(step)
        done = self.steps_covered_by(step)
        if step is not None:
            self.step = self._reported_step = step
        self.steps += done
        self.reached = (self.steps, self._reported_step)
        self.report_due_at = now + REPORT_INTERVAL
        self._take_values(self._reported_step, loss, grad_norm, now)
        if learning_rate is not None:
            self.learning_rate = learning_rate
        if expected_learning_rate is not None:
            self.expected_learning_rate = expected_learning_rate
        if memory_bytes is not None:
            self.memory_bytes = memory_bytes
        windows = self._open_windows
        in_windows = windows.before + (now - windows.since) if windows.names else windows.before
        last_report = self._last_report
        self._last_report = (now, in_windows)
        if last_report is not None:
            seconds = now - last_report[0] - (in_windows - last_report[1])
            self.pace.add(Interval(seconds, done, samples, tokens, own_seconds, data_seconds, wait_seconds))

    def add_values(self, step: int, loss: Any, grad_norm: Any, now: float) -> None:
        """Add values of a step that the next report counts too."""
        self.step = step
        self._take_values(step, loss, grad_norm, now)

    def _take_values(self, step: int | None, loss: Any, grad_norm: Any, now: float) -> None:
        takes_tensors = now >= self.tensors_due_at
        if takes_tensors:
            self.tensors_due_at = now + TENSOR_INTERVAL
        if loss is not None:
            own = self.own_loss
            if now >= own.due_at or type(loss) is float:
                own.note(step, loss, now)
            if type(loss) is float:
                self.loss = loss
            elif takes_tensors or not hasattr(loss, "detach"):
                self.loss = detached(loss)
        if grad_norm is not None:
            if type(grad_norm) is float:
                self.grad_norm = grad_norm
            elif takes_tensors or not hasattr(grad_norm, "detach"):
                self.grad_norm = detached(grad_norm)
        if takes_tensors:
            self._add_to_record(step, loss, grad_norm, now)

    def add_late_values(self, loss: Any, grad_norm: Any) -> None:
        """Add values of the last reported step."""
        if loss is not None:
            self.own_loss.note(self._reported_step, loss, time.perf_counter())
            self.loss = detached(loss)
        if grad_norm is not None:
            self.grad_norm = detached(grad_norm)
        self._add_to_record(self._reported_step, loss, grad_norm, time.perf_counter())

    def _add_to_record(self, step: int | None, loss: Any, grad_norm: Any, now: float) -> None:
        if step is not None and (loss is not None or grad_norm is not None):
            kept_loss = self.loss if loss is not None else None
            kept_norm = self.grad_norm if grad_norm is not None else None
            self.record.add(step, now, kept_loss, kept_norm)

    def steps_covered_by(self, step: int | None) -> int:
        last = self._reported_step
        return step - last if step is not None and last is not None and step > last else 1

    def begin_training(self, now: float) -> None:
        self.record.forget_after(-1)
        self.step = self._reported_step = self.checkpoint = self.evaluation = self.ranks_differing = None
        self.reached = (self.steps, None)
        self.loss = self.grad_norm = self.learning_rate = self.expected_learning_rate = self.off_schedule_since = None
        self.layer_norms = {}
        self.evaluated = {}
        self.own_loss.forget()
        self.tensors_due_at = self.report_due_at = now

    def go_back(self, step: int, loss: float | None) -> None:
        """Forget reports after `step`, whose loss is `loss`."""
        self.record.forget_after(step)
        self.own_loss.forget()
        self.loss, self.grad_norm, self.tensors_due_at = loss, None, 0.0

    def add_evaluation(
        self, loss: Any, perplexity: Any, step: int | None, metrics: Mapping[str, Any] | None = None
    ) -> tuple[int | None, Mapping[str, Any]]:
        """Add the results of an evaluation, by default after the last reported step.

        Return the step and the accepted values.
        """
        at = step if step is not None else self._reported_step
        # An evaluation with other metrics only does not concern the loss.
        if loss is not None or perplexity is not None or not metrics:
            self.evaluation = Evaluation(at, detached(loss), detached(perplexity))
        now, evaluated, taken = time.time(), dict(self.evaluated), {}
        for name, value in {"loss": loss, "perplexity": perplexity, **(metrics or {})}.items():
            if value is not None and (name in evaluated or len(evaluated) < evaluations.MOST):
                taken[name] = kept(value)
                evaluated[name] = Evaluated(taken[name], at, now)
        self.evaluated = evaluated
        return at, taken

    def saved(self, step: int, at: float) -> None:
        self.checkpoint = (step, at)

    def enter(self, name: str, now: float) -> None:
        windows = self._open_windows
        self._open_windows = OpenWindows(
            (*windows.names, name if name in WINDOWS else OTHER), now, self._count_window(windows, now)
        )

    def leave(self, now: float) -> None:
        windows = self._open_windows
        self._open_windows = OpenWindows(windows.names[:-1], now, self._count_window(windows, now))

    def _count_window(self, windows: OpenWindows, now: float) -> float:
        """Return the seconds in windows until `now`."""
        if not windows.names:
            return windows.before
        self.window_seconds[windows.names[-1]] += now - windows.since
        return windows.before + (now - windows.since)

    # --- any thread -------------------------------------------------------------------------------------

    def stall(self, now: float) -> Stall:
        windows = self._open_windows
        in_windows = windows.before
        if windows.names:
            lasting = now - windows.since
            # A pause is intended and has its own limit; another window that lasts too long is a stall.
            in_windows += lasting if windows.names[-1] == PAUSE else min(lasting, self.startup_floor)
        then, in_windows_then = self._last_report or (self._began, 0.0)
        seconds = max(now - then - (in_windows - in_windows_then), 0.0)
        usual = self.pace.usual_seconds(_FEWEST_INTERVALS)
        if usual is None:
            return Stall(seconds, self.startup_floor)
        return Stall(seconds, max(HANG_FACTOR * usual, self.hang_floor))

    @property
    def window(self) -> str | None:
        names = self._open_windows.names
        return names[-1] if names else None

    def seconds_in_windows(self, now: float) -> dict[str, float]:
        windows = self._open_windows
        seconds = dict(self.window_seconds)
        if windows.names:
            seconds[windows.names[-1]] += max(now - windows.since, 0.0)
        return seconds

    def evaluated_metrics(self) -> tuple[EvaluatedMetric, ...]:
        return tuple(
            EvaluatedMetric(name, finite(each.value), each.step, datetime.fromtimestamp(each.at, timezone.utc))
            for name, each in self.evaluated.items()
        )

    def values(self, now: float) -> dict[str, float]:
        """Return the known metric values by name; NaN if not finite.

        Some frameworks log a loss of 0.0 if its gradient norm is not finite; it becomes NaN.
        """
        grad_norm = number(self.grad_norm)
        loss = number(self.loss)
        if grad_norm is not None and math.isnan(grad_norm) and self._is_overflow():
            grad_norm = None
        if loss is not None and grad_norm is not None and math.isnan(grad_norm):
            loss = _NAN
        rate, expected = number(self.learning_rate), number(self.expected_learning_rate)
        values: dict[str, float | None] = {
            "training_loss": loss,
            "gradient_norm": grad_norm,
            "training_learning_rate": rate,
            "training_learning_rate_expected": expected,
            "training_learning_rate_deviation": deviation(rate, expected),
            "training_step_median_seconds": self.pace.median_step_seconds(),
            **self.pace.values(self.stall(now).seconds),
        }
        for amount, target in self.targets.items():
            values[f"training_target_{amount}_per_second"] = target
        if self.evaluation is not None:
            values["training_evaluation_step"] = self.evaluation.step
            values["training_evaluation_loss"] = number(self.evaluation.loss)
            values["training_evaluation_perplexity"] = number(self.evaluation.perplexity)
        return {name: value for name, value in values.items() if value is not None}

    def _is_overflow(self) -> bool:
        # A loss scaler explains non-finite gradients, unless they never become finite.
        last = self.record.last(OVERFLOWS) if self.skips_overflows else []
        is_first = 0 < len(last) < OVERFLOWS
        return is_first or any(finite(each.grad_norm) is not None for each in last)

    def shown(self, now: float) -> dict[str, Any]:
        """Return the presence's finite figures, and the newest checkpoint."""
        values = self.values(now)
        shown: dict[str, Any] = {
            name: values[metric] for name, metric in _SHOWN.items() if math.isfinite(values.get(metric, _NAN))
        }
        if self.checkpoint is not None:
            step, at = self.checkpoint
            shown["checkpoint"] = {"step": step, "at": write_time(datetime.fromtimestamp(at, timezone.utc))}
        return shown


class Window:
    __slots__ = ("_name", "_progress")

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress = progress
        self._name = name

    def __enter__(self) -> Window:
        self._progress.enter(self._name, time.perf_counter())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.leave(time.perf_counter())
