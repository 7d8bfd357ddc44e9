"""What a Trainer's callbacks are told, put together to one report per step.

The Trainer says the loss and the gradient norm only where it logs, and does so after the step's end: the report
of such a step waits for the log. Time for saving and evaluating is kept apart as windows. Who calls it: `callback`.
"""

from __future__ import annotations

from typing import Any

from trainmedic.client import Medic
from trainmedic.job.progress import CHECKPOINT, EVALUATION, Window


class StepReports:
    """Of one training; called in the order of the Trainer's events."""

    def __init__(self, medic: Medic) -> None:
        self._medic = medic
        self._pending: dict[str, Any] | None = None
        self._window: Window | None = None

    def step_ends(self, step: int, will_log: bool, samples: int, rate: Any, expected: Any) -> None:
        """``will_log``: the loss of this step comes with `logged`."""
        self._flush()
        self._pending = {
            "step": step,
            "samples": samples,
            "learning_rate": rate,
            "expected_learning_rate": expected,
        }
        if not will_log:
            self._flush()

    def logged(self, loss: Any, grad_norm: Any) -> None:
        if self._pending is not None:
            self._pending.update(loss=loss, grad_norm=grad_norm)
            self._flush()
        else:  # at the end of an epoch, of which the last step was reported already
            self._medic.progress.tell(loss, grad_norm)

    def expect(self, evaluation: bool, checkpoint: bool) -> None:
        """The Trainer is about to evaluate, or to save, or both in this order."""
        self._close()
        if evaluation or checkpoint:
            self._window = self._medic.window(EVALUATION if evaluation else CHECKPOINT).__enter__()

    def evaluated(self, will_save: bool) -> None:
        if self._window is not None:
            self.expect(False, will_save)

    def saved(self) -> None:
        self._close()

    def step_begins(self) -> None:
        """Or training ends: nothing more comes that belongs to the last step."""
        self._flush()
        self._close()

    def _flush(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._medic.report(**pending)

    def _close(self) -> None:
        if self._window is not None:
            self._window.__exit__(None, None, None)
            self._window = None
