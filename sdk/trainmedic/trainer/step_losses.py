"""The losses of a Trainer's steps, compared after a rollback with those of before.

They are each rank's own, as the framework hands them to its callbacks or takes them from ``training_step``: of each
step, and neither smoothed nor rounded for a log. Who calls it: ``rollback_proof`` and the loops. Not here: the
comparison (``trainmedic.job.loss_log``) and which losses come again (``torch.loss_course``).
"""

from __future__ import annotations

from typing import Any, Iterable, Mapping

from torch import nn

from trainmedic.job.loss_log import LossLog
from trainmedic.job.reported_values import is_one_number
from trainmedic.torch.learning_rate import marked_scale
from trainmedic.torch.loss_course import Return, begin_comparison


class StepLosses:
    """The losses of one training on this rank, over all restarts of its loop."""

    def __init__(self) -> None:
        self.log = LossLog()
        self.step = 0
        """Steps of the present course that are complete."""
        self._parts: list[Any] = []  # of the present step

    def add(self, loss: Any) -> None:
        """Take the loss of a step, or a part of it where several batches make a step."""
        if is_one_number(loss):
            self._parts.append(loss)

    def step_ends(self, step: int) -> None:
        """Note the loss of a step that is complete."""
        self.step = step
        parts, self._parts = self._parts, []
        if parts and step <= self.log.until:
            self.log.note(step, sum(parts))

    def kept(self, step: int, optimizers: Iterable[Any], accumulation: int) -> dict[str, Any]:
        """Return what a checkpoint of that step keeps, as JSON values. The losses that follow are noted."""
        self.log.expect_from(step)
        return {
            "losses": {**self.log.state(), "accumulation": accumulation},
            "lr_scale": marked_scale(optimizers),
        }

    def resumes(self, kept: Mapping[str, Any] | None, step: int) -> None:
        """A new process goes on at that step, from a checkpoint that has kept this."""
        self._parts, self.step = [], step
        self.log.restore((kept or {}).get("losses"), step)

    def go_back(
        self,
        kept: Mapping[str, Any] | None,
        step: int,
        models: Iterable[nn.Module],
        optimizers: Iterable[Any],
        accumulation: int,
        data: str,
        skipped: int,
        trouble_at: int | None,
    ) -> None:
        """The loop has gone back to the checkpoint of that step: compare from here on.

        ``data`` is what the answer says of the batches. ``trouble_at`` is the first step that was not trusted.
        """
        self._parts, self.step = [], step
        state, scale = kept or {}, marked_scale(optimizers)
        back = Return(
            step=step,
            data=data,
            skipped=skipped,
            accumulation=accumulation,
            accumulation_then=(state.get("losses") or {}).get("accumulation", accumulation),
            is_scaled_otherwise=state.get("lr_scale", scale) != scale,
            trouble_at=trouble_at,
        )
        begin_comparison(self.log, back, models)
