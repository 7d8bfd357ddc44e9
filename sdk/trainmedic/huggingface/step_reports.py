"""One report per step, put together from what a Trainer tells its callbacks.

The Trainer says the loss and the gradient norm only where it logs, and does so after the step's end: the report
of such a step waits for the log. The time for saving and evaluating belongs to no step, and is reported as windows.
The `Callback` calls this.
"""

from __future__ import annotations

import contextlib
from typing import Any

from trainmedic.client import Medic
from trainmedic.job.progress import CHECKPOINT, EVALUATION


class StepReports:
    """The reports of one training. Its methods are called in the order of the Trainer's events."""

    def __init__(self, medic: Medic) -> None:
        self._medic = medic
        self._pending: dict[str, Any] | None = None
        self._window = contextlib.ExitStack()  # of the window that is open, if any
        self._evaluates = False

    def step_ends(self, will_log: bool, **figures: Any) -> None:
        """``figures`` are those of `Medic.report`. ``will_log``: the loss of this step comes with `logged`."""
        self._flush()
        self._pending = figures
        if not will_log:
            self._flush()

    def logged(self, loss: Any, grad_norm: Any) -> None:
        if self._pending is not None:
            self._pending.update(loss=loss, grad_norm=grad_norm)
            self._flush()
        else:  # the log at the end of an epoch, whose last step was reported already
            self._medic.progress.add_late_values(loss, grad_norm)

    def expect(self, evaluation: bool, checkpoint: bool) -> None:
        """The Trainer is about to evaluate, or to save, or both in this order."""
        self._window.close()
        self._evaluates = evaluation
        if evaluation or checkpoint:
            self._window.enter_context(self._medic.window(EVALUATION if evaluation else CHECKPOINT))

    def evaluated(self, will_save: bool) -> None:
        if self._evaluates:  # and it is not one that the script asked for, in the middle of a step
            self.expect(False, will_save)

    def saved(self) -> None:
        self._window.close()

    def step_begins(self) -> None:
        """Also called when training ends: nothing more comes that belongs to the last step."""
        self._flush()
        self._window.close()

    def _flush(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._medic.report(**pending)
