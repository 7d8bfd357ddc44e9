"""What a training loop reports of itself: the calls of a `Medic` that carry no command.

Not here: what follows from the reports (``progress``), and what Prometheus is shown of it (``metrics``).
"""

from __future__ import annotations

import time
from typing import Any

from trainmedic.job.progress import Progress, Stall, Window
from trainmedic.job.reported_values import whole


class JobReports:
    """The reports of one process of a job. For the training thread, unless a method says otherwise."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

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
    ) -> None:
        """Report how a step went, once per step or every few steps. Values are numbers, or tensors of one element.

        All amounts and seconds are of the time since the last report: ``samples`` and ``tokens`` those that all ranks
        together were trained on, ``data_seconds`` the part in which this rank waited for its batches, ``wait_seconds``
        that in which it waited for other ranks, and ``own_seconds`` the rest without that, which shows the rank that
        holds up the others; of the last two, one is enough. ``expected_learning_rate`` is the rate of the schedule
        times Trainmedic's scale; a rate that differs from it is a mistake in the job. ``memory_bytes`` is the memory in
        use on an accelerator that is not a CUDA device. A call costs microseconds and never blocks: of reports that
        come faster than twenty a second, only that many have their tensors taken.
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

    def report_evaluation(self, loss: Any = None, perplexity: Any = None, step: int | None = None) -> None:
        """Report what an evaluation has shown. ``step`` is the training's, by default that of the last report."""
        self.progress.add_evaluation(loss, perplexity, whole(step))

    def window(self, name: str) -> Window:
        """``with medic.window("checkpoint"):``, or ``"evaluation"``: time that belongs to no step.

        It counts neither as step time nor as a hang, for half an hour; a pause for as long as it lasts. Windows
        nest. For the training thread only.
        """
        return Window(self.progress, name)

    def saved(self, step: int) -> None:
        """Say that a checkpoint of that step is complete now."""
        self.progress.saved(whole(step) or 0, time.time())

    def stall(self) -> Stall:
        """The time since the last completed step, without windows, and how long a time counts as a hang."""
        return self.progress.stall(time.perf_counter())
