"""One report per step from a Trainer's events, which give loss and gradient norm after the step's end."""

from __future__ import annotations

import contextlib
from typing import Any

from trainmedic.client import Medic
from trainmedic.job.progress import CHECKPOINT, EVALUATION


class StepReports:
    def __init__(self, medic: Medic) -> None:
        self._medic = medic
        self._pending: dict[str, Any] | None = None  # figures of the step whose log follows
        self._window = contextlib.ExitStack()  # the open window, if any
        self._evaluates = False  # an evaluation by the Trainer follows the step

    def step_ends(self, will_log: bool, **figures: Any) -> None:
        """Report the step, with its log's values if that follows."""
        self._flush()
        self._pending = figures
        if not will_log:
            self._flush()

    def logged(self, loss: Any, grad_norm: Any) -> None:
        if self._pending is not None:
            self._pending.update(loss=loss, grad_norm=grad_norm)
            self._flush()
        else:  # the log at an epoch's end, whose last step was already reported
            self._medic.progress.add_late_values(loss, grad_norm)

    def expect(self, evaluation: bool, checkpoint: bool) -> None:
        # Opens the window of the first that follows the step.
        self._window.close()
        self._evaluates = evaluation
        if evaluation or checkpoint:
            self._window.enter_context(self._medic.window(EVALUATION if evaluation else CHECKPOINT))

    def evaluated(self, will_save: bool) -> None:
        if self._evaluates:  # not an evaluation by the script during a step
            self.expect(False, will_save)

    def saved(self) -> None:
        self._window.close()

    def step_begins(self) -> None:
        self._flush()
        self._window.close()

    def _flush(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._medic.report(**pending)
