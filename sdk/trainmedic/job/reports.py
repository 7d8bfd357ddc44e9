from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

from trainmedic.job import record_log
from trainmedic.job.detectors import LineHandler, name_of
from trainmedic.job.progress import Progress, Stall, Window
from trainmedic.job.record_log import RecordLog
from trainmedic.job.reported_values import whole
from trainmedic.wire import evaluations

log = logging.getLogger("trainmedic")

_LOSSES = ("loss", "perplexity")
_MOST_WARNED_METRICS = 100


class JobReports:
    """Reports of a job's process. Training thread only, unless stated otherwise."""

    def __init__(self, progress: Progress, records: RecordLog | None = None) -> None:
        self.progress = progress
        self.records = records
        self._warned_metrics: set[str] = set()

    def report(
        self,
        step: int | None = None,
        loss: Any = None,
        grad_norm: Any = None,
        learning_rate: Any = None,
        samples: float | None = None,
        expected_learning_rate: Any = None,
        memory_bytes: float | None = None,
        own_seconds: float | None = None,
        tokens: Any = None,
        data_seconds: float | None = None,
        wait_seconds: float | None = None,
        epoch: float | None = None,
    ) -> None:
        """Report a step, once per step or every few steps; never blocks. Values are numbers or tensors of one element.

        Amounts and seconds cover the time since the last report; ``samples`` and ``tokens`` are those of all ranks.
        ``data_seconds`` is this rank's wait for batches, ``wait_seconds`` for other ranks, ``own_seconds`` all but
        that; ``own_seconds`` or ``wait_seconds`` suffices. ``expected_learning_rate`` is the schedule's rate times
        Trainmedic's scale. ``memory_bytes`` is for accelerators other than CUDA, ``epoch`` for the records. Tensors
        are taken at most 20 times a second.
        """
        self.progress.add_report(
            step,
            loss,
            grad_norm,
            learning_rate,
            samples,
            time.perf_counter(),
            expected_learning_rate,
            memory_bytes,
            own_seconds,
            tokens,
            data_seconds,
            wait_seconds,
        )
        if self.records is not None and self.progress.steps >= self.records.due_at:
            self.records.note_step(loss, grad_norm, epoch)

    def report_evaluation(
        self, loss: Any = None, perplexity: Any = None, step: int | None = None, **metrics: Any
    ) -> None:
        """Report an evaluation after ``step`` (default: the last reported one).

        ``metrics`` are by name, such as ``accuracy=0.91`` or ``**{"mmlu/acc": 0.62}``. A name has at most 100 letters,
        digits and ``_./@:+-``, a job at most 32 names; others are skipped and logged. The server shows rank 0's
        reports, else the last rank's.
        """
        named = {name: value for name, value in metrics.items() if evaluations.NAME.match(name)}
        at, taken = self.progress.add_evaluation(loss, perplexity, whole(step), named)
        refused = [name for name, value in metrics.items() if value is not None and name not in taken]
        left_out = [name for name in refused if name not in self._warned_metrics]
        if left_out and len(self._warned_metrics) < _MOST_WARNED_METRICS:
            self._warned_metrics.update(left_out)
            log.warning(
                "report_evaluation() skips %s: a name has 1 to 100 letters, digits and _./@:+-, and a job has "
                "%d names at most",
                ", ".join(f"{name[:100]!r}" for name in left_out[:5]),
                evaluations.MOST,
            )
        if self.records is not None:
            of_loss = {name: value for name, value in taken.items() if name in _LOSSES}
            others = {name: value for name, value in taken.items() if name not in _LOSSES}
            self.records.note(record_log.EVALUATION, step=at, **of_loss, metrics=others or None)

    def window(self, name: str) -> Window:
        """Exclude the time in ``with medic.window("checkpoint"):`` or ``"evaluation"`` from step time.

        It can count as a hang only after ``startup_floor`` (half an hour), a window named ``"pause"`` never.
        Windows nest.
        """
        return Window(self.progress, name)

    def saved(self, step: int) -> None:
        """Thread-safe."""
        self.progress.saved(whole(step) or 0, time.time())
        if self.records is not None:
            self.records.note(record_log.CHECKPOINT, step=whole(step))

    def save_failed(self, step: int, reason: str) -> None:
        """Report that step's checkpoint as failed. Thread-safe."""
        if self.records is not None:
            self.records.note(record_log.CHECKPOINT_FAILED, record_log.ERROR, step=whole(step), reason=reason)

    def rollback_did_not_hold(self, command_id: str, step: int, reason: str) -> None:
        """Correct a rollback's answer ``applied``.

        ``training_rollback_not_held`` (alert TrainingRollbackNotHeld) is 1 until the next rollback; a record
        ``detected`` has the reason.
        """
        self.progress.rollback_not_held = True
        if self.records is not None:
            message = f"the rollback to step {step} does not hold: {reason}"
            self.records.note_detected("rollback", {"message": message, "command": command_id, "step": step})

    def log_file(self, path: str | os.PathLike[str], source: str = "training") -> None:
        """Name another log of this rank, such as ``trainer_log.jsonl``.

        The node's agent reads it if its policy allows. ``source`` is its name in log rules.
        """
        if self.records is not None:
            self.records.add_file(str(Path(path).absolute()), source)

    def detector(self, detector: Any = None, *, name: str | None = None) -> Any:
        """Register a detector: ``@medic.detector`` above a function of a record or a class with ``feed(record)``, or
        ``medic.detector(MyDetector(5_000), name="plateau")``. Returns its argument.

        It receives this rank's records (with a ``log_dir``) in another thread. A returned sentence, or mapping with
        ``message``, becomes a record ``detected``. Raises ConfigurationError for a taken name or an invalid argument.
        """
        if detector is None:
            return lambda given: self.detector(given, name=name)
        name = name if name is not None else name_of(detector)
        if self.records is None:
            log.warning("detector %s gets no records; set log_dir or TRAINMEDIC_LOG_DIR", name)
        else:
            self.records.detectors.add(name, detector)
        return detector

    def line_handler(self) -> logging.Handler:
        """Return a handler that passes the program's log to the detectors:
        ``logging.getLogger().addHandler(medic.line_handler())``.
        """
        return LineHandler(self.records.detectors if self.records is not None else None)

    def stall(self) -> Stall:
        return self.progress.stall(time.perf_counter())
